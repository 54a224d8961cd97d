"""The benchmarks compare like with like: every variant has one loss and one gradient. No time is asserted."""

import numpy as np
import pytest
import torch

from benchmarks.speed import finetune_step, infoxlm_step, inputs, mlm_step, ours, peers
from benchmarks.speed.harness import OURS, Case, Unequal, compute_differences, measure, require_equal
from tests.toys.models import write_tokenizer

TOY = {"layers": 3, "hidden": 32, "ffn": 64, "heads": 2}
needs_fairseq = pytest.mark.skipif(peers.why_no_fairseq() is not None, reason=str(peers.why_no_fairseq()))


@pytest.mark.parametrize("shape", inputs.SHAPES)
def test_masked_lm_step_equals_that_of_the_peers(shape):
    case = mlm_step.compare_steps(shape, "500", rounds=0, size=TOY)

    assert case.equality["Hugging Face"]["gradient"] <= 1e-5
    assert ("fairseq" in case.equality) != ("fairseq" in case.skipped)


@needs_fairseq
def test_whole_step_equals_the_released_algorithm_in_all_objectives():
    case = infoxlm_step.compare_steps("ragged", "500", rounds=0, size=TOY, queue=64)

    assert case.equality["reference algorithm"]["worst tensor"] <= 1e-4


@needs_fairseq
def test_variants_are_still_equal_after_a_step():
    from benchmarks.speed.reference import Reference

    optimization = {"warmup_steps": 0, "learning_rate": 1e-3}
    config = inputs.make_config(TOY, contrast={"layer": 2, "queue_size": 64}, optimization=optimization)
    model = ours.make_model(config, 500)
    learner = ours.FixedBatchLearner(config, model)
    reference = Reference(config, model, learner.xlco.key_encoder, learner.xlco.queue)
    for group in reference.optimizer.param_groups:
        group["lr"] = 1e-3
    before = model.projection.detach().clone()
    batch = inputs.make_batch("ragged", 500, 0, ("mlm", "tlm", "xlco"))

    learner.take_step(batch)
    reference.take_step(reference.inputs(batch))

    assert reference.pointer == learner.xlco.queue.pointer
    torch.testing.assert_close(reference.queue, learner.xlco.queue.rows, atol=1e-4, rtol=0)
    torch.testing.assert_close(reference.key_projection, learner.xlco.key_encoder.projection, atol=1e-6, rtol=0)
    distance = (model.projection - before).norm()
    # The two Adams add epsilon in different places, so tiny gradients take different steps.
    assert (reference.projection - model.projection).norm() < 0.05 * distance


def test_fine_tuning_step_equals_that_of_hugging_face(tmp_path):
    write_tokenizer(tmp_path, bert=False)

    case = finetune_step.compare_steps(np.arange(4, 500), tmp_path, "32k", rounds=0, steps=1, size=TOY)

    assert case.equality["Trainer"]["gradient"] <= 1e-5
    assert case.inputs["padding"] == pytest.approx(0.39, abs=0.02)


def test_variant_that_computes_something_else_ends_the_benchmark():
    relative = compute_differences(2.0, {"a": torch.ones(3)}, 2.0, {"a": torch.tensor([1.0, 1.0, 1.1])})

    with pytest.raises(Unequal, match="gradient differs from them by"):
        require_equal("some step", "them", relative)
    with pytest.raises(Unequal, match="Only one variant has a gradient for b"):
        compute_differences(2.0, {"a": torch.ones(3), "b": torch.ones(1)}, 2.0, {"a": torch.ones(3)})


def test_variants_run_once_a_round_in_rotated_order(monkeypatch):
    monkeypatch.setattr("gc.collect", lambda: 0)  # it would take a second among the objects of all other tests
    calls = []
    case = Case("some work", {"tokens": 10})
    variants = {name: lambda number, name=name: calls.append((number, name)) for name in (OURS, "peer")}

    measure(case, variants, rounds=2)

    assert calls == [(0, OURS), (0, "peer"), (1, "peer"), (1, OURS), (2, OURS), (2, "peer")]
    assert len(case.ratios("peer")) == 2


def test_ratios_count_the_work_that_each_variant_did():
    case = Case("some work", cpu={OURS: [1.0], "peer": [2.0]}, work={OURS: [100.0], "peer": [50.0]})

    assert case.ratios("peer") == [4.0]

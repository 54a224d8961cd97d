"""The plan of a run equals what a run really takes, where that can be measured, and the published figures elsewhere."""

from pathlib import Path

import pytest
import torch

from infoxlm_core import run_file
from infoxlm_core.config import PretrainingConfig
from infoxlm_core.data.shards import open_shards
from infoxlm_core.errors import ConfigError, InputError
from infoxlm_core.model.encoder import Encoder, EncoderSize
from infoxlm_core.systems.infoxlm import plan
from infoxlm_core.systems.infoxlm.learner import InfoXLMLearner
from infoxlm_core.systems.infoxlm.system import build
from infoxlm_core.training.optimizer import make_adamw
from infoxlm_core.training.state import named_tensors
from tests.toys.pretraining import VOCABULARY, tiny_config

ROOT = Path(__file__).parents[4]
WORDS = 250_002


def named(name: str):
    return run_file.load(ROOT / f"configs/{name}.yaml").pretraining


def values(rows: list[plan.PlanRow]) -> dict[str, float]:
    return {row.name: row.value for row in rows}


def bytes_of(tensors) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def test_weights_optimizer_key_encoder_and_queue_take_the_bytes_of_the_plan(tiny_shards):
    config = tiny_config(optimization={"warmup_steps": 0})
    shards = open_shards(tiny_shards)
    model = build(config, shards)
    learner = InfoXLMLearner(config, model, shards)
    optimizer = make_adamw(model.parameters(), config.optimization)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()

    planned = values(plan.memory(config, VOCABULARY, gpus=1))

    parameters = list(model.parameters())
    assert planned["weights"] == bytes_of(parameters)
    assert planned["gradients"] == bytes_of([parameter.grad for parameter in parameters])
    assert planned["AdamW moments"] == bytes_of([t for state in optimizer.state.values() for t in state.values()])
    assert planned["key encoder"] == bytes_of(learner.xlco.key_encoder.parameters())
    assert planned["queue"] == bytes_of(
        [learner.xlco.queue.rows, learner.xlco.queue.sentence_ids, learner.xlco.queue.added_at_step]
    )
    saved = named_tensors(learner, optimizer)
    pointer = saved["learner/queue/pointer"].element_size()
    run = values(plan.plan(config, VOCABULARY, gpus=1).run)
    assert run["checkpoint"] == bytes_of(saved.values()) - pointer


def test_of_the_key_encoder_the_plan_counts_the_copies_in_bf16(tiny_shards):
    config, shards = tiny_config(), open_shards(tiny_shards)
    learner = InfoXLMLearner(config, build(config, shards), shards)
    ids, lengths = torch.full((4,), 5), (4,)
    with torch.autocast("cpu", torch.bfloat16):
        learner.xlco.key_encoder(ids, torch.arange(4), lengths)

    planned = [
        values(plan.memory(tiny_config(objectives={"xlco": weight}), VOCABULARY, gpus=1))["bf16 weights"]
        for weight in (0.0, 1.0)
    ]

    assert planned[1] - planned[0] == bytes_of(learner.xlco.key_encoder.buffers()) > 0


def test_a_layer_keeps_the_bytes_of_the_plan_for_each_token():
    d, tokens, lengths = 128, 1536, (48,) * 32
    encoder = Encoder(EncoderSize(VOCABULARY, layers=2, hidden=d, ffn=4 * d, heads=2, positions=50))
    weights = {shape for p in encoder.parameters() for shape in (p.shape, p.T.shape if p.dim() == 2 else p.shape)}
    kept = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    hidden = torch.randn(tokens, d, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        encoder.run(hidden, lengths, 0, 2)
        found = sum(storage.nbytes() for storage in kept.values()) / (tokens * 2 * d)
        kept.clear()
        encoder.recompute = True
        encoder.run(hidden, lengths, 0, 2)

    assert found == pytest.approx(plan.ACTIVATION_BYTES, rel=0.02)
    assert sum(storage.nbytes() for storage in kept.values()) / (tokens * 2 * d) == 2


@pytest.mark.parametrize(
    ("name", "exported", "projection"), [("base", 278_295_186, 768**2), ("large", 560_142_482, 1024**2)]
)
def test_parameters_are_those_of_xlmr_and_the_projection(name, exported, projection):
    found = values(plan.plan(named(name), WORDS).parameters)

    assert found["exported"] == exported
    assert found["contrast projection"] == projection
    assert found["encoder"] + found["masked-LM head"] == exported - (768 if name == "base" else 1024)


@pytest.mark.parametrize(("name", "long", "short"), [("base", 1.674, 0.645 * 1.507), ("large", 4.926, 1.904 * 1.507)])
def test_a_step_of_the_papers_runs_takes_the_flops_of_the_formula(name, long, short):
    config = named(name)
    sizes = plan.size_of(config, WORDS)

    found = [plan.step_flops(config, sizes, shape) / 1e15 for shape in (plan.LONG, plan.SHORT)]

    assert found[0] == pytest.approx(long, abs=5e-4)
    assert found[1] == pytest.approx(short, rel=2e-3)


@pytest.mark.parametrize(("compiled", "mfu"), [(True, 0.4), (False, 0.25)])
def test_the_hours_of_a_run_are_its_flops_at_the_assumed_utilisation(compiled, mfu):
    config = named("base")
    config = config.model_copy(update={"model": config.model.model_copy(update={"compiled": compiled})})

    run = values(plan.plan(config, WORDS, gpus=8).run)

    assert run["long sequences"] == pytest.approx(150_000 * 1.674e15 / (mfu * 8 * 989e12) / 3600, rel=1e-3)


def test_tokens_queue_turnover_and_all_reduce_of_a_step():
    found = values(plan.plan(named("base"), WORDS, gpus=8).steps)

    assert found["long sequences"] == 2048 * (512 + 512 + 2 * 128)
    assert found["queue turnover"] == 64
    assert found["all-reduce"] == 4 * (278_295_186 - 768 + 768**2)
    assert values(plan.plan(named("base"), WORDS, gpus=1).steps)["all-reduce"] == 0


def test_the_plan_reads_as_lines_and_an_unknown_gpu_or_number_is_refused():
    lines = "\n".join(plan.describe(plan.plan(named("base15"), WORDS, 8, "h100")))

    assert "278,295,186" in lines and "1.674 PFLOP" in lines and "64.0 steps" in lines
    with pytest.raises(InputError, match="gpu 'abacus' is not known: give one of A100, B200, H100"):
        plan.plan(named("base"), WORDS, gpu="abacus")
    for count in (0, 257, 10**30):
        with pytest.raises(InputError, match=rf"gpus {count}: give 1 to 256 \(pretraining\.batches\.virtual_shards\)"):
            plan.plan(named("base"), WORDS, gpus=count)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"contrast": {"queue_size": 10**12}}, r"of which queue 3\.1 PB, .*: lower pretraining\.contrast\.queue_size"),
        (
            {"model": {"hidden": 2**17, "heads": 8, "layers": 1000}},
            r"moments .* TB, .*: lower pretraining\.model",
        ),
    ],
)
def test_a_run_that_no_memory_holds_is_refused_before_anything_is_allocated(changes, said):
    config = PretrainingConfig.parse(changes)

    with pytest.raises(ConfigError, match=said):
        plan.check_memory(config, EncoderSize.of(config.model, WORDS), 256e9)

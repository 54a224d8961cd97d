"""Contrast in the step: its loss, the queue and the key encoder, and every switch (items A8, A10, A12, A13, A27)."""

from collections import Counter

import numpy as np
import pytest
import torch

from infoxlm_core.data.batches import pack_micro_batches
from infoxlm_core.data.samples import Sampler
from infoxlm_core.data.shards import open_shards
from infoxlm_core.model import devices
from infoxlm_core.stages.pretraining import pretrain
from infoxlm_core.systems.infoxlm.learner import InfoXLMLearner
from infoxlm_core.systems.infoxlm.system import build
from infoxlm_core.training import distributed, optimizer, tracker
from infoxlm_core.training.state import Progress
from infoxlm_core.training.step import train_step
from tests.toys.pretraining import VOCABULARY, tiny_config

ONLY_CONTRAST = {"objectives": {"mlm": 0, "tlm": 0}, "batches": {"micro_batch_size": 8}}


@pytest.fixture
def learner_of(tiny_shards):
    """Return a function that makes a learner by changes of the tiny config."""

    def create(**changes) -> InfoXLMLearner:
        config = tiny_config(**changes)
        shards = open_shards(tiny_shards)
        learner = InfoXLMLearner(config, build(config, shards), shards)
        with torch.no_grad():  # initial weights are so small that all vectors look alike
            for parameter in learner.module.parameters():
                parameter.normal_(0, 0.5, generator=torch.Generator().manual_seed(parameter.numel()))
        learner.after_step(0)
        return learner

    return create


def take_steps(learner: InfoXLMLearner, count: int = 1, step: int = 0) -> dict[str, float]:
    """Take optimizer steps from `step` on, and return the metrics of the last one."""
    adam = optimizer.make_adamw(learner.module.parameters(), learner.config.optimization)
    progress = Progress(step=step)
    for _ in range(count):
        batches = learner.batches(progress.step)
        metrics, _ = train_step(learner, adam, learner.config.optimization, progress, batches)
    return metrics


@torch.no_grad()
def compute_queries_and_keys(learner: InfoXLMLearner) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the queries and keys (B, d) of the only micro-batch of step 0."""
    (batch,) = learner.batches(0)
    keys = learner.xlco.key_encoder(batch.key_ids, batch.key_positions, batch.key_lengths)
    return learner.module(batch).queries, keys


@pytest.mark.usefixtures("in_fp64")
@pytest.mark.item("A1")
def test_loss_of_a_step_is_the_mean_of_the_formula(learner_of):
    learner = learner_of(**ONLY_CONTRAST, contrast={"false_negatives": "off"})
    queries, keys = compute_queries_and_keys(learner)
    temperature = learner.config.contrast.temperature
    positive = (queries * keys).sum(1) / temperature
    negatives = queries @ learner.xlco.queue.rows.T / temperature
    expected = (torch.logsumexp(torch.cat([positive[:, None], negatives], 1), 1) - positive).mean()

    assert take_steps(learner)["loss/xlco"] == pytest.approx(expected.item(), rel=1e-9)


@pytest.mark.usefixtures("in_fp64")
@pytest.mark.parametrize("symmetric", [False, True])
def test_in_batch_negatives_symmetry_and_margin_follow_their_formula(learner_of, symmetric):
    switches = {"false_negatives": "off", "in_batch_negatives": True, "margin": 0.3, "symmetric": symmetric}
    learner = learner_of(**ONLY_CONTRAST, contrast=switches)
    queries, keys = compute_queries_and_keys(learner)  # with `symmetric` 8 items, then the same 8 from the other side
    temperature = learner.config.contrast.temperature
    queue = learner.xlco.queue.rows.clone()
    item_losses = []
    for row in range(len(queries)):
        other_items = [other for other in range(len(queries)) if other % 8 != row % 8]
        positive = (queries[row] @ keys[row] - 0.3) / temperature
        negatives = torch.cat([queue, keys[other_items]]) @ queries[row] / temperature
        item_losses.append(torch.logsumexp(torch.cat([positive[None], negatives]), 0) - positive)
    similarity = ((queries * keys).sum(1) / temperature).mean()

    metrics = take_steps(learner)

    assert len(queries) == (16 if symmetric else 8)
    assert metrics["loss/xlco"] == pytest.approx(torch.stack(item_losses).mean().item(), rel=1e-9)
    assert metrics["xlco/positive_logit"] == pytest.approx(similarity.item(), rel=1e-9)  # without the margin
    is_replaced = (learner.xlco.queue.rows != queue).any(1)
    assert is_replaced.tolist() == [True] * 8 + [False] * 24  # only the keys of the first direction


@pytest.mark.item("A10")
@pytest.mark.parametrize("size", [5, 37])
def test_queue_starts_with_real_keys_in_all_its_rows(learner_of, size):
    learner = learner_of(contrast={"queue_size": size})
    other_learner = learner_of(contrast={"queue_size": 64})
    keys = []
    for number in range(-(-size // 8)):  # the reserved stream, one global batch after the other
        for batch in pack_micro_batches(learner.sampler.draw_for_queue(number, range(4)), 4):
            keys.append(learner.xlco.key_encoder(batch.key_ids, batch.key_positions, batch.key_lengths))

    assert torch.equal(learner.xlco.queue.rows, torch.cat(keys)[:size])
    assert learner.xlco.queue.pointer == 0
    assert (learner.xlco.queue.sentence_ids != 0).all()
    batches = zip(learner.batches(0), other_learner.batches(0), strict=True)
    assert all(torch.equal(batch.ids, other_batch.ids) for batch, other_batch in batches)
    take_steps(learner)
    assert learner.xlco.queue.rows.shape == (size, 16)


@pytest.mark.usefixtures("in_fp64")
@pytest.mark.item("A13")
def test_loss_depends_on_the_micro_batch_only_if_keys_are_enqueued_with_it(learner_of):
    losses = {}
    for enqueue in ("step", "micro_batch"):  # the released code enqueues with each micro-batch
        for size in (8, 2):
            batches = {"micro_batch_size": size}
            learner = learner_of(objectives={"mlm": 0, "tlm": 0}, batches=batches, contrast={"enqueue": enqueue})
            losses[enqueue, size] = take_steps(learner)["loss/xlco"]

    assert losses["step", 2] == pytest.approx(losses["step", 8], rel=1e-9)
    assert losses["micro_batch", 2] != pytest.approx(losses["micro_batch", 8], rel=1e-5)


@pytest.mark.item("A12")
@pytest.mark.parametrize("false_negatives", ["overlap", "exact"])
def test_corpus_smaller_than_the_queue_has_finite_losses_and_excludes_equal_pairs(learner_of, false_negatives):
    contrast = {"queue_size": 512, "false_negatives": false_negatives, "mixup": 0.0}
    learner = learner_of(contrast=contrast, optimization={"steps": 40})

    for step in range(40):  # two epochs of 130 pairs; the queue holds each pair about four times
        assert np.isfinite(take_steps(learner, step=step)["loss/xlco"])

    batch = learner.batches(40)[0]
    is_excluded = learner.xlco.find_excluded_keys(batch.sentence_ids, learner.xlco.queue.sentence_ids)
    queue_ids = learner.xlco.queue.sentence_ids[:, 0]
    assert torch.equal(is_excluded, batch.sentence_ids[:, :1] == queue_ids)
    assert is_excluded.any()


def test_corrupted_views_mask_a_share_of_their_tokens_without_targets(tiny_shards):
    batches = {"global_batch_size": 400, "virtual_shards": 1}
    draws = []
    for share in (0.0, 0.15):
        config = tiny_config(contrast={"corruption": share}, batches=batches)
        draws.append(Sampler(open_shards(tiny_shards), config).draw(0, range(1)))
    clean, corrupted = draws

    for name in ("queries", "keys"):
        clean_ids = getattr(clean.xlco, name).flat
        corrupted_ids = getattr(corrupted.xlco, name).flat
        changed_share = (clean_ids != corrupted_ids).mean()
        assert changed_share == pytest.approx(0.15 * 0.9, abs=0.02)  # a tenth of the chosen tokens stay as they are
        assert (corrupted_ids == VOCABULARY - 1).mean() == pytest.approx(0.15 * 0.8, abs=0.02)
    assert np.array_equal(clean.mlm.masked_ids, corrupted.mlm.masked_ids)


def test_next_partner_is_the_following_pair_of_the_file(tiny_shards):
    shards = open_shards(tiny_shards)
    sampler = Sampler(shards, tiny_config(contrast={"partner": "next"}))
    following_ids = {}
    for tables in shards.pairs.values():
        for table in tables:
            ids = table.read_pairs().sentence_ids
            following_ids |= dict(zip(ids.tolist(), np.roll(ids, -1).tolist(), strict=True))

    for step in range(5):
        for sentence_id, partner_id in sampler.draw(step, range(4)).xlco.sentence_ids.tolist():
            assert following_ids[sentence_id] == partner_id


def test_contrast_that_starts_later_has_a_full_queue(tiny_shards, tmp_path):
    config = tiny_config(contrast={"start_step": 3})
    pretrain(config, tiny_shards, tmp_path / "out", tmp_path / "run")

    points = dict(tracker.read(tmp_path / "run" / tracker.METRICS))
    assert ["loss/xlco" in points[step] for step in range(1, 7)] == [False] * 3 + [True] * 3
    assert points[4]["queue/age"] == 0.75  # 8 keys of this step, 24 of the start, one step ago


@pytest.mark.parametrize("enqueue", ["step", "micro_batch"])
def test_age_of_the_queue_counts_optimizer_steps(learner_of, enqueue):
    learner = learner_of(contrast={"enqueue": enqueue}, batches={"micro_batch_size": 2})

    metrics = take_steps(learner, count=4)

    assert metrics["queue/age"] == 1.5  # 8 keys each of this step and of the three before


@pytest.mark.item("A27")
def test_each_ablation_is_one_setting_that_changes_the_losses(learner_of):
    switches = {"InfoXLM": {}, "-Momentum": {"momentum": 0.0}, "-Mixup": {"mixup": 0.0}, "-Universal": {"layer": 2}}

    losses = {name: take_steps(learner_of(contrast=switch), count=3)["loss/xlco"] for name, switch in switches.items()}

    assert len(set(losses.values())) == 4
    assert take_steps(learner_of(contrast={"mixup": 0.0}), count=3)["loss/xlco"] == losses["-Mixup"]


@pytest.mark.item("A27")
def test_without_momentum_the_key_encoder_equals_the_query_encoder_after_each_step(learner_of):
    learner = learner_of(contrast={"momentum": 0.0})

    take_steps(learner)

    query_parameters = dict(learner.module.named_parameters())
    for name, parameter in learner.xlco.key_encoder.named_parameters():
        assert torch.equal(parameter, query_parameters[name]), name


@pytest.mark.item("A8")
def test_skipped_step_leaves_the_key_encoder_and_a_good_step_updates_it_once(learner_of):
    learner = learner_of(contrast={"momentum": 0.9})
    projection = learner.xlco.key_encoder.projection.clone()

    learner.after_step(1, good=False)
    assert torch.equal(learner.xlco.key_encoder.projection, projection)
    take_steps(learner)

    expected = projection + 0.1 * (learner.module.projection.detach() - projection)
    torch.testing.assert_close(learner.xlco.key_encoder.projection, expected, atol=1e-6, rtol=0)


@pytest.mark.usefixtures("in_fp64")
@pytest.mark.parametrize(("objective", "groups_field"), [("mlm", "target_group_ids"), ("xlco", "view_group_ids")])
def test_mean_of_the_losses_by_language_is_the_loss(learner_of, objective, groups_field):
    learner = learner_of()
    groups = torch.cat([getattr(batch, groups_field) for batch in learner.batches(0)])
    metrics = take_steps(learner)

    counts = Counter()
    for number, group in enumerate(learner.sampler.group_names):
        if group.startswith(objective):
            count = (groups == number).sum().item()
            counts[f"loss_{group.rpartition('/')[0]}"] += count
            assert metrics.get(f"targets/{group}", 0) == count
    loss_by_language = {name: value for name, value in metrics.items() if name.startswith(f"loss_{objective}/")}
    assert len(loss_by_language) == 2
    mean = sum(counts[name] * loss for name, loss in loss_by_language.items()) / counts.total()
    assert mean == pytest.approx(metrics[f"loss/{objective}"], rel=1e-9)


def test_bf16_training_on_batches_for_a_gpu_follows_fp32_training(learner_of, monkeypatch, caplog):
    def train(precision: str, is_padded: bool) -> list[dict[str, float]]:
        learner = learner_of(
            optimization={"learning_rate": 0.1, "warmup_steps": 0},
            model={"layers": 2, "hidden": 16, "ffn": 32, "heads": 2, "max_tokens": 32, "precision": precision},
        )
        with torch.no_grad():
            for parameter in learner.module.parameters():
                parameter.mul_(0.4)
        adam = optimizer.make_adamw(learner.module.parameters(), learner.config.optimization)
        progress = Progress()
        curve = []
        for _ in range(8):
            batches = [batch.pad_for_gpu(16, 1) if is_padded else batch for batch in learner.batches(0)]
            curve.append(train_step(learner, adam, learner.config.optimization, progress, batches)[0])
        return curve

    monkeypatch.setattr(devices, "cpu_multiplies_bf16", lambda: False)
    fp32_curve = train("auto", is_padded=False)
    assert "no instructions" not in caplog.text
    bf16_curve = train("bf16", is_padded=True)

    assert "no instructions" in caplog.text
    fp32_losses = [metrics["loss/mlm"] for metrics in fp32_curve]
    bf16_losses = [metrics["loss/mlm"] for metrics in bf16_curve]
    assert fp32_losses[-1] < 0.95 * fp32_losses[0]
    assert bf16_losses == pytest.approx(fp32_losses, rel=0.0015)  # 0.0055 if layers kept their initial weights
    # the first gradient: some 16 roundings a layer, forward and backward, each off by 2^-9 / sqrt(3) on average
    fp32_norm = fp32_curve[0]["gradient_norm"]
    bf16_norm = bf16_curve[0]["gradient_norm"]
    assert bf16_norm != fp32_norm
    assert bf16_norm == pytest.approx(fp32_norm, rel=32**0.5 * 2**-9 / 3**0.5)


@pytest.mark.usefixtures("in_fp64")
def test_losses_with_dropout_do_not_depend_on_the_number_of_workers(tiny_shards, monkeypatch):
    config = tiny_config(model={"dropout": 0.2})
    shards = open_shards(tiny_shards)
    learner = InfoXLMLearner(config, build(config, shards), shards)
    learner.after_step(0)
    scales = dict.fromkeys(learner.weights.by_name, 1.0)

    losses = []
    for worker_count in (1, 2, 4):
        monkeypatch.setattr(distributed, "world_size", lambda count=worker_count: count)
        learner.shares = distributed.shares(config.batches.virtual_shards)  # as a learner of so many workers has
        loss = 0.0
        for rank in range(worker_count):
            monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
            loss += sum(learner.losses(batch, scales)[1]["mlm"].item() for batch in learner.batches(0))
        losses.append(loss)

    assert losses == pytest.approx([losses[0]] * 3, rel=1e-9)

"""Contrast in the step: the queue's place in it, and every switch of it (items A8, A10 - A13, A27)."""

from collections import Counter

import numpy as np
import pytest
import torch

from infoxlm_core.data.batches import micro_batches
from infoxlm_core.data.samples import Sampler
from infoxlm_core.data.shards import open_shards
from infoxlm_core.model import devices
from infoxlm_core.stages.pretraining import pretrain
from infoxlm_core.systems.infoxlm.learner import InfoXLMLearner
from infoxlm_core.systems.infoxlm.system import build
from infoxlm_core.training import distributed, optimizer, tracker
from infoxlm_core.training.state import Progress
from infoxlm_core.training.step import train_step
from tests.helpers.curves import losses
from tests.toys.pretraining import VOCABULARY, tiny_config


@pytest.fixture
def learner_of(tiny_shards):
    def make(**changes) -> InfoXLMLearner:
        config, shards = tiny_config(**changes), open_shards(tiny_shards)
        learner = InfoXLMLearner(config, build(config, shards), shards)
        with torch.no_grad():  # first weights are so small that all vectors look alike
            for parameter in learner.module.parameters():
                parameter.normal_(0, 0.5, generator=torch.Generator().manual_seed(parameter.numel()))
        learner.after_step(0)
        return learner

    return make


def step(learner: InfoXLMLearner, number: int = 0) -> dict[str, float]:
    adam = optimizer.make_adamw(learner.module.parameters(), learner.config.optimization)
    return train_step(learner, adam, learner.config.optimization, Progress(step=number), learner.batches(number))[0]


ALONE = {"objectives": {"mlm": 0, "tlm": 0}, "batches": {"micro_batch_size": 8}}


def by_hand(
    learner: InfoXLMLearner, queries: torch.Tensor, keys: torch.Tensor, negatives: torch.Tensor
) -> torch.Tensor:
    """-q.k / tau + logsumexp over the key and the negatives, item by item."""
    tau = learner.config.contrast.temperature
    positive = (queries * keys).sum(1) / tau
    return torch.logsumexp(torch.cat([positive[:, None], queries @ negatives.T / tau], 1), 1) - positive


@torch.no_grad()
def vectors(learner: InfoXLMLearner) -> tuple[torch.Tensor, torch.Tensor]:
    (batch,) = learner.batches(0)
    return learner.module(batch).queries, learner.xlco.key_encoder(
        batch.key_ids, batch.key_positions, batch.key_lengths
    )


@pytest.mark.usefixtures("in_fp64")
@pytest.mark.item("A1")
def test_the_loss_of_a_step_is_the_mean_of_the_formula(learner_of):
    learner = learner_of(**ALONE, contrast={"false_negatives": "off"})
    queries, keys = vectors(learner)
    expected = by_hand(learner, queries, keys, learner.xlco.queue.rows.clone()).mean()

    assert step(learner)["loss/xlco"] == pytest.approx(expected.item(), rel=1e-9)


@pytest.mark.usefixtures("in_fp64")
def test_symmetric_contrast_is_half_of_each_direction_and_enqueues_only_the_targets(learner_of):
    learner = learner_of(**ALONE, contrast={"false_negatives": "off", "symmetric": True})
    queries, keys = vectors(learner)  # 8 items, then the same 8 from the other side
    rows = learner.xlco.queue.rows.clone()
    expected = by_hand(learner, queries, keys, rows).view(2, 8).mean()
    forward = by_hand(learner, queries[:8], keys[:8], rows).mean()

    figures = step(learner)

    assert figures["loss/xlco"] == pytest.approx(expected.item(), rel=1e-9)
    assert expected.item() != pytest.approx(forward.item(), rel=1e-6)
    replaced = (learner.xlco.queue.rows != rows).any(1)
    assert replaced.sum() == 8 and replaced[:8].all()


@pytest.mark.usefixtures("in_fp64")
def test_in_batch_negatives_are_the_other_keys_of_the_micro_batch(learner_of):
    learner = learner_of(**ALONE, contrast={"false_negatives": "off", "in_batch_negatives": True})
    queries, keys = vectors(learner)
    others = [keys[[j for j in range(8) if j != i]] for i in range(8)]
    expected = torch.cat(
        [
            by_hand(learner, queries[i : i + 1], keys[i : i + 1], torch.cat([learner.xlco.queue.rows, others[i]]))
            for i in range(8)
        ]
    ).mean()

    assert step(learner)["loss/xlco"] == pytest.approx(expected.item(), rel=1e-9)


@pytest.mark.usefixtures("in_fp64")
def test_the_margin_applies_to_the_translations_of_both_directions_and_not_to_the_logged_similarity(learner_of):
    switches = {"false_negatives": "off", "symmetric": True, "in_batch_negatives": True}
    learner = learner_of(**ALONE, contrast={**switches, "margin": 0.3})
    queries, keys = vectors(learner)  # 8 items, then the same 8 from the other side
    tau, rows = learner.config.contrast.temperature, learner.xlco.queue.rows.clone()
    losses = []
    for i in range(16):
        sides_of_item_i = (i, (i + 8) % 16)
        others = [j for j in range(16) if j not in sides_of_item_i]
        translation = (queries[i] @ keys[i] - 0.3) / tau
        negatives = torch.cat([rows, keys[others]]) @ queries[i] / tau
        losses.append(torch.logsumexp(torch.cat([translation[None], negatives]), 0) - translation)
    expected = torch.stack(losses).mean()
    similarity = ((queries * keys).sum(1) / tau).mean()

    figures = step(learner)

    assert figures["loss/xlco"] == pytest.approx(expected.item(), rel=1e-9)
    assert figures["xlco/positive_logit"] == pytest.approx(similarity.item(), rel=1e-9)


@pytest.mark.item("A10")
@pytest.mark.parametrize("size", [5, 8, 32, 37])
def test_the_queue_begins_with_as_many_real_keys_as_it_has_rows(learner_of, size):
    learner = learner_of(contrast={"queue_size": size})
    expected = []
    for number in range(-(-size // 8)):  # the reserved stream, one global batch after the other
        for batch in micro_batches(learner.sampler.draw(f"prefill {number}", range(4), only="xlco"), 4):
            expected.append(learner.xlco.key_encoder(batch.key_ids, batch.key_positions, batch.key_lengths))

    assert torch.equal(learner.xlco.queue.rows, torch.cat(expected)[:size])
    assert learner.xlco.queue.pointer == 0 and (learner.xlco.queue.sentence_ids != 0).all()
    other = learner_of(contrast={"queue_size": 64})
    assert all(torch.equal(a.ids, b.ids) for a, b in zip(learner.batches(0), other.batches(0), strict=True))
    step(learner)
    assert learner.xlco.queue.rows.shape == (size, 16)


@pytest.mark.usefixtures("in_fp64")
@pytest.mark.item("A13")
def test_only_when_keys_are_enqueued_once_a_step_does_the_micro_batch_not_matter(learner_of):
    def losses_of(enqueue: str) -> list[float]:
        return [
            step(learner_of(objectives={"mlm": 0, "tlm": 0}, batches={"micro_batch_size": size},
                            contrast={"enqueue": enqueue}))["loss/xlco"]
            for size in (8, 2)
        ]  # fmt: skip

    whole, split = losses_of("step")
    assert split == pytest.approx(whole, rel=1e-9)
    whole, split = losses_of("micro_batch")  # the released code: keys of one micro-batch are negatives of the next
    assert split != pytest.approx(whole, rel=1e-5)


@pytest.mark.item("A12")
@pytest.mark.parametrize("false_negatives", ["overlap", "exact"])
def test_a_corpus_smaller_than_the_queue_stays_finite_and_no_pair_is_its_own_negative(learner_of, false_negatives):
    learner = learner_of(
        contrast={"queue_size": 512, "false_negatives": false_negatives, "mixup": 0.0}, optimization={"steps": 40}
    )  # 130 pairs: the queue holds each about four times, 40 steps of 8 are two epochs

    for number in range(40):
        assert np.isfinite(step(learner, number)["loss/xlco"])
    batch = learner.batches(40)[0]
    excluded = learner.xlco.exclude(batch.sentence_ids, learner.xlco.queue.sentence_ids)
    for row, mine in zip(excluded, batch.sentence_ids, strict=True):
        assert row.tolist() == [mine[0].item() in kept for kept in learner.xlco.queue.sentence_ids.tolist()]
    assert excluded.any()


def test_corrupted_views_hide_a_share_of_their_tokens_and_ask_for_none(tiny_shards):
    changes = {"batches": {"global_batch_size": 400, "virtual_shards": 1}}
    plain, corrupted = (
        Sampler(open_shards(tiny_shards), tiny_config(contrast={"corruption": share}, **changes)).draw(0, range(1))
        for share in (0.0, 0.15)
    )

    for before, after in ((plain.xlco.queries, corrupted.xlco.queries), (plain.xlco.keys, corrupted.xlco.keys)):
        changed = (before.flat != after.flat).mean()
        assert changed == pytest.approx(0.15 * 0.9, abs=0.02)  # a tenth of the chosen stay as they are
        assert (after.flat == VOCABULARY - 1).mean() == pytest.approx(0.15 * 0.8, abs=0.02)
    assert np.array_equal(plain.mlm.masked_ids, corrupted.mlm.masked_ids)


def test_the_next_partner_is_always_the_pair_that_follows_in_the_file(tiny_shards):
    shards = open_shards(tiny_shards)
    sampler = Sampler(shards, tiny_config(contrast={"partner": "next"}))
    following = {}
    for tables in shards.pairs.values():
        for table in tables:
            ids = table.read_pairs().sentence_ids
            following |= dict(zip(ids.tolist(), np.roll(ids, -1).tolist(), strict=True))

    sentence_ids = [pair for number in range(5) for pair in sampler.draw(number, range(4)).xlco.sentence_ids.tolist()]

    assert all(following[mine] == partner for mine, partner in sentence_ids)


def test_contrast_may_start_later_with_a_fresh_copy_and_a_full_queue(tiny_shards, tmp_path):
    config = tiny_config(contrast={"start_step": 3})
    pretrain(config, tiny_shards, tmp_path / "out", tmp_path / "run")

    points = dict(tracker.read(tmp_path / "run" / tracker.METRICS))
    assert ["loss/xlco" in points[number] for number in range(1, 7)] == [False] * 3 + [True] * 3
    assert points[4]["queue/age"] == 0.75  # 8 keys of this step, 24 of the start, one step ago


@pytest.mark.item("A27")
@pytest.mark.parametrize(
    "switch", [{"momentum": 0.0}, {"mixup": 0.0}, {"layer": 2}], ids=["-Momentum", "-Mixup", "-Universal"]
)
def test_the_ablations_run_by_one_switch_and_repeat_themselves(tiny_shards, tmp_path, switch):
    for name, changes in (("first", switch), ("second", switch), ("plain", {})):
        pretrain(tiny_config(contrast=changes), tiny_shards, tmp_path / name / "out", tmp_path / name)

    first, second, plain = (losses(tmp_path / name) for name in ("first", "second", "plain"))
    assert first == second != plain


@pytest.mark.item("A27")
def test_without_momentum_the_key_encoder_is_the_query_encoder_after_each_step(learner_of):
    learner = learner_of(contrast={"momentum": 0.0})

    step(learner)

    queries = dict(learner.module.named_parameters())
    assert all(torch.equal(key, queries[name]) for name, key in learner.xlco.key_encoder.named_parameters())


@pytest.mark.item("A8")
def test_a_skipped_step_moves_no_key_and_a_good_one_moves_it_once(learner_of):
    learner = learner_of(contrast={"momentum": 0.9})
    before = learner.xlco.key_encoder.projection.clone()

    learner.after_step(1, good=False)
    assert torch.equal(learner.xlco.key_encoder.projection, before)
    step(learner)

    expected = before + 0.1 * (learner.module.projection.detach() - before)
    torch.testing.assert_close(learner.xlco.key_encoder.projection, expected, atol=1e-6, rtol=0)


@pytest.mark.usefixtures("in_fp64")
def test_losses_by_language_add_up_to_the_loss(learner_of):
    learner = learner_of()
    batches = learner.batches(0)
    figures = step(learner)

    for objective, of in (("mlm", "target_groups"), ("xlco", "view_groups")):
        named = {name: value for name, value in figures.items() if name.startswith(f"loss_{objective}/")}
        groups = torch.cat([getattr(batch, of) for batch in batches])
        counts = Counter()
        for number, name in enumerate(learner.sampler.groups):
            count = (groups == number).sum().item()
            counts[f"loss_{name.rpartition('/')[0]}"] += count
            if name.startswith(objective):
                assert figures.get(f"targets/{name}", 0) == count
        total = sum(counts[name] for name in named)
        mean = sum(counts[name] * value for name, value in named.items()) / total
        assert len(named) == 2 and mean == pytest.approx(figures[f"loss/{objective}"], rel=1e-9)


def test_a_training_in_bf16_on_batches_for_a_gpu_follows_that_in_fp32(learner_of, monkeypatch, caplog):
    def figures(precision: str, aligned: bool) -> list[dict[str, float]]:
        learner = learner_of(
            optimization={"learning_rate": 0.1, "warmup_steps": 0},
            model={"layers": 2, "hidden": 16, "ffn": 32, "heads": 2, "max_tokens": 32, "precision": precision},
        )
        with torch.no_grad():
            for parameter in learner.module.parameters():
                parameter.mul_(0.4)
        adam = optimizer.make_adamw(learner.module.parameters(), learner.config.optimization)
        progress, found = Progress(), []
        for _ in range(8):
            batches = [batch.aligned(16, 1) if aligned else batch for batch in learner.batches(0)]
            found.append(train_step(learner, adam, learner.config.optimization, progress, batches)[0])
        return found

    monkeypatch.setattr(devices, "cpu_multiplies_bf16", lambda: False)
    plain = figures("auto", aligned=False)
    assert "no instructions" not in caplog.text
    half = figures("bf16", aligned=True)

    assert "no instructions" in caplog.text
    losses, in_half = ([row["loss/mlm"] for row in rows] for rows in (plain, half))
    assert losses[-1] < 0.95 * losses[0]
    assert in_half == pytest.approx(losses, rel=0.0015)  # 0.0055 if layers kept their first weights
    # the first gradient: some 16 roundings a layer, forward and backward, each off by 2^-9 / sqrt(3) on average
    norms = [rows[0]["gradient_norm"] for rows in (plain, half)]
    assert norms[0] != norms[1] == pytest.approx(norms[0], rel=32**0.5 * 2**-9 / 3**0.5)


@pytest.mark.usefixtures("in_fp64")
def test_with_dropout_too_the_samples_and_losses_do_not_depend_on_the_workers(tiny_shards, monkeypatch):
    config, shards = tiny_config(model={"dropout": 0.2}), open_shards(tiny_shards)
    learner = InfoXLMLearner(config, build(config, shards), shards)
    learner.after_step(0)
    scales = dict.fromkeys(learner.weights.by_name, 1.0)

    def total(count: int) -> float:
        monkeypatch.setattr(distributed, "world_size", lambda: count)
        learner.shares = distributed.shares(config.batches.virtual_shards)  # as a learner of so many workers has
        loss = 0.0
        for rank in range(count):
            monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
            loss += sum(learner.losses(batch, scales)[1]["mlm"].item() for batch in learner.batches(0))
        return loss

    assert total(1) == pytest.approx(total(2), rel=1e-9) == pytest.approx(total(4), rel=1e-9)

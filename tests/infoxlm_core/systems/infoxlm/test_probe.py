"""The probe: retrieval among held-out pairs while a training goes on."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from infoxlm_core import manifests
from infoxlm_core.data.shards import open_shards
from infoxlm_core.data.writing import write_table
from infoxlm_core.model.encoder import Encoder, EncoderSize, initialise
from infoxlm_core.stages.pretraining import pretrain
from infoxlm_core.systems.infoxlm import probe
from infoxlm_core.systems.infoxlm.probe import Probe
from infoxlm_core.tasks.retrieval.nearest import find_nearest
from infoxlm_core.training import tracker
from tests.toys.pretraining import VOCABULARY, make_pairs, tiny_config, write_shards


@pytest.fixture
def with_held_out(tmp_path):
    """Tiny shards and ten held-out pairs: five whose translation is the sentence itself, five swapped about."""
    directory = write_shards(tmp_path / "shards", {"one": 40})
    manifest = manifests.load(directory)
    rows = np.arange(4, 34).reshape(10, 3)
    turned = np.concatenate([rows[:5], rows[[6, 7, 8, 9, 5]]])
    pairs = make_pairs(rows.ravel(), turned.ravel(), np.full(10, 3), np.arange(10))
    stem = "held_out/en-de/kept"
    manifest["facts"]["tables"][stem] = write_table(directory, stem, [pairs])
    manifests.write(directory, "shards", manifest["facts"])
    return directory


def test_it_counts_the_sentences_whose_translation_is_nearest(with_held_out):
    encoder = Encoder(EncoderSize(VOCABULARY, layers=2, hidden=16, ffn=32, heads=2, positions=34))
    initialise(encoder, seed=1)
    opened = open_shards(with_held_out)

    assert Probe(opened, 10, 12).score(encoder, 1, "mean", torch.device("cpu")) == {
        "probe/retrieval": 0.5, "probe/retrieval/en-de": 0.5
    }  # fmt: skip
    assert Probe(opened, 5, 12).score(encoder, 2, "mean", torch.device("cpu"))["probe/retrieval"] == 1.0


def test_pairs_that_share_a_side_are_no_two_questions(with_held_out):
    opened = open_shards(with_held_out)
    (pairs,) = opened.held_out["en-de"]
    repeated = replace(opened, held_out={"en-de": [pairs, pairs]})

    source, target = Probe(repeated, 15, 12).pairs["en-de"]

    assert len(source.lengths) == len(target.lengths) == 10
    assert len(Probe(repeated, 15, 2).pairs["en-de"][0].lengths) == 10


def test_it_computes_in_the_precision_of_the_training_and_searches_in_fp32(with_held_out, monkeypatch):
    encoder = Encoder(EncoderSize(VOCABULARY, layers=2, hidden=16, ffn=32, heads=2, positions=34))
    initialise(encoder, seed=1)
    kinds = []
    encoder.layers[0].query.register_forward_hook(lambda *hooked: kinds.append(hooked[2].dtype))
    monkeypatch.setattr(probe, "find_nearest", lambda a, b: kinds.extend([a.dtype, b.dtype]) or find_nearest(a, b))

    found = Probe(open_shards(with_held_out), 10, 12).score(encoder, 1, "mean", torch.device("cpu"), "bf16")

    assert kinds == [torch.bfloat16] * 2 + [torch.float32] * 4
    assert found["probe/retrieval"] == 0.5


def test_it_is_a_curve_of_the_run_and_changes_no_step(with_held_out, tmp_path, monkeypatch):
    precisions, score = [], Probe.score
    monkeypatch.setattr(Probe, "score", lambda *given: precisions.append(given[-1]) or score(*given))

    def losses(every: int) -> list[dict]:
        config = tiny_config(probe={"every": every, "pairs": 10})
        pretrain(config, with_held_out, tmp_path / f"out {every}", tmp_path / f"run {every}")
        return [values for _, values in tracker.read(tmp_path / f"run {every}" / tracker.METRICS)]

    probed, plain = losses(3), losses(0)

    assert ["probe/retrieval" in values for values in probed] == [False, False, True, False, False, True]
    assert not any("probe/retrieval" in values for values in plain)
    assert precisions == ["auto"] * 2  # of the config
    assert [v["loss/mlm"].hex() for v in probed] == [v["loss/mlm"].hex() for v in plain]

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
from infoxlm_core.systems.infoxlm.probe import Probe
from infoxlm_core.training import tracker
from tests.toys.pretraining import VOCABULARY, make_pairs, tiny_config, write_shards


@pytest.fixture
def shards_with_pairs(tmp_path):
    """Return tiny shards with ten held-out pairs: five of equal sentences, and five whose targets are rotated."""
    directory = write_shards(tmp_path / "shards", {"one": 40})
    facts = manifests.load(directory)["facts"]
    sources = np.arange(4, 34).reshape(10, 3)
    targets = np.concatenate([sources[:5], sources[[6, 7, 8, 9, 5]]])
    pairs = make_pairs(sources.ravel(), targets.ravel(), np.full(10, 3), np.arange(10))
    name = "held_out/en-de/kept"
    facts["tables"][name] = write_table(directory, name, [pairs])
    manifests.write(directory, "shards", facts)
    return directory


@pytest.fixture
def encoder() -> Encoder:
    encoder = Encoder(EncoderSize(VOCABULARY, layers=2, hidden=16, ffn=32, heads=2, positions=34))
    initialise(encoder, seed=1)
    return encoder


CPU = torch.device("cpu")


def test_score_is_the_share_of_sentences_whose_translation_is_nearest(shards_with_pairs, encoder):
    shards = open_shards(shards_with_pairs)

    assert Probe(shards, 10, 12).score(encoder, 1, "mean", CPU) == {
        "probe/retrieval": 0.5, "probe/retrieval/en-de": 0.5
    }  # fmt: skip
    assert Probe(shards, 5, 12).score(encoder, 2, "mean", CPU)["probe/retrieval"] == 1.0


def test_pairs_that_share_a_sentence_with_an_earlier_pair_are_left_out(shards_with_pairs):
    shards = open_shards(shards_with_pairs)
    (pairs,) = shards.held_out["en-de"]
    repeated_shards = replace(shards, held_out={"en-de": [pairs, pairs]})

    source, target = Probe(repeated_shards, 15, 12).pairs["en-de"]

    assert len(source.lengths) == len(target.lengths) == 10
    assert len(Probe(repeated_shards, 15, 2).pairs["en-de"][0].lengths) == 10


def test_vectors_are_computed_in_the_precision_of_the_training(shards_with_pairs, encoder):
    dtypes = []
    encoder.layers[0].query.register_forward_hook(lambda _module, _inputs, output: dtypes.append(output.dtype))

    scores = Probe(open_shards(shards_with_pairs), 10, 12).score(encoder, 1, "mean", CPU, "bf16")

    assert dtypes == [torch.bfloat16] * 2
    assert scores["probe/retrieval"] == 0.5


def test_probe_adds_a_curve_and_changes_no_loss(shards_with_pairs, tmp_path):
    curves = {}
    for every in (3, 0):
        run = tmp_path / f"run {every}"
        pretrain(tiny_config(probe={"every": every, "pairs": 10}), shards_with_pairs, tmp_path / f"out {every}", run)
        curves[every] = [values for _, values in tracker.read(run / tracker.METRICS)]

    has_score = ["probe/retrieval" in values for values in curves[3]]
    assert has_score == [False, False, True, False, False, True]
    assert not any("probe/retrieval" in values for values in curves[0])
    assert [values["loss/mlm"] for values in curves[3]] == [values["loss/mlm"] for values in curves[0]]

"""Retrieval on an aligned set, by language, direction, vector and layer."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import save_file

from infoxlm_core.errors import ConfigError, InputError
from infoxlm_core.model.huggingface import pretrained
from infoxlm_core.model.huggingface.any_encoder import load_encoder
from infoxlm_core.tasks.embedding import VectorSpec
from infoxlm_core.tasks.retrieval import run
from infoxlm_core.tasks.retrieval.task import RetrievalConfig
from tests.toys.models import save_model

WORDS = [f"{letter}{number}" for letter in "abc" for number in range(10)]


@pytest.fixture
def encoder(tmp_path) -> Path:
    """Write a model of two layers, with contrast at layer 1."""
    return save_model(tmp_path / "encoder", words=WORDS)


@pytest.fixture
def data(tmp_path) -> Path:
    """German repeats the English words and adds one; Swahili shares a word with English in half of its pairs."""
    english = [f"a{first} b{second}" for first in range(5) for second in range(4)]
    german = [f"{sentence} c0" for sentence in english]
    swahili = [f"c{1 + row % 7} {sentence.split()[row % 2]}" for row, sentence in enumerate(english[:10])]
    swahili += [f"c{1 + row % 7} c9" for row in range(10, 20)]
    folder = tmp_path / "data"
    folder.mkdir()
    for language, sentences in (("deu", german), ("swh", swahili)):
        write(folder / f"t.{language}-eng.eng", english)
        write(folder / f"t.{language}-eng.{language}", sentences)
    return folder


def write(path: Path, lines: list[str]) -> None:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def measure(encoder: Path, data: Path, *vectors: str, **settings) -> dict:
    """Return the content of scores.json."""
    config = RetrievalConfig(data=str(data), vectors=vectors, batch_size=8, **settings)
    return run.measure(config, encoder, encoder.parent / "out").to_dict()


def test_scores_are_by_language_direction_vector_and_layer(encoder, data, tmp_path):
    scores = measure(encoder, data, "mean@best", "cls@last", "mean_no_special@1")

    german, swahili = scores["languages"].values()
    assert list(scores["languages"]) == ["deu", "swh"]
    assert scores["counts"] == {"deu": 20, "swh": 20}
    assert german["mean"] > 0.9 > swahili["mean"]
    for row in (german, swahili):
        assert row["mean"] == pytest.approx((row["to_pivot"] + row["from_pivot"]) / 2)
    assert scores["mean"]["to_pivot"] == pytest.approx((german["to_pivot"] + swahili["to_pivot"]) / 2)
    assert (scores["task"], scores["transfer_gap"], scores["dev"], scores["mixed"]) == ("retrieval", None, None, None)
    assert json.dumps(scores)

    best = scores["vectors"]["mean@best"]
    mean_by_layer = scores["by_layer"]["mean"]["mean"]
    assert best["languages"] == scores["languages"]
    assert best["mean"] == scores["mean"]
    assert best["mean"]["mean"] == max(mean_by_layer)
    assert best["layer"] == mean_by_layer.index(max(mean_by_layer))  # the lowest of equals
    last = scores["vectors"]["cls@last"]
    assert (last["pooling"], last["layer"]) == ("cls", 2)
    assert last["mean"]["mean"] == scores["by_layer"]["cls"]["mean"][2]
    assert set(scores["by_layer"]) == {"mean", "cls"}
    assert len(mean_by_layer) == 3

    misses = pq.read_table(tmp_path / "out/misses.parquet").to_pylist()
    assert all(miss["right"] != miss["found"] for miss in misses)
    for direction in ("to_pivot", "from_pivot"):
        missed = [miss for miss in misses if (miss["language"], miss["direction"]) == ("swh", direction)]
        assert 1 - len(missed) / 20 == pytest.approx(swahili[direction])


def test_the_configured_prefix_replaces_that_of_the_model(encoder, data):
    save_file({"projection": torch.eye(32)}, encoder / pretrained.PROJECTION)
    vectors = ("contrast@contrast", "mean@contrast")
    scores = measure(encoder, data, *vectors)
    scores_of_prefix = measure(encoder, data, *vectors, prefix="c9 ")
    config = json.loads((encoder / "config.json").read_text())
    config["infoxlm"]["prefix"] = "c9 "
    (encoder / "config.json").write_text(json.dumps(config))

    scores_of_own_prefix = measure(encoder, data, *vectors)
    scores_of_empty_prefix = measure(encoder, data, *vectors, prefix="")

    encoder_with_prefix = scores["encoder"] | {"prefix": "c9 "}
    assert scores_of_own_prefix == scores_of_prefix | {"encoder": encoder_with_prefix}
    assert scores_of_empty_prefix == scores | {"encoder": encoder_with_prefix}
    assert scores["by_layer"] != scores_of_prefix["by_layer"]
    assert scores["test_set"] == scores_of_prefix["test_set"]
    contrast = scores["vectors"]["contrast@contrast"]
    assert contrast["mean"] == scores["vectors"]["mean@contrast"]["mean"]  # the projection is the identity
    assert contrast["layer"] == 1


def test_margin_changes_the_scores(encoder, data):
    scores = measure(encoder, data, "cls@1", margin=False)
    scores_of_margin = measure(encoder, data, "cls@1", margin=True)

    assert scores["by_layer"] != scores_of_margin["by_layer"]


def test_large_sets_are_measured_at_the_configured_layers_only(encoder, data, monkeypatch):
    monkeypatch.setattr(run, "MAX_PAIRS_OF_ALL_LAYERS", 19)

    scores_of_layer = measure(encoder, data, "mean@1")
    scores_of_best = measure(encoder, data, "mean@best")

    assert scores_of_layer["by_layer"] == {}
    assert set(scores_of_best["by_layer"]) == {"mean"}
    assert scores_of_layer["mean"]["mean"] == scores_of_best["by_layer"]["mean"]["mean"][1]


@pytest.mark.item("A23")
@pytest.mark.parametrize(
    ("vector", "expected"),
    [
        ("mean@0", [("mean", 0)]),  # the embeddings
        ("cls@last", [("cls", 2)]),
        ("mean@contrast", [("mean", 1)]),
        ("mean@best", [("mean", 0), ("mean", 1), ("mean", 2)]),
        ("contrast@contrast", [("contrast", 1)]),
        ("contrast@best", [("contrast", 1)]),
        ("contrast@1", [("contrast", 1)]),
    ],
)
def test_layers_are_counted_as_hugging_face_counts_them(encoder, vector, expected):
    model, _ = load_encoder(encoder)

    assert run.parse_vector(vector, model, encoder) == [VectorSpec(*spec) for spec in expected]


@pytest.mark.parametrize(
    "vector", ["mean", "max@3", "mean@-1", "mean@Last", "mean@1.5", "mean@", " mean@1", "mean@1\n"]
)
def test_vectors_not_written_as_pooling_at_layer_are_refused(vector):
    with pytest.raises(ConfigError, match=r"vectors\.0"):
        RetrievalConfig.parse({"data": "x", "vectors": [vector]})


@pytest.mark.parametrize(
    ("is_contrasted", "vector", "reason"),
    [
        (True, "mean@3", "has no vector mean@3. Give a layer from 0 to 2"),
        (True, "contrast@2", "has no vector contrast@2. Give a layer from 1 to 1"),
        (False, "contrast@1", r"names no contrast layer \(field infoxlm\)\. Remove contrast@1 from vectors"),
        (False, "mean@contrast", r"names no contrast layer \(field infoxlm\)\. Remove mean@contrast from vectors"),
    ],
)
def test_layers_that_the_model_does_not_have_are_refused(encoder, is_contrasted, vector, reason):
    model, _ = load_encoder(encoder)
    if not is_contrasted:
        del model.config.infoxlm

    with pytest.raises(InputError, match=reason):
        run.parse_vector(vector, model, encoder)

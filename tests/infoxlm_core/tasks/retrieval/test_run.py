"""Retrieval on an aligned set, by language, direction, vector and layer."""

import json
import math
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


def write(path: Path, lines: list[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


WORDS = [f"{letter}{number}" for letter in "abc" for number in range(10)]


@pytest.fixture
def encoder(tmp_path) -> Path:
    return save_model(tmp_path / "encoder", words=WORDS)


@pytest.fixture
def toy(tmp_path) -> Path:
    """German repeats the English words and adds one; Swahili shares a word with English in half of its pairs."""
    english = [f"a{i} b{j}" for i in range(5) for j in range(4)]
    folder = tmp_path / "toy"
    write(folder / "t.deu-eng.eng", english)
    write(folder / "t.deu-eng.deu", [f"{sentence} c0" for sentence in english])
    write(folder / "t.swh-eng.eng", english)
    write(
        folder / "t.swh-eng.swh",
        [f"c{1 + i % 7} {s.split()[i % 2] if i < 10 else 'c9'}" for i, s in enumerate(english)],
    )
    return folder


def test_scores_are_by_language_direction_vector_and_layer(encoder, toy, tmp_path):
    config = RetrievalConfig(data=str(toy), vectors=("mean@best", "cls@last", "mean_no_special@1"), batch_size=8)

    scores = run.measure(config, encoder, tmp_path / "out").to_dict()

    assert list(scores["languages"]) == ["deu", "swh"] and scores["counts"] == {"deu": 20, "swh": 20}
    assert scores["languages"]["deu"]["mean"] > 0.9 > scores["languages"]["swh"]["mean"]
    for row in scores["languages"].values():
        assert row["mean"] == pytest.approx((row["to_pivot"] + row["from_pivot"]) / 2)
    assert scores["mean"]["to_pivot"] == pytest.approx(
        (scores["languages"]["deu"]["to_pivot"] + scores["languages"]["swh"]["to_pivot"]) / 2
    )
    best = scores["vectors"]["mean@best"]
    assert best["languages"] == scores["languages"] and best["mean"] == scores["mean"]
    assert best["mean"]["mean"] == max(scores["by_layer"]["mean"]["mean"])
    assert best["layer"] == scores["by_layer"]["mean"]["mean"].index(best["mean"]["mean"])  # the lowest of equals
    assert (scores["vectors"]["cls@last"]["pooling"], scores["vectors"]["cls@last"]["layer"]) == ("cls", 2)
    assert scores["vectors"]["cls@last"]["mean"]["mean"] == scores["by_layer"]["cls"]["mean"][2]
    assert set(scores["by_layer"]) == {"mean", "cls"}
    assert all(len(shares) == 3 for shares in scores["by_layer"]["mean"].values())
    assert (scores["task"], scores["transfer_gap"], scores["dev"], scores["mixed"]) == ("retrieval", None, None, None)
    assert json.dumps(scores)


def test_misses_are_written_with_what_was_found_instead(encoder, toy, tmp_path):
    scores = run.measure(RetrievalConfig(data=str(toy), vectors=("mean@1",)), encoder, tmp_path / "out").to_dict()

    rows = pq.read_table(tmp_path / "out/misses.parquet").to_pylist()

    for direction in ("to_pivot", "from_pivot"):
        missed = [row for row in rows if (row["language"], row["direction"]) == ("swh", direction)]
        assert 1 - len(missed) / 20 == pytest.approx(scores["languages"]["swh"][direction])
    assert all(row["right"] != row["found"] for row in rows)
    assert rows[0]["language"] in ("deu", "swh") and rows[0]["sentence"]


def test_one_file_of_the_pivot_gives_the_same_scores_as_a_copy_for_each_language(encoder, toy, tmp_path):
    for name, source in {"eng.txt": "t.deu-eng.eng", "deu.txt": "t.deu-eng.deu", "swh.txt": "t.swh-eng.swh"}.items():
        write(tmp_path / "single" / name, (toy / source).read_text().splitlines())

    pairs, single = (
        run.measure(RetrievalConfig(data=str(folder)), encoder, tmp_path / "out").to_dict()
        for folder in (toy, tmp_path / "single")
    )

    assert pairs == single


def test_contrast_vectors_and_a_prefix_are_used(encoder, toy, tmp_path):
    save_file({"projection": torch.eye(32)}, encoder / pretrained.PROJECTION)
    vectors = ("contrast@contrast", "mean@contrast")

    plain = run.measure(RetrievalConfig(data=str(toy), vectors=vectors), encoder, tmp_path / "out").to_dict()
    prefixed = run.measure(
        RetrievalConfig(data=str(toy), vectors=vectors, prefix="c9 "), encoder, tmp_path / "out"
    ).to_dict()

    config_file = encoder / "config.json"
    config = json.loads(config_file.read_text())
    config_file.write_text(json.dumps(config | {"infoxlm": config["infoxlm"] | {"prefix": "c9 "}}))
    own = run.measure(RetrievalConfig(data=str(toy), vectors=vectors), encoder, tmp_path / "out").to_dict()
    assert own == prefixed | {"encoder": prefixed["encoder"] | {"prefix": "c9 "}}
    off = run.measure(RetrievalConfig(data=str(toy), vectors=vectors, prefix=""), encoder, tmp_path / "out").to_dict()
    assert off == plain | {"encoder": own["encoder"]}
    assert plain["vectors"]["contrast@contrast"]["mean"] == plain["vectors"]["mean@contrast"]["mean"]  # W is 1
    assert plain["vectors"]["contrast@contrast"]["layer"] == 1
    assert plain["by_layer"] != prefixed["by_layer"] and plain["test_set"] == prefixed["test_set"]


def test_margin_is_another_way_to_compare(encoder, toy, tmp_path):
    cosine, margin = (
        run.measure(RetrievalConfig(data=str(toy), vectors=("cls@1",), margin=by), encoder, tmp_path / "out").to_dict()
        for by in (False, True)
    )

    assert cosine["by_layer"] != margin["by_layer"]


def test_a_large_set_is_measured_at_the_layers_asked_for_alone(encoder, toy, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "CURVE_PAIRS", 19)

    one = run.measure(RetrievalConfig(data=str(toy), vectors=("mean@1",)), encoder, tmp_path / "out").to_dict()
    best = run.measure(RetrievalConfig(data=str(toy), vectors=("mean@best",)), encoder, tmp_path / "out").to_dict()

    assert one["by_layer"] == {} and set(best["by_layer"]) == {"mean"}
    assert one["mean"]["mean"] == best["by_layer"]["mean"]["mean"][1]


@pytest.mark.item("A23")
def test_layers_are_counted_as_hugging_face_counts_them(encoder):
    model, _ = load_encoder(encoder)  # two layers; contrast at 1

    def places(vector: str) -> list[VectorSpec]:
        return run.parse_vector(vector, model, encoder)

    assert places("mean@0") == [VectorSpec("mean", 0)]  # the embeddings
    assert places("cls@last") == [VectorSpec("cls", 2)]
    assert places("mean@contrast") == [VectorSpec("mean", 1)]
    assert places("mean@best") == [VectorSpec("mean", 0), VectorSpec("mean", 1), VectorSpec("mean", 2)]
    assert places("contrast@contrast") == places("contrast@best") == places("contrast@1") == [VectorSpec("contrast", 1)]


@pytest.mark.parametrize(
    "vector", ["mean", "max@3", "mean@-1", "mean@Last", "mean@1.5", "mean@", " mean@1", "mean@1\n"]
)
def test_a_vector_that_is_not_written_pooling_at_layer_is_refused(vector):
    with pytest.raises(ConfigError, match=r"vectors\.0"):
        RetrievalConfig.parse({"data": "x", "vectors": [vector]})


@pytest.mark.parametrize(
    ("vector", "said"),
    [
        ("mean@3", "has no vector mean@3. Give a layer from 0 to 2"),
        ("contrast@2", "has no vector contrast@2. Give a layer from 1 to 1"),
    ],
)
def test_a_layer_that_the_model_does_not_have_is_refused(encoder, toy, tmp_path, vector, said):
    with pytest.raises(InputError, match=said):
        run.measure(RetrievalConfig(data=str(toy), vectors=(vector,)), encoder, tmp_path / "out").to_dict()


def test_contrast_is_refused_for_a_model_that_was_not_contrasted(encoder, toy, tmp_path):
    config = json.loads((encoder / "config.json").read_text())
    del config["infoxlm"]
    (encoder / "config.json").write_text(json.dumps(config))

    for vector in ("contrast@1", "mean@contrast"):
        with pytest.raises(
            InputError, match=rf"names no contrast layer \(field infoxlm\)\. Remove {vector} from vectors"
        ):
            run.measure(RetrievalConfig(data=str(toy), vectors=(vector,)), encoder, tmp_path / "out").to_dict()


def test_chance_is_what_vectors_that_are_all_alike_score(tmp_path, toy):
    """[CLS] of the embeddings is one vector for all sentences: ties go to the first, which is right once."""
    encoder = save_model(tmp_path / "encoder", words=WORDS)

    scores = run.measure(RetrievalConfig(data=str(toy), vectors=("cls@0",)), encoder, tmp_path / "out").to_dict()

    assert math.isclose(scores["mean"]["mean"], 1 / 20)

"""The stage merge takes the largest weight that the guard accepts, and writes a complete encoder."""

import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file

from infoxlm_core import manifests
from infoxlm_core.config import AlignedSetConfig, EvaluationConfig
from infoxlm_core.errors import InputError
from infoxlm_core.stages import merging
from infoxlm_core.stages.merging import MergedAccuracies, choose_weight, keeps_guard_accuracy
from infoxlm_core.tasks import reference_vectors
from infoxlm_core.tasks.embedding import load_embedder
from tests.toys.models import save_model

WORDS = [f"{letter}{number}" for letter in "abc" for number in range(10)]
ENGLISH = [f"a{first} b{second}" for first in range(10) for second in range(6)]


@pytest.mark.parametrize(
    ("lower_ends", "expected"),
    [
        ((-0.001, -0.002, -0.004, -0.01), (0.75, True)),
        ((-0.001, -0.01, 0.02, -0.005), (0.75, True)),  # a loss of half a point is too much
        ((-0.01, -0.02, -0.03, -0.04), (0.25, False)),
    ],
)
def test_largest_weight_that_the_guard_accepts_is_chosen(lower_ends, expected):
    weights = (0.25, 0.5, 0.75, 1.0)
    candidates = [MergedAccuracies(weight, 0.5, 0.5, lower) for weight, lower in zip(weights, lower_ends, strict=True)]

    chosen = choose_weight(candidates)

    assert (chosen.weight, keeps_guard_accuracy(chosen)) == expected


@pytest.fixture
def corpus(tmp_path) -> Path:
    """Sixty held-out pairs whose German sides copy the English ones."""
    path = tmp_path / "corpus/held_out/en-de/one.parquet"
    path.parent.mkdir(parents=True)
    pq.write_table(pa.table({"source": ENGLISH, "target": [f"{sentence} c0" for sentence in ENGLISH]}), path)
    return tmp_path / "corpus"


@pytest.fixture
def models(tmp_path) -> tuple[Path, Path]:
    """A start that finds copies, and an encoder that gives all sentences the same vector."""
    start = save_model(tmp_path / "start", words=WORDS)
    encoder = shutil.copytree(start, tmp_path / "encoder")
    weights = {name: torch.zeros_like(value) for name, value in load_file(start / "model.safetensors").items()}
    save_file(weights, encoder / "model.safetensors", metadata={"format": "pt"})
    manifests.write(start, "encoder", {"steps": 0}, {"shards": "sha256:s"})
    manifests.write(encoder, "encoder", {"steps": 9, "reserved": ["x"]}, {"shards": "sha256:s"})
    return start, encoder


def test_merged_encoder_is_a_complete_export_with_its_weight_and_curve(corpus, models, tmp_path):
    start, encoder = models
    config = EvaluationConfig(batch_size=8, guard=AlignedSetConfig(data=str(corpus)), merge=(1.0, 0.1))

    facts = merging.merge_best(config, corpus, encoder, start, tmp_path / "out")

    merged = tmp_path / "out/encoder"
    manifest = manifests.load_verified(merged, "encoder", "merge")  # verifies every file
    points = {point["weight"]: point for point in manifest["facts"]["merge"]["curve"]}
    assert list(points) == [0.0, 0.1, 1.0]
    assert points[0.0]["guard"] == points[0.0]["held_out"] > 0.5 > points[1.0]["guard"]
    assert facts["weight"] == manifest["facts"]["merge"]["weight"] == 0.1
    assert facts["passed"] == (points[0.1]["guard_lower"] > -merging.LARGEST_LOSS)
    assert (manifest["facts"]["steps"], manifest["facts"]["reserved"]) == (9, ["x"])
    assert manifest["inputs"] == {
        "shards": "sha256:s",
        "encoder": manifests.load(encoder)["digest"],
        "start": manifests.load(start)["digest"],
    }
    reference = reference_vectors.read_reference(merged)
    torch.testing.assert_close(load_embedder(merged)(reference.sentences), reference.vectors, atol=1e-5, rtol=0)


def test_existing_directory_is_not_overwritten(models, tmp_path):
    with pytest.raises(InputError, match="exists: give another directory"):
        merging.merge(*models, 0.5, tmp_path)

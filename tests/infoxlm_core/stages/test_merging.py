"""The stage merge: which weight it takes, and what it writes."""

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file

from infoxlm_core import manifests
from infoxlm_core.config import AlignedSetConfig, EvaluationConfig
from infoxlm_core.errors import ConfigError, InputError
from infoxlm_core.stages import merging
from infoxlm_core.stages.merging import Point, choose_weight
from infoxlm_core.tasks import reference_vectors
from tests.toys.models import save_model

WORDS = [f"{letter}{number}" for letter in "abc" for number in range(10)]
ENGLISH = [f"a{number} b{other}" for number in range(10) for other in range(6)]


@pytest.mark.parametrize(
    ("lower_ends", "expected"),
    [
        ((-0.001, -0.002, -0.004, -0.01), (0.75, True)),
        ((-0.001, -0.01, 0.02, -0.005), (0.75, True)),  # a loss of half a point is too much
        ((-0.01, -0.02, -0.03, -0.04), (0.25, False)),
    ],
)
def test_the_largest_weight_that_the_guard_accepts_is_chosen(lower_ends, expected):
    curve = [Point(weight, 0.5, 0.5, lower) for weight, lower in zip((0.25, 0.5, 0.75, 1.0), lower_ends, strict=True)]

    chosen, passed = choose_weight(curve)

    assert (chosen.weight, passed) == expected


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


def test_the_merged_encoder_is_a_complete_export_that_tells_its_weight_and_curve(corpus, models, tmp_path):
    start, encoder = models
    guard = AlignedSetConfig(data=str(corpus))
    config = EvaluationConfig(batch_size=8, guard=guard, merge=(1.0, 0.1))

    facts = merging.merge_best(config, corpus, encoder, start, tmp_path / "out")

    merged = tmp_path / "out/encoder"
    manifest = manifests.read(merged, "encoder", "merge")  # verifies every file
    points = {point["weight"]: point for point in manifest["facts"]["merge"]["curve"]}
    assert list(points) == [0.0, 0.1, 1.0]
    assert points[0.0]["guard"] == points[0.0]["held_out"] > 0.5 > points[1.0]["guard"]
    assert facts["weight"] == manifest["facts"]["merge"]["weight"] == 0.1
    assert facts["passed"] == (points[0.1]["guard_lower"] > -merging.LARGEST_LOSS)
    assert (manifest["facts"]["steps"], manifest["facts"]["reserved"]) == (9, ["x"])
    digests = {
        name: manifests.load(directory)["digest"] for name, directory in (("encoder", encoder), ("start", start))
    }
    assert manifest["inputs"] == {"shards": "sha256:s"} | digests
    vectors = reference_vectors.read(merged).vectors
    assert not torch.equal(vectors, reference_vectors.read(reference_of(start, tmp_path)).vectors)
    json.dumps(manifest["facts"])


def reference_of(model: Path, tmp_path: Path) -> Path:
    copy = shutil.copytree(model, tmp_path / "copy")
    reference_vectors.write(copy)
    return copy


def test_a_directory_that_exists_is_not_overwritten(models, tmp_path):
    with pytest.raises(InputError, match="exists: give another directory"):
        merging.merge(*models, 0.5, tmp_path)


def test_weights_without_a_guard_are_refused():
    with pytest.raises(ConfigError, match=r"merge needs a guard, .* set evaluation\.guard"):
        EvaluationConfig.parse({"merge": [0.5]}, "evaluation")

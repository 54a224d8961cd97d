"""The component that merges an encoder with its start, called as KFP calls it."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from kfp import dsl

from components.merge import merge
from components.platform import artifacts
from infoxlm_core import manifests
from tests.toys.models import WORDS, save_model

SENTENCES = [f"{first} {second}" for first in WORDS[:8] for second in WORDS[8:16]]


@pytest.fixture
def kfp_artifacts(store, tmp_path) -> dict:
    """Return the inputs and outputs of the component."""
    for seed, name in enumerate(("start", "encoder")):
        save_model(store / name, seed=seed)
    path = store / "corpus/held_out/en-de/one.parquet"
    path.parent.mkdir(parents=True)
    pq.write_table(pa.table({"source": SENTENCES, "target": SENTENCES}), path)
    inputs: dict = {}
    for name in ("corpus", "start", "encoder"):
        manifests.write(store / name, name if name == "corpus" else "encoder", {"steps": len(name)})
        inputs[name] = dsl.Artifact(name=name, uri=str(tmp_path / name))
        artifacts.publish(inputs[name], store / name)
    merged = dsl.Model(name="merged", uri=str(tmp_path / "merged"))
    return inputs | {"merged": merged, "metrics": dsl.Metrics(name="metrics", uri=str(tmp_path / "metrics"))}


def write_guard(folder: Path, sentences: list[str]) -> None:
    folder.mkdir(exist_ok=True)
    for language in ("en", "fr"):
        (folder / f"{language}.txt").write_text("".join(f"{sentence}\n" for sentence in sentences))


def test_encoder_is_passed_on_unchanged_without_weights(store, kfp_artifacts):
    merge.python_func(config={}, store=str(store), **kfp_artifacts)

    assert artifacts.read_pointer(kfp_artifacts["merged"]) == artifacts.read_pointer(kfp_artifacts["encoder"])
    assert not (store / "merged").exists()


def test_merged_encoder_is_an_artifact_whose_key_depends_on_the_content_of_the_guard(store, kfp_artifacts, tmp_path):
    guard = tmp_path / "guard"
    write_guard(guard, SENTENCES)
    config = {"guard": {"data": str(guard)}, "merge": [0.5]}

    for _ in range(2):
        merge.python_func(config=config, store=str(store), **kfp_artifacts)

    merged, digest = artifacts.resolve(kfp_artifacts["merged"])
    assert merged.name == "encoder"
    assert digest != artifacts.read_pointer(kfp_artifacts["encoder"])[1]
    assert manifests.load(merged)["facts"]["merge"]["weight"] == 0.5
    assert [path.name for path in (store / "merged").glob("[0-9a-f]*")] == [merged.parent.name]
    assert kfp_artifacts["metrics"].metadata["weight"] == 0.5

    write_guard(guard, SENTENCES[1:])
    merge.python_func(config=config, store=str(store), **kfp_artifacts)
    assert artifacts.resolve(kfp_artifacts["merged"])[0].parent.name != merged.parent.name

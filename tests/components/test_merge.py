"""The component that merges an encoder with its start, called as KFP calls it."""

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
def arguments(store, tmp_path) -> dict:
    """The inputs and outputs of the component, as the pipeline gives them."""
    for seed, name in enumerate(("start", "encoder")):
        save_model(store / name, seed=seed)
    path = store / "corpus/held_out/en-de/one.parquet"
    path.parent.mkdir(parents=True)
    pq.write_table(pa.table({"source": SENTENCES, "target": SENTENCES}), path)
    found: dict = {}
    for name in ("corpus", "start", "encoder"):
        manifests.write(store / name, name if name == "corpus" else "encoder", {"steps": len(name)})
        found[name] = dsl.Artifact(name=name, uri=str(tmp_path / name))
        artifacts.publish(found[name], store / name)
    found["merged"] = dsl.Model(name="merged", uri=str(tmp_path / "merged"))
    found["metrics"] = dsl.Metrics(name="metrics", uri=str(tmp_path / "metrics"))
    return found


def test_without_weights_the_encoder_is_passed_on_unchanged(store, arguments):
    merge.python_func(config={}, store=str(store), **arguments)

    assert artifacts.read_pointer(arguments["merged"]) == artifacts.read_pointer(arguments["encoder"])
    assert not (store / "merged").exists()


def test_with_weights_the_merged_encoder_is_an_artifact_that_is_found_again(store, arguments, tmp_path):
    guard = tmp_path / "guard"
    guard.mkdir()
    for language in ("en", "fr"):
        (guard / f"{language}.txt").write_text("".join(f"{sentence}\n" for sentence in SENTENCES))
    config = {"guard": {"data": str(guard)}, "merge": [0.5]}

    for _ in range(2):
        merge.python_func(config=config, store=str(store), **arguments)

    merged, digest = artifacts.resolve(arguments["merged"])
    assert merged.name == "encoder" and digest != artifacts.read_pointer(arguments["encoder"])[1]
    assert manifests.load(merged)["facts"]["merge"]["weight"] == 0.5
    assert [path.name for path in (store / "merged").glob("[0-9a-f]*")] == [merged.parent.name]
    assert arguments["metrics"].metadata["weight"] == 0.5

    for language in ("en", "fr"):  # the key follows the content
        (guard / f"{language}.txt").write_text("".join(f"{sentence}\n" for sentence in SENTENCES[1:]))
    merge.python_func(config=config, store=str(store), **arguments)
    assert artifacts.resolve(arguments["merged"])[0].parent.name != merged.parent.name

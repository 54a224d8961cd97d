"""Garbage collection deletes old items of a store that nothing needs, from a directory and from S3."""

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from components.adapters import storage
from components.platform import artifacts, garbage
from infoxlm_core import manifests

MIN_AGE = timedelta(days=30)
MUCH_LATER = datetime.now(UTC) + 10 * MIN_AGE
KEYS = {kind: 4 * f"{number:x}0ff" for number, kind in enumerate(("corpus", "shards", "pretrained", "scores"), 1)}
RUN = f"pretrained-{KEYS['pretrained']}"


@pytest.fixture
def store(tmp_path, monkeypatch) -> str:
    monkeypatch.setenv("INFOXLM_CACHE", str(tmp_path / "cache"))
    return str(tmp_path / "store")


def build(store: str, kind: str, inputs: dict[str, str] | None = None) -> str:
    """Build an artifact with one file, and return its digest."""

    def write(output: Path) -> dict:
        (output / "text").write_text(kind)
        return inputs or {}

    return manifests.load(artifacts.get_or_build(store, kind, KEYS[kind], write))["digest"]


def fill(store: str) -> dict[str, str]:
    """Write the files of a pipeline run and a file of MLflow. Return the digests of the artifacts."""
    digests = {"corpus": build(store, "corpus")}
    digests["shards"] = build(store, "shards", {"corpus": digests["corpus"]})
    digests["pretrained"] = build(store, "pretrained", {"shards": digests["shards"]})
    digests["scores"] = build(store, "scores")
    checkpoint = {"fingerprint": {"shards": digests["shards"]}}
    job = {"artifacts": {"corpus": f"{store}/corpus/{KEYS['corpus']}"}}
    artifacts.write(store, f"runs/{RUN}/step=0000000004/meta.json", json.dumps(checkpoint))
    artifacts.write(store, "work/j-pretrain-1.json", json.dumps({"run": RUN}))
    artifacts.write(store, "work/j-tokenize-1.json", json.dumps(job))
    artifacts.write(store, "work/j-tokenize-1.followed", "")
    artifacts.write(store, "begun/toy.json", json.dumps({"run": RUN, **checkpoint}))
    artifacts.write(store, "outcome/demo-1/pretrain.json", "{}")
    artifacts.write(store, f"cost/demo-1/pretrained/{KEYS['pretrained']}/1.json", "{}")
    artifacts.write(store, "mlruns/is/not/ours.json", "{}")
    return digests


ALL = {"corpus", "shards", "pretrained", "scores", "runs", "work", "begun", "outcome", "cost"}


def find_deletable(store: str, roots=(), young: str = "none", now: datetime = MUCH_LATER) -> set[str]:
    """Return the folders with deletable items.

    Args:
        store: the store.
        roots: digests and keys that are needed outside of the store.
        young: start of the names of items that were written a moment ago.
        now: time of the collection.
    """
    items = [replace(item, modified=now) if item.name.startswith(young) else item for item in garbage.list_items(store)]
    return {item.name.partition("/")[0] for item in garbage.find_deletable(items, set(roots), MIN_AGE, now)}


def test_old_items_are_deletable_and_young_or_foreign_ones_are_not(store):
    fill(store)

    assert find_deletable(store, now=datetime.now(UTC)) == set()
    assert find_deletable(store) == ALL


@pytest.mark.parametrize("named_by", ["digest", "key"])
def test_registered_model_needs_its_inputs_but_no_checkpoints(store, named_by):
    digests = fill(store)
    root = digests["pretrained"] if named_by == "digest" else KEYS["pretrained"]

    assert find_deletable(store, {root}) == ALL - {"pretrained", "shards", "corpus"}


@pytest.mark.parametrize(
    ("young", "deletable"),
    [
        ("runs/", ALL - {"runs", "pretrained", "shards", "corpus", "begun"}),  # a training that saves checkpoints
        ("begun/", ALL - {"begun", "pretrained", "shards", "corpus"}),  # a training that has not saved yet
        ("work/j-tokenize", ALL - {"corpus"}),  # a job that reads the corpus and is still followed
    ],
)
def test_running_work_needs_its_inputs_and_notes(store, young, deletable):
    fill(store)

    assert find_deletable(store, young=young) == deletable


def delete_all(store: str) -> None:
    for item in garbage.find_deletable(garbage.list_items(store), set(), MIN_AGE, MUCH_LATER):
        garbage.delete(store, item)


def test_deleted_items_leave_no_files_and_can_be_built_again(store):
    fill(store)

    delete_all(store)

    remaining = [str(path.relative_to(store)) for path in Path(store).rglob("*") if path.is_file()]
    assert [name for name in remaining if not name.endswith(".lock")] == ["mlruns/is/not/ours.json"]
    assert build(store, "corpus")


def test_items_on_s3_are_deleted_with_their_local_copies(bucket, store):
    url = f"s3://{bucket.name}/gc"
    fill(url)
    local_copy = artifacts.local_directory(url) / "corpus" / KEYS["corpus"]
    assert local_copy.is_dir()
    preparation = artifacts.local_directory(url) / "preparing/0123456789abcdef"  # of a failed preparation
    (preparation / "done").mkdir(parents=True)
    (preparation / "done/clean-000000.json").write_text("{}")

    delete_all(url)

    assert garbage.list_items(url) == []
    assert storage.open(f"{url}/mlruns").entries()
    assert not local_copy.exists()
    assert not preparation.exists()

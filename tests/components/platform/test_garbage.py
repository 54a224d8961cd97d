"""What may go from a store, and what someitem that stays still needs: on a directory and on S3."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from components.adapters import storage
from components.platform import artifacts, garbage
from infoxlm_core import manifests

OLD, DAY = timedelta(days=30), timedelta(days=1)
LATER = datetime.now(UTC) + 10 * OLD
KEYS = {kind: 4 * f"{number:x}0ff" for number, kind in enumerate(("corpus", "shards", "pretrained", "scores"), 1)}


@pytest.fixture
def store(tmp_path, monkeypatch) -> str:
    monkeypatch.setenv("INFOXLM_CACHE", str(tmp_path / "cache"))
    return str(tmp_path / "store")


def make(store: str, kind: str, inputs: dict[str, str] | None = None) -> str:
    """An artifact with one file; its digest."""

    def build(output: Path) -> dict:
        (output / "text").write_text(kind)
        return inputs or {}

    return manifests.load(artifacts.get_or_build(store, kind, KEYS[kind], build))["digest"]


def fill(store: str) -> dict[str, str]:
    """A corpus, its shards, a model of them that was trained in a run, and scores; their digests."""
    found = {"corpus": make(store, "corpus")}
    found["shards"] = make(store, "shards", {"corpus": found["corpus"]})
    found["pretrained"] = make(store, "pretrained", {"shards": found["shards"]})
    found["scores"] = make(store, "scores")
    meta = json.dumps({"fingerprint": {"shards": found["shards"]}})
    artifacts.write(store, f"runs/pretrained-{KEYS['pretrained']}/step=0000000004/meta.json", meta)
    artifacts.write(store, "work/j-pretrain-1.json", json.dumps({"run": f"pretrained-{KEYS['pretrained']}"}))
    artifacts.write(store, "outcome/demo-1/pretrain.json", "{}")
    artifacts.write(store, f"cost/demo-1/pretrained/{KEYS['pretrained']}/1.json", "{}")
    artifacts.write(store, "mlruns/is/not/ours.json", "{}")
    return found


def names(items) -> set[str]:
    return {item.name.partition("/")[0] for item in items}


def test_all_that_is_old_may_go_and_noitem_that_is_young_or_not_ours(store):
    fill(store)
    items = garbage.list_items(store)

    assert names(garbage.find_deletable(items, set(), OLD)) == set()
    assert names(garbage.find_deletable(items, set(), OLD, LATER)) == {
        "corpus", "shards", "pretrained", "scores", "runs", "work", "outcome", "cost",
    }  # fmt: skip


@pytest.mark.parametrize("named", ["by its digest", "by its key"])
def test_what_a_registered_model_was_made_of_stays_but_for_the_checkpoints(store, named):
    digests = fill(store)
    needed = {digests["pretrained"] if named == "by its digest" else KEYS["pretrained"]}

    gone = garbage.find_deletable(garbage.list_items(store), needed, OLD, LATER)

    assert names(gone) == {"scores", "runs", "work", "outcome", "cost"}


def test_a_training_that_still_saves_keeps_its_shards_their_corpus_and_its_work(store):
    fill(store)
    items = [
        garbage.Item(**vars(item) | {"modified": LATER - DAY}) if item.name.startswith("runs/") else item
        for item in garbage.list_items(store)
    ]

    assert names(garbage.find_deletable(items, set(), OLD, LATER)) == {"scores", "outcome", "cost"}


def test_a_training_that_has_not_saved_yet_keeps_its_shards_and_their_corpus(store):
    digests = fill(store)
    run = f"pretrained-{KEYS['pretrained']}"
    artifacts.write(store, "begun/toy.json", json.dumps({"run": run, "fingerprint": {"shards": digests["shards"]}}))
    items = [
        garbage.Item(**vars(item) | {"modified": LATER - DAY}) if item.name.startswith("begun/") else item
        for item in garbage.list_items(store)
    ]

    gone = garbage.find_deletable(items, set(), OLD, LATER)

    assert not {"shards", "corpus", "begun"} & names(gone)
    assert "begun" in names(garbage.find_deletable(garbage.list_items(store), set(), OLD, LATER))


def test_a_job_that_is_still_followed_keeps_its_work_and_what_that_reads(store):
    fill(store)
    artifacts.write(
        store, "work/j-tokenize-1.json", json.dumps({"artifacts": {"corpus": f"{store}/corpus/{KEYS['corpus']}"}})
    )
    artifacts.write(store, "work/j-tokenize-1.followed", "")
    items = [
        garbage.Item(**vars(item) | {"modified": LATER - DAY}) if "tokenize" in item.name else item
        for item in garbage.list_items(store)
    ]
    assert [item.name for item in items if "tokenize" in item.name] == ["work/j-tokenize-1"]

    gone = garbage.find_deletable(items, set(), OLD, LATER)

    assert "corpus" not in names(gone) and "work/j-tokenize-1" not in {item.name for item in gone}


def delete_all(store: str) -> None:
    for item in garbage.find_deletable(garbage.list_items(store), set(), OLD, LATER):
        garbage.delete(store, item)


def test_what_is_deleted_is_gone_with_its_mark_and_is_made_anew(store):
    fill(store)

    delete_all(store)

    left = [str(path.relative_to(store)) for path in Path(store).rglob("*") if path.is_file()]
    assert [name for name in left if not name.endswith(".lock")] == ["mlruns/is/not/ours.json"]
    assert make(store, "corpus")


def test_on_s3_too_it_is_gone_there_and_here(bucket, store):
    url = f"s3://{bucket.name}/gc"
    fill(url)
    here = artifacts.local_directory(url)
    assert (here / "corpus" / KEYS["corpus"]).is_dir()

    delete_all(url)

    assert names(garbage.list_items(url)) == set()
    assert storage.open(f"{url}/mlruns").entries()
    assert not (here / "corpus" / KEYS["corpus"]).exists()


def test_local_files_of_a_failed_preparation_are_found_although_the_store_is_remote(bucket, store):
    url = f"s3://{bucket.name}/failed"
    name = "preparing/0123456789abcdef"
    local_file = artifacts.local_directory(url) / name / "done" / "clean-000000.json"
    local_file.parent.mkdir(parents=True)
    local_file.write_text("{}")

    assert [item.name for item in garbage.list_items(url)] == [name]
    delete_all(url)

    assert not (artifacts.local_directory(url) / name).exists()

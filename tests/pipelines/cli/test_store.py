"""`infoxlm gc` lists deletable items, deletes them on request, and keeps what registered models are made of."""

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import mlflow
import pytest
from click.testing import Result

from components.adapters.mlflow import connection
from components.platform import artifacts
from infoxlm_core import manifests
from tests.pipelines.commands import assert_refused, invoke

AGE_SECONDS = 100 * 86_400


@pytest.fixture(scope="module")
def new_store(tmp_path_factory) -> Iterator[Path]:
    """Yield a store with two registered models, one of which is champion, and a corpus that no model needs."""
    os.environ.pop("MLFLOW_TRACKING_URI", None)
    store = tmp_path_factory.mktemp("runs")
    client = connection.connect(store)
    client.create_registered_model("infoxlm")
    for version, (key, alias) in enumerate((("a" * 16, "old"), ("b" * 16, "champion")), 1):
        artifact = build_artifact(store, "pretrained", key)
        tags = {"made_as": f"pretrained/{key}", "digest": manifests.load(artifact)["digest"]}
        client.create_model_version("infoxlm", str(artifact), tags=tags)
        client.set_registered_model_alias("infoxlm", alias, str(version))
    build_artifact(store, "corpus", "c" * 16)
    yield store
    mlflow.set_tracking_uri(None)
    os.environ.pop("MLFLOW_TRACKING_URI", None)


def build_artifact(store: Path, kind: str, key: str) -> Path:
    """Write an artifact with one file to a store."""

    def build(output: Path) -> None:
        (output / "weights").write_text(key)

    return artifacts.get_or_build(str(store), kind, key, build)


@pytest.fixture
def store(new_store, tmp_path, monkeypatch) -> Path:
    """Return a copy of the store whose files are a hundred days old."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    store = tmp_path / "runs"
    shutil.copytree(new_store, store)
    modified = time.time() - AGE_SECONDS
    for path in store.rglob("*"):
        os.utime(path, (modified, modified))
    return store


def collect_garbage(store: object, *options: str) -> Result:
    return invoke("gc", store, *options)


def list_artifacts(store: Path) -> list[str]:
    """Return the kind and the first letter of the key of each artifact."""
    return sorted(f"{path.parent.parent.name}/{path.parent.name[0]}" for path in store.glob("*/*/manifest.json"))


def test_items_are_only_listed_without_delete(store):
    result = collect_garbage(store)

    assert result.exit_code == 0, result.stderr
    for text in (f"corpus/{'c' * 16}", "1 of 3 items", "--delete"):
        assert text in result.stdout
    assert f"models: sqlite:///{store}/mlflow.db" in result.stdout  # the registry whose models are protected
    assert list_artifacts(store) == ["corpus/c", "pretrained/a", "pretrained/b"]


@pytest.mark.parametrize(
    ("options", "remaining_artifacts"),
    [
        (["--delete"], ["pretrained/a", "pretrained/b"]),
        (["--delete", "--keep", " champion, "], ["pretrained/b"]),
        (["--delete", "--older-than", "101d"], ["corpus/c", "pretrained/a", "pretrained/b"]),
    ],
    ids=["all models are kept", "only the champion is kept", "nothing is old enough"],
)
def test_old_artifacts_of_no_kept_model_are_deleted(store, options, remaining_artifacts):
    result = collect_garbage(f"{store}/", *options)

    assert result.exit_code == 0, result.stderr
    assert f"{3 - len(remaining_artifacts)} of 3 items" in result.stdout
    assert list_artifacts(store) == remaining_artifacts


def test_unknown_alias_is_refused(store):
    result = collect_garbage(store, "--delete", "--keep", "champion,candidate")

    assert_refused(result, "'candidate'")
    assert len(list_artifacts(store)) == 3


@pytest.mark.parametrize("location", ["s3://bucket/store", "{folder}/empty"])
def test_store_without_a_registry_is_refused(tmp_path, monkeypatch, location):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("INFOXLM_CACHE", str(tmp_path / "cache"))

    result = collect_garbage(location.replace("{folder}", str(tmp_path)), "--delete")

    assert_refused(result, "set MLFLOW_TRACKING_URI")


@pytest.mark.parametrize("age", ["30", "0d", "month", "-1d"])
def test_invalid_age_is_refused(tmp_path, age):
    assert_refused(collect_garbage(tmp_path, f"--older-than={age}"), "is not an age. Give days or hours")

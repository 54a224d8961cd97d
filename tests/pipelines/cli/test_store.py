"""infoxlm gc: what it shows, deletes, and never touches."""

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import mlflow
import pytest
from typer.testing import CliRunner

from components.adapters.mlflow import connection
from components.platform import artifacts
from infoxlm_core import manifests
from pipelines.cli import app

MONTHS = 100 * 86_400


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Iterator[Path]:
    """Two models: one is champion, the other is registered, too; and a corpus that neither was made of."""
    os.environ.pop("MLFLOW_TRACKING_URI", None)
    store = tmp_path_factory.mktemp("runs")
    client = connection.connect(store)
    client.create_registered_model("infoxlm")
    for number, (key, alias) in enumerate((("a" * 16, "old"), ("b" * 16, "champion")), 1):
        made = make(store, "pretrained", key)
        tags = {"made_as": f"pretrained/{key}", "digest": manifests.load(made)["digest"]}
        client.create_model_version("infoxlm", str(made), tags=tags)
        client.set_registered_model_alias("infoxlm", alias, str(number))
    make(store, "corpus", "c" * 16)
    yield store
    mlflow.set_tracking_uri(None)
    os.environ.pop("MLFLOW_TRACKING_URI", None)


def make(store: Path, kind: str, key: str) -> Path:
    def build(output: Path) -> None:
        (output / "weights").write_text(key)

    return artifacts.get_or_build(str(store), kind, key, build)


@pytest.fixture
def store(models, tmp_path, monkeypatch) -> Path:
    """The same, a hundred days old."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    store = tmp_path / "runs"
    shutil.copytree(models, store)
    for path in store.rglob("*"):
        os.utime(path, (time.time() - MONTHS,) * 2)
    return store


def gc(store: Path, *options: str) -> str:
    done = CliRunner().invoke(app, ["gc", str(store), *options])
    return f"{done.exit_code} {done.output}"


def left(store: Path) -> list[str]:
    return sorted(f"{path.parent.parent.name}/{path.parent.name[0]}" for path in store.glob("*/*/manifest.json"))


def test_it_only_shows_unless_told_to_delete(store):
    said = gc(store)

    assert said.startswith("0 ") and f"corpus/{'c' * 16}" in said and "1 of 3 items" in said and "--delete" in said
    assert f"models: sqlite:///{store}/mlflow.db" in said  # who looks sees whose models were asked for
    assert left(store) == ["corpus/c", "pretrained/a", "pretrained/b"]


def test_what_a_registered_version_was_made_of_stays(store):
    assert "deleted" in gc(store, "--delete")

    assert left(store) == ["pretrained/a", "pretrained/b"]


def test_of_the_versions_those_count_whose_alias_is_named(store):
    gc(store, "--delete", "--keep", " champion, ")

    assert left(store) == ["pretrained/b"]


def test_an_alias_that_no_model_has_is_refused(store):
    said = gc(store, "--delete", "--keep", "champion,candidate")

    assert said.startswith("2 ") and "'candidate'" in said and len(left(store)) == 3


@pytest.mark.parametrize("place", ["s3://bucket/store", "an empty folder"])
def test_without_the_registry_nothing_is_called_superfluous(store, tmp_path, monkeypatch, place):
    monkeypatch.setenv("INFOXLM_CACHE", str(tmp_path / "cache"))
    where = place if "://" in place else tmp_path / place

    said = gc(where, "--delete")

    assert said.startswith("2 ") and "set MLFLOW_TRACKING_URI" in said


def test_a_slash_at_the_end_changes_nothing(store):
    assert "1 of 3 items" in gc(f"{store}/", "--delete") and len(left(store)) == 2


def test_what_is_younger_than_the_limit_stays(store):
    assert "0 of 3" in gc(store, "--older-than", "101d")


@pytest.mark.parametrize("age", ["30", "0d", "month", "-1d"])
def test_an_age_that_cannot_be_read_is_refused(store, age):
    assert gc(store, f"--older-than={age}").startswith("2 ") and len(left(store)) == 3

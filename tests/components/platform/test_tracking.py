"""A tracker is an adapter and a line in a table: stages report to the one that the environment names."""

import sys
from pathlib import Path

import pytest
from kfp import dsl

from components.platform import artifacts, tracking
from components.platform import work as works
from components.prepare_corpus import prepare_corpus
from infoxlm_core.errors import ConfigError
from infoxlm_core.training.tracker import FileTracker


class Notebook(tracking.Untracked):
    """A tracker for people who write down what they see."""

    def __init__(self) -> None:
        self.pages: list[object] = []

    def log_metrics(self, metrics) -> None:
        self.pages.append(dict(metrics))

    def log_artifacts(self, source: Path, path: str | None = None) -> None:
        self.pages.append((source.name, path))


@pytest.fixture
def prepared(tmp_path, monkeypatch):
    """Call the component; nothing but its reporting is real."""

    def prepare(work, spread, output: Path) -> dict:
        (output / "report.json").write_text("{}")
        return {"sentences": 3}

    monkeypatch.setitem(works.LED, "prepare_corpus", prepare)
    (tmp_path / "corpus.txt").write_text("a sentence\n")
    source = {"name": "one", "languages": ["en"], "format": "text", "path": [str(tmp_path / "corpus.txt")]}

    def call() -> Path:
        corpus, metrics = dsl.Dataset(uri=str(tmp_path / "pointer")), dsl.Metrics(uri=str(tmp_path / "metrics"))
        prepare_corpus.python_func({"languages": ["en"], "corpora": [source]}, str(tmp_path / "store"), corpus, metrics)
        return artifacts.resolve(corpus)[0]

    return call


def test_a_stage_reports_to_a_tracker_of_the_table(prepared, monkeypatch):
    notebook = Notebook()
    monkeypatch.setitem(tracking.TRACKERS, "notebook", lambda _: notebook)
    monkeypatch.setenv(tracking.VARIABLE, "notebook")

    prepared()

    assert notebook.pages == [{"sentences": 3}, ("report.json", "preparation")]


def test_without_a_tracker_mlflow_is_never_imported(prepared, monkeypatch):
    monkeypatch.setenv(tracking.VARIABLE, "none")
    monkeypatch.setitem(sys.modules, "mlflow", None)  # an import of it fails

    assert (prepared() / "report.json").is_file()


def test_without_a_tracker_the_curves_of_a_training_are_a_file(tmp_path, monkeypatch):
    monkeypatch.setenv(tracking.VARIABLE, "none")

    assert isinstance(tracking.find_run("").follow(tmp_path / "metrics.jsonl"), FileTracker)


def test_an_unknown_tracker_is_one_clear_line(monkeypatch):
    monkeypatch.setenv(tracking.VARIABLE, "paper")

    with pytest.raises(ConfigError, match="INFOXLM_TRACKER: 'paper' is no tracker; known are mlflow, none"):
        tracking.open_run("store")


def test_a_sweep_without_mlflow_is_refused_before_it_trains(monkeypatch):
    monkeypatch.setenv(tracking.VARIABLE, "none")

    with pytest.raises(ConfigError, match="INFOXLM_TRACKER: 'none', but a sweep reads its trials from MLflow"):
        tracking.open_run("store", {"variant": "full", "seed": 1})

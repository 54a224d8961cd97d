"""A tracker is an adapter and a line in a table: stages report to the one that the environment names."""

import functools
import json
import operator
import sys
from pathlib import Path

import pytest
from kfp import dsl

from components.adapters.mlflow import connection
from components.platform import artifacts, stage_work, tracking
from components.prepare_corpus import prepare_corpus
from infoxlm_core.errors import ConfigError
from infoxlm_core.results.trials import Trial
from infoxlm_core.training.tracker import FileTracker


class Pages(tracking.Untracked):
    """A tracker that needs no server: each run is a file of JSON lines. All that a second one must be is here."""

    def __init__(self) -> None:
        self.file = Path()

    def open_run(self, key: str, name: str, store: str, local_store: Path, trial: Trial | None) -> tracking.Run:
        self.id, self.name = (f"{key}/{trial.name}", trial.name) if trial else (key, name)
        self.file = local_store / f"{self.id.replace('/', '-')}.jsonl"
        return self

    def log_params(self, config) -> None:
        self.write(params=config)

    def log_metrics(self, metrics) -> None:
        self.write(metrics=metrics)

    def log_artifacts(self, source: Path, path: str | None = None) -> None:
        self.write(artifact=source.name, folder=path)

    def end(self, status: str = "FINISHED", stage: str = "", message: str = "") -> None:
        self.write(ended=status, stage=stage, message=message)

    def describe(self) -> str:
        return f"pages       {self.file}"

    def write(self, **line) -> None:
        with self.file.open("a") as file:
            file.write(json.dumps(line) + "\n")

    @staticmethod
    def read(file: Path) -> dict:
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        metrics = [line["metrics"] for line in lines if "metrics" in line]
        return functools.reduce(operator.or_, [*lines, {"metrics": functools.reduce(operator.or_, metrics, {})}])


@pytest.fixture
def prepared(tmp_path, monkeypatch):
    """Call the component; nothing but its reporting is real."""

    def prepare(work, spread, output: Path) -> dict:
        (output / "report.json").write_text("{}")
        return {"sentences": 3}

    monkeypatch.setitem(stage_work.TEXT_STAGES, "prepare_corpus", prepare)
    (tmp_path / "corpus.txt").write_text("a sentence\n")
    source = {"name": "one", "languages": ["en"], "format": "text", "path": [str(tmp_path / "corpus.txt")]}

    def call() -> Path:
        corpus, metrics = dsl.Dataset(uri=str(tmp_path / "pointer")), dsl.Metrics(uri=str(tmp_path / "metrics"))
        prepare_corpus.python_func({"languages": ["en"], "corpora": [source]}, str(tmp_path / "store"), corpus, metrics)
        return artifacts.resolve(corpus)[0]

    return call


@pytest.fixture
def pages(monkeypatch):
    """The tracker in the table, and chosen."""
    monkeypatch.setitem(tracking.TRACKERS, "pages", Pages)
    monkeypatch.setenv(tracking.VARIABLE, "pages")


def test_a_stage_reports_to_a_tracker_of_the_table(prepared, pages, tmp_path, monkeypatch):
    monkeypatch.setenv("RUN_ID", "toy-1")
    monkeypatch.setitem(sys.modules, "mlflow", None)  # an import of it fails

    prepared()

    said = Pages.read(tmp_path / "store/toy-1.jsonl")
    assert said["params"]["preparation"]["languages"] == ["en"]
    assert said["metrics"].keys() == {"sentences", "cost/cpu_hours/prepare_corpus"}
    assert (said["artifact"], said["folder"]) == ("report.json", "preparation")


def test_a_trial_is_a_run_of_its_own_to_a_tracker_of_the_table(pages, tmp_path, monkeypatch):
    monkeypatch.setenv("RUN_ID", "toy-1")

    run = tracking.open_run(str(tmp_path), {"variant": "full", "seed": 1.0})

    assert (run.id, run.name) == ("toy-1/full seed 1", "full seed 1")


def test_the_registry_has_mlflows_run_whatever_tracks(store, pages):
    run = tracking.open_run(str(store), tracker_name="mlflow")

    assert connection.connect(store).get_run(run.id).info.status == "RUNNING" and "MLflow" in run.describe()


def test_without_a_tracker_the_curves_of_a_training_are_a_file(tmp_path, monkeypatch):
    monkeypatch.setenv(tracking.VARIABLE, "none")

    assert isinstance(tracking.tracker().find_run("").follow(tmp_path / "metrics.jsonl"), FileTracker)


def test_an_unknown_tracker_is_one_clear_line(monkeypatch):
    monkeypatch.setenv(tracking.VARIABLE, "paper")

    with pytest.raises(ConfigError, match="INFOXLM_TRACKER: 'paper' is not a tracker; known are mlflow, none"):
        tracking.open_run("store")

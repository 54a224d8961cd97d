"""Stages report to the tracker that the environment names."""

import sys

import pytest
from kfp import dsl

from components.adapters.mlflow import connection
from components.platform import builds, tracking
from components.prepare_corpus import prepare_corpus
from infoxlm_core.errors import ConfigError


def test_new_tracker_needs_only_a_line_in_the_table(recorder, tmp_path, monkeypatch):
    def prepare(spec, parallel_map, output) -> dict:
        (output / "report.json").write_text("{}")
        return {"sentences": 3}

    monkeypatch.setitem(sys.modules, "mlflow", None)  # importing it fails
    monkeypatch.setitem(builds.TEXT_STAGES, "prepare_corpus", prepare)
    (tmp_path / "corpus.txt").write_text("a sentence\n")
    source = {"name": "one", "languages": ["en"], "format": "text", "path": [str(tmp_path / "corpus.txt")]}
    corpus, metrics = dsl.Dataset(uri=str(tmp_path / "pointer")), dsl.Metrics(uri=str(tmp_path / "metrics"))

    prepare_corpus.python_func({"languages": ["en"], "corpora": [source]}, str(tmp_path / "store"), corpus, metrics)

    _, settings, counts, cost, artifact = recorder.calls
    assert settings["preparation"]["languages"] == ["en"]
    assert counts == {"sentences": 3}
    assert cost.keys() == {"cost/cpu_hours/prepare_corpus"}
    assert artifact == ("report.json", "preparation")
    assert metrics.metadata == {"sentences": 3}


def test_registry_has_a_run_in_mlflow_whatever_the_environment_names(store, monkeypatch):
    monkeypatch.setenv(tracking.VARIABLE, "none")

    run = tracking.open_run(str(store), tracker_name="mlflow")

    assert connection.connect(store).get_run(run.id).info.status == "RUNNING"
    assert "MLflow" in run.describe()


def test_unknown_tracker_is_refused(monkeypatch):
    monkeypatch.setenv(tracking.VARIABLE, "paper")

    with pytest.raises(ConfigError, match="INFOXLM_TRACKER: 'paper' is not a tracker; known are mlflow, none"):
        tracking.open_run("store")

"""Stages report to the tracker that the environment names."""

import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from kfp import dsl

from components.adapters.mlflow import connection
from components.platform import builds, tracking
from components.prepare_corpus import prepare_corpus
from infoxlm_core.errors import ConfigError
from tests.servers.processes import until

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run


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


@pytest.mark.item("P11")
def test_steps_that_start_at_the_same_time_share_a_run(store, monkeypatch, caplog):
    """The first step creates its run while the second one opens a run, with an earlier start time."""
    from mlflow import MlflowClient

    caplog.set_level("INFO")
    connection.connect(store)
    create_run = MlflowClient.create_run
    second_step: list[Future[str]] = []

    def open_run() -> str:
        return tracking.open_run(str(store)).id

    def create_run_slowly(client: "MlflowClient", *arguments: str, **options: str) -> "Run":
        if second_step:  # this is the call of the second step
            return create_run(client, *arguments, **options)
        start_time = int(time.time() * 1000)
        time.sleep(0.01)
        second_step.append(threads.submit(open_run))
        until(lambda: second_step[0].done() or "waiting for the process that holds the lock" in caplog.text)
        return create_run(client, *arguments, **options, start_time=start_time)

    monkeypatch.setattr(MlflowClient, "create_run", create_run_slowly)
    with ThreadPoolExecutor(1) as threads:
        assert open_run() == second_step[0].result()


def test_unknown_tracker_is_refused(monkeypatch):
    monkeypatch.setenv(tracking.VARIABLE, "paper")

    with pytest.raises(ConfigError, match="INFOXLM_TRACKER: 'paper' is not a tracker; known are mlflow, none"):
        tracking.open_run("store")

"""A thread sends the curves of a training to MLflow: each point once, and without delaying the training."""

import http.server
import os
import time

import pytest

from components.adapters.mlflow import connection
from components.adapters.mlflow.outbox import MlflowTracker, ship
from infoxlm_core.training.tracker import FileTracker
from infoxlm_core.training.tracker import read as points_of
from tests.components.conftest import history, open_run
from tests.servers.processes import answering, free_port, kill
from tests.servers.tracking import running_mlflow


def test_curve_that_is_shipped_twice_arrives_once(store):
    run_id = open_run(store)
    curve = FileTracker(store / "metrics.jsonl")
    for step in range(1, 701):  # 1400 metrics are more than one batch
        curve.log(step, {"loss/mlm": 1 / step, "rate": float("nan") if step == 700 else 0.1})
    curve.close()
    with (store / "metrics.jsonl").open("a") as file:
        file.write('{"step": 701, "lo')  # incomplete, because the training crashed

    ship(store / "metrics.jsonl", run_id)
    ship(store / "metrics.jsonl", run_id)

    assert history(run_id, "loss/mlm") == [(step, 1 / step) for step in range(1, 701)]
    assert [step for step, _ in history(run_id, "rate")] == list(range(1, 701))


@pytest.mark.item("F11")
def test_resumed_run_ships_what_is_missing_and_no_step_twice(store):
    run_id = open_run(store)
    crashed = FileTracker(store / "metrics.jsonl")
    for step in (1, 2, 3):
        crashed.log(step, {"loss": float(step), "seconds": 0.5})
    ship(store / "metrics.jsonl", run_id)
    crashed.log(4, {"loss": 4.0, "seconds": 0.5})  # the last checkpoint was at step 2

    tracker = MlflowTracker(store / "metrics.jsonl", run_id)
    tracker.resume(2)
    for step in (3, 4, 5):
        tracker.log(step, {"loss": float(step), "seconds": 0.7})  # step 3 is repeated more slowly
    tracker.close()

    assert history(run_id, "loss") == [(step, float(step)) for step in (1, 2, 3, 4, 5)]
    assert history(run_id, "seconds") == [(1, 0.5), (2, 0.5), (3, 0.5), (4, 0.7), (5, 0.7)]
    assert "MLFLOW_HTTP_REQUEST_TIMEOUT" not in os.environ


def test_steps_repeated_after_a_rewind_are_separate_metrics(store):
    run_id = open_run(store)
    tracker = MlflowTracker(store / "metrics.jsonl", run_id)
    tracker.resume(0)
    for step in (1, 2, 3, 4):
        tracker.log(step, {"loss": 10.0 * step})
    tracker.resume(2)  # while the thread ships
    for step in (3, 4):
        tracker.log(step, {"loss": float(step), "rewinds": 1.0, "repeated": 1.0})
    tracker.log(5, {"loss": 5.0, "rewinds": 1.0})
    tracker.close()
    ship(store / "metrics.jsonl", run_id)  # as the registration does

    assert history(run_id, "loss") == [(1, 10.0), (2, 20.0), (3, 30.0), (4, 40.0), (5, 5.0)]
    assert history(run_id, "rewind1/loss") == [(3, 3.0), (4, 4.0)]
    assert [step for step, _ in points_of(store / "metrics.jsonl")] == [1, 2, 3, 4, 5]


def test_late_points_are_sent_to_the_server_of_their_run(store, tmp_path, monkeypatch):
    import mlflow

    run_id = open_run(store)
    server = os.environ["MLFLOW_TRACKING_URI"]
    tracker = MlflowTracker(store / "metrics.jsonl", run_id)
    working_directory = tmp_path / "working directory"
    working_directory.mkdir()
    monkeypatch.chdir(working_directory)
    mlflow.set_tracking_uri(None)
    os.environ.pop("MLFLOW_TRACKING_URI", None)

    tracker.resume(0)
    tracker.log(1, {"loss": 0.5})
    tracker.close()

    assert not list(working_directory.iterdir())  # MLflow's default is a database in the working directory
    mlflow.set_tracking_uri(server)
    assert history(run_id, "loss") == [(1, 0.5)]


class FailingMlflow(http.server.BaseHTTPRequestHandler):
    """A healthy MLflow that answers all requests with an error after a delay."""

    delay_seconds, status = 0.0, 500

    def do_GET(self) -> None:
        if self.path != "/health":
            time.sleep(self.delay_seconds)
        self.send_response(self.status)
        self.end_headers()

    do_POST = do_GET


@pytest.mark.item("F11")
@pytest.mark.parametrize(("delay_seconds", "status"), [(60.0, 500), (0.0, 403)])
def test_slow_or_failing_server_delays_no_step_and_missing_points_are_counted(store, caplog, delay_seconds, status):
    handler = type("Handler", (FailingMlflow,), {"delay_seconds": delay_seconds, "status": status})
    with answering(handler) as os.environ["MLFLOW_TRACKING_URI"]:
        connection.connect(store)
        tracker = MlflowTracker(store / "metrics.jsonl", "0" * 32)
        tracker.resume(0)
        start = time.monotonic()
        for step in range(1, 21):
            tracker.log(step, {"loss": 1.0})
        tracker.close(timeout=2)
        seconds = time.monotonic() - start

    assert seconds < 30  # the slow server needs 60 s for an answer
    assert "20 lines" in caplog.text
    assert "are not in MLflow run" in caplog.text


@pytest.mark.item("F11")
@pytest.mark.slow
def test_server_killed_during_a_training_loses_and_repeats_no_point(store, tmp_path, record_property):
    port = free_port()
    os.environ["MLFLOW_TRACKING_URI"] = f"http://127.0.0.1:{port}"
    with running_mlflow(tmp_path, port) as server:
        run_id = open_run(store)
        tracker = MlflowTracker(tmp_path / "metrics.jsonl", run_id)
        tracker.resume(0)
        seconds = [measure_log_seconds(tracker, step) for step in range(1, 201)]
        while not history(run_id, "loss"):  # until some points have arrived
            time.sleep(0.1)
        kill(server)
        seconds += [measure_log_seconds(tracker, step) for step in range(201, 401)]

    with running_mlflow(tmp_path, port):
        seconds += [measure_log_seconds(tracker, step) for step in range(401, 501)]
        tracker.close(timeout=120)  # a busy machine may be slow

        assert history(run_id, "loss") == [(step, 1 / step) for step in range(1, 501)]
    milliseconds = [1000 * value for value in sorted(seconds)]
    record_property("figure", f"500 points; log() took {milliseconds[250]:.3f} ms (p50), {milliseconds[495]:.3f} (p99)")
    assert sum(seconds) < 60  # 200 requests to a dead server, one after the other, take minutes


def measure_log_seconds(tracker: MlflowTracker, step: int) -> float:
    """Log a point after a short step, and return how long that took."""
    time.sleep(0.01)
    start = time.perf_counter()
    tracker.log(step, {"loss": 1 / step})
    return time.perf_counter() - start

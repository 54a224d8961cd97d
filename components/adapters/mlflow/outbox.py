"""Send the curves of a training run to MLflow. A background thread ships the file `metrics.jsonl`."""

import logging
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from components.adapters.mlflow.errors import translate_errors
from infoxlm_core.errors import one_line
from infoxlm_core.training.tracker import FileTracker, parse

logger = logging.getLogger(__name__)

_RETRY_VARIABLES = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "5"}
"""Settings of MLflow's client while the thread ships. Its limits are low, because the thread itself retries."""
_MAX_PAUSE_SECONDS = 60  # longest pause between attempts while the server does not answer


def make_metrics(values: Mapping[str, float], step: int, start_ms: int) -> list[Any]:
    """Return one step's values as MLflow metrics.

    MLflow merges repeated values only if their timestamps are equal, so the timestamp is computed from the step.
    """
    from mlflow.entities import Metric

    return [Metric(name, float(value), start_ms + 1000 * step, step) for name, value in values.items()]


def ship(path: Path, run_id: str, prefix: str = "") -> None:
    """Send all metrics of a `metrics.jsonl` that MLflow does not have yet. Add a prefix to the metric names."""
    with translate_errors(f"{path} -> MLflow run {run_id}"):
        _Outbox(path, run_id, prefix).ship()


class MlflowTracker:
    """Tracker of a training run. It writes metrics to a file, and a background thread sends the file to MLflow.

    Training neither waits for MLflow nor sees its errors: unsent metrics stay in the file until a restart or `ship`
    sends them. Only a rewind waits, because it truncates the file. MLflow keeps the metrics of the truncated steps, so
    metrics of repeated steps get new names, such as `rewind1/loss/mlm`.
    """

    def __init__(self, path: Path, run_id: str) -> None:
        self._file = FileTracker(path)
        self._outbox = _Outbox(path, run_id)
        self._closing = threading.Event()
        self._deadline = 0.0  # end of the time for shipping after close(), on the monotonic clock
        self._thread = threading.Thread(target=self._ship_until_closed, name="mlflow-tracker", daemon=True)
        self._previous_environment: dict[str, str | None] = {}  # values of `_RETRY_VARIABLES` before the thread started

    def resume(self, step: int) -> None:
        """Delete the file's lines of later steps, and start the background thread."""
        if self._thread.is_alive():
            self._outbox.ship_and_truncate(self._file, step)
            return
        self._file.resume(step)
        self._previous_environment = {variable: os.environ.get(variable) for variable in _RETRY_VARIABLES}
        os.environ.update(_RETRY_VARIABLES)
        self._thread.start()

    def log(self, step: int, values: dict[str, float]) -> None:
        """Log a step's values to the file."""
        self._file.log(step, values)

    def sync(self) -> None:
        """Write the file to the disk."""
        self._file.sync()

    def close(self, timeout: float = 30.0) -> None:
        """Send the remaining metrics for at most `timeout` seconds. Log a warning with the number of unsent lines."""
        self._file.close()
        self._deadline = time.monotonic() + timeout
        self._closing.set()
        if self._thread.is_alive():  # `resume` has started it
            self._thread.join(timeout)
        self._restore_environment()  # the rest of the process needs MLflow's usual retries
        missing_count = self._outbox.count_missing()
        if missing_count:
            path = self._file.path
            logger.warning("%d lines of %s are not in MLflow run %s", missing_count, path, self._outbox.run_id)

    def _restore_environment(self) -> None:
        """Restore the environment variables that `resume` replaced."""
        for variable, value in self._previous_environment.items():
            if value is None:
                del os.environ[variable]
            else:
                os.environ[variable] = value
        self._previous_environment = {}

    def _ship_until_closed(self) -> None:
        """Send new lines until the tracker is closed. Then continue until MLflow has all lines or the deadline ends."""
        failure_count = 0
        while True:
            is_closing = self._closing.is_set()  # read this before shipping, so that the last call sends all lines
            is_shipped = self._try_to_ship(failure_count)
            failure_count = 0 if is_shipped else failure_count + 1
            if is_closing and (is_shipped or time.monotonic() > self._deadline):
                return
            if is_closing:
                time.sleep(1)  # waiting for `_closing`, which is set, would return at once
            else:
                pause = 2**failure_count  # even without failures, a pause of 1 s lets several steps share a request
                self._closing.wait(min(pause, _MAX_PAUSE_SECONDS))

    def _try_to_ship(self, failure_count: int) -> bool:
        """Send new lines of the file, and return whether MLflow accepted them. Log only the first failure in a row."""
        try:
            self._outbox.ship()
        except Exception as error:  # MLflow errors must not stop the training
            if failure_count == 0:
                reason = one_line(error)
                logger.warning("cannot send metrics to MLflow (%s): they wait in %s", reason, self._file.path)
            return False
        if failure_count > 0:
            logger.info("MLflow receives metrics again, after %d failed attempts", failure_count)
        return True


class _Outbox:
    """Ships the lines of a `metrics.jsonl` to MLflow, and remembers its position in the file.

    Each metric is shipped once per step. Steps that a crashed attempt has shipped are skipped, because repeated values,
    such as tokens per second, may differ.
    """

    def __init__(self, path: Path, run_id: str, prefix: str = "") -> None:
        self.path = path
        self.run_id = run_id
        self.prefix = prefix
        self._server = os.environ.get("MLFLOW_TRACKING_URI")  # the variable may change while the thread ships
        self._shipped_bytes = 0  # end of the shipped part of the file
        self._last_steps: dict[str, int] | None = None  # last step of each metric in MLflow before the first shipping
        self._lock = threading.Lock()

    def count_missing(self) -> int:
        """Return the number of unshipped lines."""
        with self.path.open("rb") as file:
            file.seek(self._shipped_bytes)
            return sum(1 for _ in file)

    def ship_and_truncate(self, file: FileTracker, step: int) -> None:
        """Try to ship all lines. Then delete the file's lines of steps later than `step`."""
        with self._lock:  # the background thread must not read the file during the truncation
            try:
                self._ship_new_lines()
            except Exception as error:  # MLflow errors must not stop the training
                lost_count = self.count_missing()
                logger.warning("cannot send metrics to MLflow (%s): %d lines are lost", one_line(error), lost_count)
            file.resume(step)  # deletes the lines of later steps
            self._shipped_bytes = min(self._shipped_bytes, self.path.stat().st_size)  # shipped lines may be deleted

    def ship(self) -> None:
        """Ship all complete new lines of the file. After an error, the next call ships the same lines again."""
        with self._lock:
            self._ship_new_lines()

    def _ship_new_lines(self) -> None:
        """Ship all complete new lines of the file. The caller must hold the lock."""
        from mlflow import MlflowClient

        if self.path.stat().st_size == self._shipped_bytes:
            return
        client = MlflowClient(self._server)
        run = client.get_run(self.run_id)
        if self._last_steps is None:
            # `run.data.metrics` has no steps, and `get_metric_history` needs a request for each metric.
            self._last_steps = {metric.key: metric.step for metric in run.data.to_proto().metrics}
        metrics: list[Any] = []
        position = self._shipped_bytes
        for line in self._read_new_lines():
            step, values = parse(line, f"{self.path}, byte {position}")
            new_values = self._select_new_values(step, values)
            metrics += make_metrics(new_values, step, run.info.start_time)
            position += len(line)
        client.log_batch(self.run_id, metrics)  # splits the metrics into requests within MLflow's limits
        self._shipped_bytes = position  # set after the request, so that a failed request is repeated

    def _read_new_lines(self) -> list[bytes]:
        """Return the unshipped lines of the file, without an incomplete last line."""
        with self.path.open("rb") as file:
            file.seek(self._shipped_bytes)
            lines = file.readlines()
        if lines and not lines[-1].endswith(b"\n"):
            lines.pop()
        return lines

    def _select_new_values(self, step: int, values: dict[str, float]) -> dict[str, float]:
        """Return a step's values that MLflow does not have, by MLflow's metric name."""
        prefix = self.prefix
        is_after_rewind = values.pop("repeated", None)
        if is_after_rewind:  # MLflow keeps the metrics from before the rewind, so repeated steps need new names
            prefix += f"rewind{values['rewinds']:.0f}/"
        last_steps = self._last_steps or {}
        named_values = {prefix + name: value for name, value in values.items()}
        return {name: value for name, value in named_values.items() if step > last_steps.get(name, -1)}

"""Send the curves of a training to MLflow: a background thread ships its `metrics.jsonl` to a run."""

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from components.adapters.mlflow.errors import translate_errors
from infoxlm_core.errors import one_line
from infoxlm_core.training.tracker import FileTracker, parse

logger = logging.getLogger(__name__)

_SHIPPING = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "5"}  # seconds; we retry ourselves
_LONGEST_PAUSE = 60  # seconds between two attempts to reach a server that is gone


def points(values: Mapping[str, float], step: int, start_ms: int) -> list[Any]:
    """Return the values of one step as metrics of MLflow.

    MLflow stores a repeated metric once only if its timestamp is the same, so the timestamp is computed from the step.
    """
    from mlflow.entities import Metric

    return [Metric(name, float(value), start_ms + 1000 * step, step) for name, value in values.items()]


def ship(path: Path, run_id: str, prefix: str = "") -> None:
    """Ship a whole `metrics.jsonl`, with `prefix` before each name, except the points that MLflow already has."""
    with translate_errors(f"{path} -> MLflow run {run_id}"):
        _Outbox(path, run_id, prefix).ship()


class MlflowTracker:
    """A `FileTracker` whose file a daemon thread ships to MLflow in step order; a restart ships what is missing.

    Training neither waits for MLflow nor sees its errors: points that are not shipped stay in the file for `ship`.
    Only a rewind waits, because it truncates the file. MLflow keeps the points that are cut off, so the repeated steps
    get other names, such as `rewind1/loss/mlm`.
    """

    def __init__(self, path: Path, run_id: str) -> None:
        self._file = FileTracker(path)
        self._outbox = _Outbox(path, run_id)
        self._closing = threading.Event()
        self._deadline = 0.0  # for shipping after close(), on the monotonic clock
        self._thread = threading.Thread(target=self._ship, name="mlflow-tracker", daemon=True)
        self._environment: dict[str, str | None] = {}

    def resume(self, step: int) -> None:
        """Truncate the file after a step, and start shipping it."""
        if self._thread.is_alive():
            self._outbox.shorten(lambda: self._file.resume(step))
            return
        self._file.resume(step)
        self._environment = {name: os.environ.get(name) for name in _SHIPPING}
        os.environ.update(_SHIPPING)
        self._thread.start()

    def log(self, step: int, values: dict[str, float]) -> None:
        """Log values of a step to the file."""
        self._file.log(step, values)

    def sync(self) -> None:
        """Write the file to the disk."""
        self._file.sync()

    def close(self, timeout: float = 30.0) -> None:
        """Ship the rest, for `timeout` seconds at most, and log how many points are missing."""
        self._file.close()
        self._deadline = time.monotonic() + timeout
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(timeout)
        for name, value in self._environment.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        self._environment = {}
        if missing := self._outbox.count_missing():
            logger.warning("%d points of %s are not in MLflow run %s", missing, self._file.path, self._outbox.run_id)

    def _ship(self) -> None:
        failures = 0
        while True:
            closing = self._closing.is_set()  # read before shipping: all points logged before close() are in the file
            try:
                self._outbox.ship()
                if failures:
                    logger.info("MLflow takes points again, after %d attempts", failures)
                failures = 0
            except Exception as error:  # no error of MLflow may stop the training
                if not failures:
                    logger.warning("MLflow takes no points (%s): they wait in %s", one_line(error), self._file.path)
                failures += 1
            if closing and (not failures or time.monotonic() > self._deadline):
                return
            if closing:
                time.sleep(1)
            else:
                self._closing.wait(min(2**failures, _LONGEST_PAUSE))  # 1 s without failures, so that points are batched


class _Outbox:
    """Ships a `metrics.jsonl` and remembers which part was shipped. Each (name, step) is shipped once.

    Steps that MLflow already has from a crashed attempt are not shipped again, because repeated values such as tokens
    per second may differ.
    """

    def __init__(self, path: Path, run_id: str, prefix: str = "") -> None:
        self.path, self.run_id, self.prefix = path, run_id, prefix
        self._server = os.environ.get("MLFLOW_TRACKING_URI")  # the variable may change while the thread ships
        self._position = 0  # bytes of the file that were shipped
        self._last_steps: dict[str, int] | None = None  # last step by metric in MLflow before the first shipping
        self._busy = threading.Lock()

    def count_missing(self) -> int:
        """Return the number of lines that were not shipped."""
        with self.path.open("rb") as file:
            file.seek(self._position)
            return sum(1 for _ in file)

    def shorten(self, cut: Callable[[], None]) -> None:
        """Ship as much as possible, then call `cut`, which truncates the file."""
        with self._busy:
            try:
                self._ship()
            except Exception as error:  # no error of MLflow may stop the training
                logger.warning("MLflow takes no points (%s): %d are lost", one_line(error), self.count_missing())
            cut()
            self._position = min(self._position, self.path.stat().st_size)

    def ship(self) -> None:
        """Ship all complete lines of the file; if MLflow raises, the next call ships them again."""
        with self._busy:
            self._ship()

    def _ship(self) -> None:
        from mlflow import MlflowClient

        if self.path.stat().st_size == self._position:
            return
        client = MlflowClient(self._server)
        run = client.get_run(self.run_id)
        if self._last_steps is None:  # one request, where histories would take one per metric
            self._last_steps = {metric.key: metric.step for metric in run.data.to_proto().metrics}
        metrics: list[Any] = []
        position = self._position
        with self.path.open("rb") as file:
            file.seek(position)
            for line in file:
                if not line.endswith(b"\n"):  # the line is being written
                    break
                step, values = parse(line, f"{self.path}, byte {position}")
                is_repeated = values.pop("repeated", None)
                prefix = self.prefix + (f"rewind{values['rewinds']:.0f}/" if is_repeated else "")
                for name, value in values.items():
                    if step > self._last_steps.get(prefix + name, -1):
                        metrics += points({prefix + name: value}, step, run.info.start_time)
                position += len(line)
        client.log_batch(self.run_id, metrics)  # in as many requests as MLflow's limits need
        self._position = position

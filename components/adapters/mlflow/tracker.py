"""MLflow as a tracker: its runs, and what ships the curves of a training to one of them in the background.

What a training logs is in its `metrics.jsonl` first; an outbox remembers how much of that file has arrived.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from components.adapters.mlflow import runs, trial_runs
from components.adapters.mlflow.runs import points, translate_errors
from infoxlm_core.corpora.datasets import Dataset
from infoxlm_core.errors import InputError, one_line, without_password
from infoxlm_core.results.trials import Trial
from infoxlm_core.training.tracker import FileTracker, parse

logger = logging.getLogger(__name__)

PAGES = "INFOXLM_MLFLOW_PAGES"
"""Environment variable: where people open MLflow, if that is another address than that of the steps."""
_SHIPPING = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "5"}  # seconds; we retry ourselves
_LONGEST_PAUSE = 60  # seconds between two attempts to reach a server that is gone


def ship(path: Path, run_id: str, prefix: str = "") -> None:
    """Deliver a whole `metrics.jsonl`, `prefix` before each name; points that arrived before stay single."""
    with translate_errors(f"{path} -> MLflow run {run_id}"):
        _Outbox(path, run_id, prefix).ship()


def open_run(key: str, name: str, store: str, here: Path, trial: Trial | None) -> "MlflowRun":
    """The run of a pipeline run, in MLFLOW_EXPERIMENT_NAME, or of a trial, nested in that.

    Raises:
        InputError: the store is for many machines, and MLFLOW_TRACKING_URI names no server that is so, too.
    """
    if "://" in store and not os.environ.get("MLFLOW_TRACKING_URI"):
        raise InputError(f"{store} is for many machines, MLflow's database in a file is not: set MLFLOW_TRACKING_URI")
    run = runs.open_run(
        os.environ.get("MLFLOW_EXPERIMENT_NAME", "infoxlm"), name, {runs.RUN_TAG: key, **runs.source()}, here
    )
    return MlflowRun(trial_runs.open_trial(run, key, trial) if trial else run)


def find_run(run_id: str) -> "MlflowRun":
    """The run with an id that another process has opened."""
    return MlflowRun(run_id)


def check_sweeps() -> None:
    """It keeps trials."""


def find_ablation(which: str, here: Path) -> "MlflowRun":
    """See `trials.find_ablation`."""
    return MlflowRun(trial_runs.find_ablation(which, here)[0])


class MlflowRun:
    """A run of MLflow as stages report to it."""

    def __init__(self, run_id: str) -> None:
        self.id = run_id

    @property
    def name(self) -> str:
        return trial_runs.name_of(self.id)

    def log_params(self, config: Mapping[str, Any]) -> None:
        runs.log_params(self.id, config)

    def log_metrics(self, metrics: Mapping[str, float]) -> None:
        runs.log_metrics(self.id, metrics)

    def read_metrics(self) -> dict[str, float]:
        return runs.read_metrics(self.id)

    def log_artifacts(self, source: Path, path: str | None = None) -> None:
        runs.log_artifacts(self.id, source, path)

    def log_datasets(self, datasets: Sequence[Dataset], source: str) -> None:
        runs.log_datasets(self.id, datasets, source)

    def annotate(self, text: str) -> None:
        runs.annotate(self.id, text)

    def log_curves(self, path: Path, prefix: str = "") -> None:
        ship(path, self.id, prefix)

    def follow(self, path: Path) -> "MlflowTracker":
        return MlflowTracker(path, self.id)

    def trials(self) -> list[trial_runs.TrialRun]:
        return trial_runs.read(self.id)

    def end(self, status: str = "FINISHED") -> None:
        runs.end_run(self.id, status)

    @property
    def page(self) -> str:
        server = os.environ.get(PAGES) or _server()
        return f"{server.rstrip('/')}/#/{runs.page(self.id)}" if server.startswith("http") else ""

    def describe(self) -> str:
        if page := self.page:
            return f"MLflow      {page}"
        return (
            f"MLflow      mlflow ui --backend-store-uri {_server()}   (run {self.id})\n"
            f"            then http://127.0.0.1:5000/#/{runs.page(self.id)}"
        )


def _server() -> str:
    """MLFLOW_TRACKING_URI without the password that it may hold."""
    return without_password(os.environ["MLFLOW_TRACKING_URI"]).rstrip("/")


class MlflowTracker:
    """A `FileTracker` whose file a daemon thread ships to MLflow in step order; it starts over after a restart.

    Training never waits for MLflow and never hears of its errors: what is not shipped stays in the file for `ship`.
    Only a training that goes back waits for what it did until then, which the file is about to lose: MLflow keeps it,
    and the steps that are taken again follow under names of their own, `rewind1/loss/mlm`.
    """

    def __init__(self, path: Path, run_id: str) -> None:
        self._file = FileTracker(path)
        self._outbox = _Outbox(path, run_id)
        self._closing = threading.Event()
        self._deadline = 0.0  # of shipping after close(), on the monotonic clock
        self._thread = threading.Thread(target=self._ship, name="mlflow-tracker", daemon=True)
        self._environment: dict[str, str | None] = {}

    def resume(self, step: int) -> None:
        if self._thread.is_alive():
            self._outbox.shorten(lambda: self._file.resume(step))
            return
        self._file.resume(step)
        self._environment = {name: os.environ.get(name) for name in _SHIPPING}
        os.environ.update(_SHIPPING)
        self._thread.start()

    def log(self, step: int, values: dict[str, float]) -> None:
        self._file.log(step, values)

    def sync(self) -> None:
        self._file.sync()

    def close(self, timeout: float = 30.0) -> None:
        """Ship what is left, for `timeout` seconds at most, and say what is not shipped."""
        self._file.close()
        self._deadline = time.monotonic() + timeout
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(timeout)
        for name, value in self._environment.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
        self._environment = {}
        if left := self._outbox.left():
            logger.warning("%d points of %s are not in MLflow run %s", left, self._file.path, self._outbox.run_id)

    def _ship(self) -> None:
        failures = 0
        while True:
            closing = self._closing.is_set()  # asked first: what was logged before close() is then in the file
            try:
                self._outbox.ship()
                if failures:
                    logger.info("MLflow takes points again, after %d attempts", failures)
                failures = 0
            except Exception as error:  # whatever it is, training goes on
                if not failures:
                    logger.warning("MLflow takes no points (%s): they wait in %s", one_line(error), self._file.path)
                failures += 1
            if closing and (not failures or time.monotonic() > self._deadline):
                return
            if closing:
                time.sleep(1)
            else:
                self._closing.wait(min(2**failures, _LONGEST_PAUSE))  # 1 s when all is well: points travel together


class _Outbox:
    """How far a `metrics.jsonl` has been shipped. Every (name, step) arrives once, whatever is sent again.

    Steps that MLflow has from an attempt that crashed are not sent: redone, they may differ (tokens per second).
    """

    def __init__(self, path: Path, run_id: str, prefix: str = "") -> None:
        self.path, self.run_id, self.prefix = path, run_id, prefix
        self._server = os.environ.get("MLFLOW_TRACKING_URI")  # a thread that is late must not go by what is there then
        self._position = 0  # bytes of the file that are shipped
        self._last_steps: dict[str, int] | None = None  # by metric, what MLflow had when we first asked
        self._busy = threading.Lock()

    def left(self) -> int:
        """Lines that are not shipped yet."""
        with self.path.open("rb") as file:
            file.seek(self._position)
            return sum(1 for _ in file)

    def shorten(self, action: Callable[[], None]) -> None:
        """Ship what can be shipped, then let `action` cut off the end of the file."""
        with self._busy:
            try:
                self._ship()
            except Exception as error:  # whatever it is, training goes on
                logger.warning("MLflow takes no points (%s): %d are lost", one_line(error), self.left())
            action()
            self._position = min(self._position, self.path.stat().st_size)

    def ship(self) -> None:
        """Ship all complete lines of the file, batch by batch; an exception of MLflow leaves the rest for next time."""
        with self._busy:
            self._ship()

    def _ship(self) -> None:
        from mlflow import MlflowClient
        from mlflow.utils.validation import MAX_METRICS_PER_BATCH

        if self.path.stat().st_size == self._position:
            return
        client = MlflowClient(self._server)
        run = client.get_run(self.run_id)
        start_ms = run.info.start_time
        if self._last_steps is None:  # one request for all; a history each is twenty, and accounts make them slow
            self._last_steps = {metric.key: metric.step for metric in run.data.to_proto().metrics}
        batch: list[Any] = []
        reached = self._position
        with self.path.open("rb") as file:
            file.seek(reached)
            for line in file:
                if not line.endswith(b"\n"):  # being written
                    break
                step, values = parse(line, f"{self.path}, byte {reached}")
                again = f"rewind{values['rewinds']:.0f}/" if values.pop("repeated", None) else ""
                values = {self.prefix + again + name: value for name, value in values.items()}
                new = {name: value for name, value in values.items() if step > self._last_steps.get(name, -1)}
                if len(batch) + len(new) > MAX_METRICS_PER_BATCH:
                    client.log_batch(self.run_id, batch)
                    self._position, batch = reached, []
                batch += points(new, step, start_ms)
                reached += len(line)
        if batch:
            client.log_batch(self.run_id, batch)
        self._position = reached

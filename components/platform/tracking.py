"""Trackers: where a stage reports its settings, numbers, files and curves. INFOXLM_TRACKER chooses; default: mlflow.

A new tracker is an adapter and a line in the table. The registry is MLflow's, whatever tracks: without its runs a model
can be trained and measured, and not registered. A sweep sums up what MLflow has of its trials.
"""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from components.platform import runtime
from infoxlm_core.errors import ConfigError
from infoxlm_core.training.tracker import FileTracker, Tracker

VARIABLE = "INFOXLM_TRACKER"


class Run(Protocol):
    """What a stage reports to; all stages of a pipeline run share one, a trial has its own nested in that.

    Stages are repeated: the same again is stored once.
    """

    @property
    def id(self) -> str:
        """By which other processes find it again (`TRACKERS`)."""

    def log_params(self, config: Mapping[str, Any]) -> None:
        """Settings, nested; raises ConfigMismatch if the run has other ones."""

    def log_metrics(self, metrics: Mapping[str, float]) -> None:
        """Results."""

    def log_artifacts(self, source: Path, path: str | None = None) -> None:
        """A file, or all files below a directory, into a folder of the run."""

    def log_curves(self, path: Path, prefix: str = "") -> None:
        """What of a whole `metrics.jsonl` has not arrived during the training."""

    def follow(self, path: Path) -> Tracker:
        """The tracker of a training that goes on: its file, and what ships that meanwhile."""

    def end(self) -> None:
        """Close it."""


class Untracked:
    """A run that nobody follows: curves stay in the artifact, where they always are."""

    id = ""

    def log_params(self, config: Mapping[str, Any]) -> None: ...
    def log_metrics(self, metrics: Mapping[str, float]) -> None: ...
    def log_artifacts(self, source: Path, path: str | None = None) -> None: ...
    def log_curves(self, path: Path, prefix: str = "") -> None: ...
    def end(self) -> None: ...
    def follow(self, path: Path) -> Tracker:
        return FileTracker(path)


def open_run(store: str, trial: Mapping[str, Any] | None = None) -> Run:
    """Find or open the run of this pipeline run, or of a trial of it.

    Raises:
        ConfigError: there is no such tracker, or a sweep would not find its trials again.
    """
    if trial and (name := os.environ.get(VARIABLE) or "mlflow") != "mlflow":
        raise ConfigError(f"{VARIABLE}: {name!r}, but a sweep reads its trials from MLflow: set it to mlflow")
    return _tracker()(lambda: runtime.run_id(store, trial))


def find_run(run_id: str) -> Run:
    """The run with an id that another process has opened."""
    return _tracker()(lambda: run_id)


def _tracker() -> Callable[[Callable[[], str]], Run]:
    name = os.environ.get(VARIABLE) or "mlflow"
    if name not in TRACKERS:
        raise ConfigError(f"{VARIABLE}: {name!r} is no tracker; known are {', '.join(TRACKERS)}")
    return TRACKERS[name]


def _mlflow(open_id: Callable[[], str]) -> Run:
    from components.adapters.mlflow.tracker import MlflowRun

    return MlflowRun(open_id())


TRACKERS: dict[str, Callable[[Callable[[], str]], Run]] = {"mlflow": _mlflow, "none": lambda _: Untracked()}
"""By name: makes a `Run`; asks its argument for the id of MLflow's run if it needs one."""

"""Trackers store the settings, metrics, files and curves of runs. INFOXLM_TRACKER names the tracker to use.

    mlflow      default: a server, or a file in the store
    none        stores nothing: curves and scores are only in the artifacts, and sweeps do not work

To add a tracker, write an adapter and a function in this module, and add the function to `TRACKERS`. The model registry
is always MLflow (docs/design/models.md, 12). `register` and `promote` always use the tracker `mlflow`, because a
version is linked to its MLflow run.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, Protocol

from components.platform import artifacts, runtime
from components.platform.runtime import FinalStatus
from infoxlm_core.corpora.datasets import Dataset
from infoxlm_core.errors import ConfigError
from infoxlm_core.results.evidence import Outcomes
from infoxlm_core.results.trials import Trial
from infoxlm_core.tasks.scores import Scores
from infoxlm_core.training.tracker import FileTracker, Tracker

VARIABLE = "INFOXLM_TRACKER"
LOCK = ("tracker", "runs")
"""Arguments of `artifacts.exclusive` for the lock of all processes that open a run."""


class TrialRun(Protocol):
    """A sweep's trial in the tracker."""

    @property
    def run_id(self) -> str: ...
    @property
    def trial(self) -> Trial: ...
    @property
    def status(self) -> str:
        """RUNNING, FINISHED, FAILED or KILLED."""

    @property
    def metrics(self) -> Mapping[str, float]:
        """Metrics by name; empty until the trial is finished."""

    def read_scores(self) -> Scores:
        """Read the scores of a suite's trial from its file `scores.json`."""

    def read_outcomes(self) -> Outcomes | None:
        """Return which questions an ablation's trial answered correctly, or None if its evaluation is not stored."""

    def read_json(self, path: str) -> dict[str, Any]:
        """Return the content of the trial's JSON file at `path`."""


class Run(Protocol):
    """A tracker run for stages to log to. A pipeline run has one run for all stages, and a nested run for each trial.

    Stages may be retried, so a value that is logged twice is stored once.
    """

    @property
    def id(self) -> str:
        """Id by which other processes find the run."""

    @property
    def name(self) -> str:
        """Readable name."""

    def log_params(self, config: Mapping[str, Any]) -> None:
        """Log nested settings. Raise ConfigMismatch if the run already has different values."""

    def log_metrics(self, metrics: Mapping[str, float]) -> None:
        """Log results by metric name."""

    def read_metrics(self) -> Mapping[str, float]:
        """Return the newest value of each metric."""

    def log_artifacts(self, source: Path, path: str | None = None) -> None:
        """Copy a file, or all files below a directory, into the run's directory `path`."""

    def log_datasets(self, datasets: Sequence[Dataset], source: str) -> None:
        """Log the corpora that the run reads from the location `source`."""

    def annotate(self, text: str) -> None:
        """Set the run's description, in Markdown. A link to `artifact:DIRECTORY/FILE` opens a file of the run."""

    def log_curves(self, path: Path, prefix: str = "") -> None:
        """Log all points of a `metrics.jsonl` that the tracker did not receive during the training."""

    def follow(self, path: Path) -> Tracker:
        """Return a tracker for a training run. It writes points to a file, and sends them during the training."""

    def trials(self) -> Sequence[TrialRun]:
        """Return the trials of a sweep, oldest first."""

    def end(self, status: str = "FINISHED", stage: str = "", message: str = "") -> None:
        """End the run as FINISHED, FAILED or KILLED. Store the name of the failed stage and the error message."""

    @property
    def page(self) -> str:
        """URL of the run's page, or "" without a server."""

    def describe(self) -> str:
        """Return console instructions for opening the run's page, or "" if the tracker has no pages."""


class RunTracker(Protocol):
    """A tracker, which opens and finds runs. A module can implement this protocol."""

    def open_run(self, key: str, name: str, store: str, local_store: Path, trial: Trial | None) -> Run:
        """Find or open the tracker's run for a pipeline run, or the nested run for a trial.

        Args:
            key: id of the pipeline run.
            name: readable name.
            store: directory, or s3://bucket/prefix.
            local_store: local directory of the store, for a tracker that stores files.
            trial: trial of the nested run; None: open the run for the pipeline run.
        """

    def find_run(self, run_id: str) -> Run:
        """Return a run that another process has opened."""

    def end_unfinished(self, key: str, local_store: Path, status: str, stage: str, message: str) -> None:
        """End the tracker's run for a pipeline run and all nested runs. Skip runs that have ended or do not exist."""

    def check_sweeps_supported(self) -> None:
        """Raise ConfigError if the tracker does not store the trials that sweeps read."""

    def find_ablation(self, ablation: str, local_store: Path) -> Run:
        """Return the run of an ablation. Raise InputError if the run does not exist.

        Args:
            ablation: id or name of the ablation, or `latest`.
            local_store: local directory of the store.
        """


class Untracked:
    """The tracker `none` and its run in one class. It stores nothing, so curves are only in the artifacts."""

    id = ""
    name = ""
    page = ""

    def log_params(self, config: Mapping[str, Any]) -> None: ...
    def log_metrics(self, metrics: Mapping[str, float]) -> None: ...
    def log_artifacts(self, source: Path, path: str | None = None) -> None: ...
    def log_curves(self, path: Path, prefix: str = "") -> None: ...
    def log_datasets(self, datasets: Sequence[Dataset], source: str) -> None: ...
    def annotate(self, text: str) -> None: ...
    def end(self, status: str = "FINISHED", stage: str = "", message: str = "") -> None: ...
    def end_unfinished(self, key: str, local_store: Path, status: str, stage: str, message: str) -> None: ...

    def read_metrics(self) -> Mapping[str, float]:
        return {}

    def follow(self, path: Path) -> Tracker:
        return FileTracker(path)

    def describe(self) -> str:
        return ""

    def trials(self) -> NoReturn:
        self.check_sweeps_supported()  # always raises an error

    def check_sweeps_supported(self) -> NoReturn:
        raise ConfigError(f"{VARIABLE}: 'none', but a sweep reads its trials from a tracker: set it to mlflow")

    def open_run(self, key: str, name: str, store: str, local_store: Path, trial: Trial | None) -> Run:  # noqa: ARG002
        if trial:  # fail before the trial, because a sweep could not read its scores afterwards
            self.check_sweeps_supported()
        return self

    def find_run(self, run_id: str) -> Run:  # noqa: ARG002
        return self

    def find_ablation(self, ablation: str, local_store: Path) -> Run:  # noqa: ARG002
        self.check_sweeps_supported()


def _mlflow() -> RunTracker:
    from components.adapters.mlflow import tracker

    return tracker


TRACKERS: dict[str, Callable[[], RunTracker]] = {"mlflow": _mlflow, "none": Untracked}


def get_tracker(name: str = "") -> RunTracker:
    """Return the tracker with a name. The default is the tracker that INFOXLM_TRACKER names, or MLflow.

    Raises:
        ConfigError: the tracker does not exist.
    """
    name = name or os.environ.get(VARIABLE) or "mlflow"
    if name not in TRACKERS:
        raise ConfigError(f"{VARIABLE}: {name!r} is not a tracker; known are {', '.join(TRACKERS)}")
    return TRACKERS[name]()


def open_run(store: str, trial: Mapping[str, Any] | None = None, tracker_name: str = "") -> Run:
    """Find or open the tracker's run for this pipeline run, or the nested run for a trial.

    Args:
        store: directory, or s3://bucket/prefix.
        trial: trial of an ablation or a suite.
        tracker_name: see `get_tracker`.

    Raises:
        ConfigError: the tracker does not exist, or it does not store trials.
    """
    key = runtime.read_run_id()
    name = os.environ.get("RUN_NAME", key)  # on Kubeflow, a run has only an id
    parsed_trial = Trial.parse(trial) if trial else None
    tracker = get_tracker(tracker_name)
    # Two steps may start at the same time. Without the lock, each could open its own run, because MLflow does not
    # refuse a second run with the same tag.
    with artifacts.exclusive(store, *LOCK):
        return tracker.open_run(key, name, store, artifacts.local_directory(store), parsed_trial)


def end_unfinished(store: str, final: FinalStatus) -> None:
    """End the tracker's run for this pipeline run, unless the run has ended or does not exist."""
    local_store = artifacts.local_directory(store)
    get_tracker().end_unfinished(runtime.read_run_id(), local_store, final.status, final.failed_stage, final.message)

"""Trackers store the settings, metrics, files and curves of runs. INFOXLM_TRACKER names the tracker to use.

    mlflow      the default: a server, or a file in the store
    none        stores nothing: curves and scores are only in the artifacts, and sweeps do not work

To add a tracker, write an adapter, a function here, and a line in the table. The model registry is always MLflow
(docs/design/models.md, 12). `register` and `promote` name MLflow explicitly, because a version belongs to its run.
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


class TrialRun(Protocol):
    """A trial of a sweep, as the tracker stores it."""

    @property
    def run_id(self) -> str: ...
    @property
    def trial(self) -> Trial: ...
    @property
    def status(self) -> str:
        """RUNNING, FINISHED, FAILED or KILLED."""

    @property
    def metrics(self) -> Mapping[str, float]:
        """Empty while the trial is not finished."""

    def read_scores(self) -> Scores:
        """Return the scores in `scores.json` among the files of a suite's trial."""

    def read_outcomes(self) -> Outcomes | None:
        """Return which questions an ablation's trial answered correctly, or None if its evaluation is not stored."""

    def read_json(self, path: str) -> dict[str, Any]:
        """Return the content of a JSON file among the files of the trial."""


class Run(Protocol):
    """A run that stages report to: one for all stages of a pipeline run, and one for each trial nested in it.

    Stages may be retried, so anything that is logged twice is stored once.
    """

    @property
    def id(self) -> str:
        """The id by which other processes find the run."""

    @property
    def name(self) -> str:
        """The readable name."""

    def log_params(self, config: Mapping[str, Any]) -> None:
        """Log nested settings. Raises ConfigMismatch if the run has other values."""

    def log_metrics(self, metrics: Mapping[str, float]) -> None:
        """Log results."""

    def read_metrics(self) -> Mapping[str, float]:
        """Return the newest value of each metric that the run has so far."""

    def log_artifacts(self, source: Path, path: str | None = None) -> None:
        """Copy a file, or all files below a directory, into a folder of the run."""

    def log_datasets(self, datasets: Sequence[Dataset], source: str) -> None:
        """Log the corpora that the run reads. `source` is their location."""

    def annotate(self, text: str) -> None:
        """Set the description, in Markdown. A link to `artifact:FOLDER/FILE` leads to a file of the run."""

    def log_curves(self, path: Path, prefix: str = "") -> None:
        """Log the points of a `metrics.jsonl` that the tracker has not received during the training."""

    def follow(self, path: Path) -> Tracker:
        """Return the tracker of a training run, which writes points to a file and sends them during the training."""

    def trials(self) -> Sequence[TrialRun]:
        """Return the trials of a sweep, oldest first."""

    def end(self, status: str = "FINISHED", stage: str = "", message: str = "") -> None:
        """End the run as FINISHED, FAILED or KILLED. `stage` names the stage that failed, `message` says why."""

    @property
    def page(self) -> str:
        """The URL of the run's page, or "" without a server."""

    def describe(self) -> str:
        """Return instructions for opening the run's page, as lines for the console, or "" if there are no pages."""


class RunTracker(Protocol):
    """Opens and finds runs. A module can implement this protocol."""

    def open_run(self, key: str, name: str, store: str, local_store: Path, trial: Trial | None) -> Run:
        """Find or open the run of a pipeline run, or of a trial nested in it.

        Args:
            key: id of the pipeline run.
            name: readable name.
            store: directory, or s3://bucket/prefix.
            local_store: local directory of the store, for a tracker that stores files.
            trial: the trial whose nested run is opened, if any.
        """

    def find_run(self, run_id: str) -> Run:
        """Return the run with an id, which another process has opened."""

    def end_unfinished(self, key: str, local_store: Path, status: str, stage: str, message: str) -> None:
        """End the run of a pipeline run and its nested trials, unless they have ended or do not exist."""

    def check_sweeps(self) -> None:
        """Raise ConfigError if the tracker does not store trials, because sweeps read them."""

    def find_ablation(self, ablation: str, local_store: Path) -> Run:
        """Return the run of an ablation. Raise InputError if there is none.

        Args:
            ablation: id or name of the ablation, or `latest`.
            local_store: local directory of the store.
        """


class Untracked:
    """The tracker `none`, which is also its own run: it stores nothing, so curves are only in the artifacts."""

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
        self.check_sweeps()

    def check_sweeps(self) -> NoReturn:
        raise ConfigError(f"{VARIABLE}: 'none', but a sweep reads its trials from a tracker: set it to mlflow")

    def open_run(self, key: str, name: str, store: str, local_store: Path, trial: Trial | None) -> Run:  # noqa: ARG002
        if trial:
            self.check_sweeps()
        return self

    def find_run(self, run_id: str) -> Run:  # noqa: ARG002
        return self

    def find_ablation(self, ablation: str, local_store: Path) -> Run:  # noqa: ARG002
        self.check_sweeps()


def _mlflow() -> RunTracker:
    from components.adapters.mlflow import tracker

    return tracker


TRACKERS: dict[str, Callable[[], RunTracker]] = {"mlflow": _mlflow, "none": Untracked}


def get_tracker(name: str = "") -> RunTracker:
    """Return a tracker by name; by default, the tracker that INFOXLM_TRACKER names, or MLflow.

    Raises:
        ConfigError: there is no such tracker.
    """
    name = name or os.environ.get(VARIABLE) or "mlflow"
    if name not in TRACKERS:
        raise ConfigError(f"{VARIABLE}: {name!r} is not a tracker; known are {', '.join(TRACKERS)}")
    return TRACKERS[name]()


def open_run(store: str, trial: Mapping[str, Any] | None = None, tracker_name: str = "") -> Run:
    """Find or open the run of this pipeline run, or of a trial nested in it.

    Args:
        store: directory, or s3://bucket/prefix.
        trial: the trial of an ablation or a suite.
        tracker_name: see `get_tracker`.

    Raises:
        ConfigError: there is no such tracker, or it does not store trials.
    """
    key = runtime.read_run_id()
    name = os.environ.get("RUN_NAME", key)
    parsed_trial = Trial.parse(trial) if trial else None
    return get_tracker(tracker_name).open_run(key, name, store, artifacts.local_directory(store), parsed_trial)


def end_unfinished(store: str, final: FinalStatus) -> None:
    """End the tracker's run of this pipeline run, unless it has ended or does not exist."""
    local_store = artifacts.local_directory(store)
    get_tracker().end_unfinished(runtime.read_run_id(), local_store, final.status, final.failed_stage, final.message)

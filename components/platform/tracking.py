"""Trackers: where runs keep settings, numbers, files and curves, and are found again. INFOXLM_TRACKER chooses.

    mlflow      the default: a server, or a file in the store
    none        nowhere; curves and scores are in the artifacts all the same. A sweep needs one that has its trials

A new tracker is an adapter, and here a function and a line in the table. The model registry is MLflow's, whatever
tracks (docs/architecture.md, 12): a version belongs to a run of MLflow's, which `register` and `promote` open by name.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, Protocol

from components.platform import artifacts, runtime
from infoxlm_core.corpora.datasets import Dataset
from infoxlm_core.errors import ConfigError
from infoxlm_core.results.trials import Trial
from infoxlm_core.tasks.scores import Scores
from infoxlm_core.training.tracker import FileTracker, Tracker

VARIABLE = "INFOXLM_TRACKER"


class TrialRun(Protocol):
    """A trial of a sweep, as the tracker has it."""

    @property
    def run_id(self) -> str: ...
    @property
    def trial(self) -> Trial: ...
    @property
    def status(self) -> str:
        """RUNNING, FINISHED, FAILED or KILLED."""

    @property
    def metrics(self) -> Mapping[str, float]:
        """Empty if it is not finished."""

    def read_scores(self) -> Scores:
        """Of a suite's trial: the `scores.json` among its files."""


class Run(Protocol):
    """What a stage reports to; all stages of a pipeline run share one, a trial has its own nested in that.

    Stages are repeated: the same again is stored once.
    """

    @property
    def id(self) -> str:
        """By which other processes find it again."""

    @property
    def name(self) -> str:
        """What people call it."""

    def log_params(self, config: Mapping[str, Any]) -> None:
        """Settings, nested; raises ConfigMismatch if the run has other ones."""

    def log_metrics(self, metrics: Mapping[str, float]) -> None:
        """Results."""

    def read_metrics(self) -> Mapping[str, float]:
        """Return the newest value of each metric that the run has so far."""

    def log_artifacts(self, source: Path, path: str | None = None) -> None:
        """A file, or all files below a directory, into a folder of the run."""

    def log_datasets(self, datasets: Sequence[Dataset], source: str) -> None:
        """The corpora that it reads; `source` is where they are."""

    def annotate(self, text: str) -> None:
        """What it is, in Markdown; a link to `artifact:FOLDER/FILE` leads to one of its files."""

    def log_curves(self, path: Path, prefix: str = "") -> None:
        """What of a whole `metrics.jsonl` has not arrived during the training."""

    def follow(self, path: Path) -> Tracker:
        """The tracker of a training that goes on: its file, and what ships that meanwhile."""

    def trials(self) -> Sequence[TrialRun]:
        """Of a sweep: the trials nested in it, oldest first."""

    def end(self, status: str = "FINISHED") -> None:
        """Close it; FAILED and KILLED are the other ways to end."""

    @property
    def page(self) -> str:
        """Its address, if a server shows it; else empty."""

    def describe(self) -> str:
        """Where a person looks at it, as lines for the console; empty if there is no such place."""


class RunTracker(Protocol):
    """Opens runs and finds them again; a module may be one."""

    def open_run(self, key: str, name: str, store: str, here: Path, trial: Trial | None) -> Run:
        """Find or open a run, in whatever process a stage is.

        Args:
            key: what tells this pipeline run from others.
            name: what people call it.
            store: of the run, a directory or s3://bucket/prefix.
            here: the store on this machine, for a tracker that keeps files.
            trial: the run is that of a trial, nested in the one of the pipeline.
        """

    def find_run(self, run_id: str) -> Run:
        """The run with an id that another process has opened."""

    def check_sweeps(self) -> None:
        """Raise ConfigError if it keeps no trials: a sweep reads them from it."""

    def find_ablation(self, which: str, here: Path) -> Run:
        """The run of an ablation: `latest`, an id, or a name (then the newest); InputError if there is none."""


class Untracked:
    """The tracker `none`, and its run: curves stay in the artifact, where they always are."""

    id = name = page = ""

    def log_params(self, config: Mapping[str, Any]) -> None: ...
    def log_metrics(self, metrics: Mapping[str, float]) -> None: ...
    def log_artifacts(self, source: Path, path: str | None = None) -> None: ...
    def log_curves(self, path: Path, prefix: str = "") -> None: ...
    def log_datasets(self, datasets: Sequence[Dataset], source: str) -> None: ...
    def annotate(self, text: str) -> None: ...
    def end(self, status: str = "FINISHED") -> None: ...

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

    def open_run(self, key: str, name: str, store: str, here: Path, trial: Trial | None) -> Run:  # noqa: ARG002
        if trial:
            self.check_sweeps()
        return self

    def find_run(self, run_id: str) -> Run:  # noqa: ARG002
        return self

    def find_ablation(self, which: str, here: Path) -> Run:  # noqa: ARG002
        self.check_sweeps()


def _mlflow() -> RunTracker:
    from components.adapters.mlflow import tracker

    return tracker


TRACKERS: dict[str, Callable[[], RunTracker]] = {"mlflow": _mlflow, "none": Untracked}


def tracker(name: str = "") -> RunTracker:
    """The tracker of a name, else the one that INFOXLM_TRACKER names.

    Raises:
        ConfigError: there is none.
    """
    name = name or os.environ.get(VARIABLE) or "mlflow"
    if name not in TRACKERS:
        raise ConfigError(f"{VARIABLE}: {name!r} is no tracker; known are {', '.join(TRACKERS)}")
    return TRACKERS[name]()


def open_run(store: str, trial: Mapping[str, Any] | None = None, by: str = "") -> Run:
    """Find or open the run of this pipeline run, or of a trial of it, which is nested in that.

    Args:
        store: directory, or s3://bucket/prefix.
        trial: of an ablation or a suite.
        by: the tracker, if it is not for INFOXLM_TRACKER to choose.

    Raises:
        ConfigError: there is no such tracker, or it keeps no trials.
    """
    key = runtime.pipeline_run()
    name = os.environ.get("RUN_NAME", key)
    return tracker(by).open_run(key, name, store, artifacts.local(store), Trial.parse(trial) if trial else None)

"""The shared steps of all components: report failures, build artifacts, publish them, and log to the tracker."""

import contextlib
import functools
import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.platform import artifacts, costs, launchers, parameters, runtime, tracking
from components.platform.stage_work import Work
from infoxlm_core import manifests
from infoxlm_core.config import StageConfig
from infoxlm_core.corpora.datasets import Dataset, list_datasets
from infoxlm_core.errors import DataCorrupt, InfoXLMError, TryAgain

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StageRun:
    """One execution of a component."""

    stage: str
    store: str
    trial: Mapping[str, Any] | None
    tracker: str

    @property
    def local_store(self) -> Path:
        """The local directory of the store."""
        return artifacts.local_directory(self.store)

    @functools.cached_property
    def run(self) -> tracking.Run:
        """The tracker's run, which all stages of a pipeline run share. It is opened at the first access."""
        return tracking.open_run(self.store, self.trial, self.tracker)

    def build(
        self,
        kind: str,
        key: str,
        config: StageConfig,
        num_workers: int,
        cluster: dict[str, Any],
        task_config: Any,
        inputs: Mapping[str, str] | None = None,
        checkpoints: str = "",
        follow: bool = False,
    ) -> Path:
        """Return the local directory of the artifact `kind/key`. If it does not exist, a launcher builds it first.

        Args:
            kind: kind of the artifact.
            key: key of the artifact, from `artifacts.key_of`.
            config: settings of the stage.
            num_workers: workers that share the work; 0: only this process.
            cluster: a `ClusterConfig` as a mapping, or a reference to it; empty: start no RayJob.
            task_config: KFP's `dsl.TaskConfig` of the step, with the environment of its pod.
            inputs: locations of artifacts in the store, by the names of the core's arguments.
            checkpoints: folder of STORE/runs for the checkpoints of a training.
            follow: whether to send the curves to the tracker during the training.
        """
        work = Work(
            stage=self.stage,
            store=self.store,
            kind=kind,
            name=key,
            config=config.model_dump(mode="json"),
            num_workers=num_workers,
            artifacts=dict(inputs or {}),
            run=checkpoints,
            tracker_run=self.run.id if follow else "",
        )
        step_environment = (task_config and task_config.env) or []
        return launchers.run(work, self.read(cluster), step_environment)

    def read(self, parameter: Any) -> Any:
        """Return the value of a parameter, which may be a reference into the store."""
        return parameters.resolve(self.store, parameter)

    def publish(self, output: Any, directory: Path, metrics: Any = None) -> dict[str, float]:
        """Make a KFP output point to an artifact. Log the numbers of its manifest as KFP metrics and return them."""
        artifacts.publish(output, directory)
        return artifacts.log_facts(directory, metrics) if metrics else {}

    def report_cost(self, directory: Path, step: str = "") -> None:
        """Log the hours that this run spent on an artifact, as the hours of `step` (default: the stage)."""
        self.report(costs.hours_of(self.store, directory.parent.name, directory.name, step or self.stage))

    def report_corpus(self, location: str) -> list[Dataset]:
        """Log the corpora of a prepared text in the store as datasets of the run, and return them."""
        manifest = artifacts.read(location, manifests.NAME)
        report = artifacts.read(location, "report.json")
        if manifest is None:
            raise DataCorrupt(f"{location} is missing or incomplete: run prepare_corpus again")
        files = json.loads(manifest)["files"]
        file_reports = json.loads(report).get("files", ()) if report else ()
        datasets = list_datasets(files, file_reports)
        self.run.log_datasets(datasets, location)
        return datasets

    def summarise(self, *lines: str) -> None:
        """Write the printable results of the pipeline run, with the address of the tracker's run as the last line."""
        text = "\n".join(line for line in (*lines, self.run.describe()) if line)
        runtime.write_summary(self.store, text)

    def report(self, figures: Mapping[str, float] | None = None, **settings: Any) -> None:
        """Log figures as metrics, and settings as parameters by section."""
        if settings:
            for name, section in settings.items():
                if isinstance(section, StageConfig):
                    settings[name] = section.model_dump(mode="json")
            self.run.log_params(settings)
        if figures:
            self.run.log_metrics(figures)


@contextlib.contextmanager
def stage_run(
    stage: str,
    store: str,
    trial: Mapping[str, Any] | None = None,
    tracker: str = "",
    reports: bool = True,
    last: bool = False,
) -> Iterator[StageRun]:
    """Run a component's body. A failure becomes one line, an exit code and an outcome in the store.

    The first line of the log is the address of the tracker's run, if a server shows it.

    Args:
        stage: name of the component.
        store: directory, or s3://bucket/prefix.
        trial: a trial of an ablation or a suite, which has its own run.
        tracker: name of the tracker; empty: INFOXLM_TRACKER chooses.
        reports: whether the body logs to the tracker and needs an open run.
        last: whether the step is the last of its pipeline. If it fails, it ends the tracker's run as failed; if it
            succeeds, its body ends the run.
    """
    with runtime.report_failure(store, stage, trial):
        step = StageRun(stage, store, trial, tracker)
        if reports:
            try:
                page = step.run.page
                if page:
                    logger.info("run: %s", page)
            except TryAgain as error:  # the work may take hours, after which the tracker may answer again
                logger.warning("the tracker's run cannot be opened yet: %s", error)
        try:
            yield step
        except Exception as error:
            if last:
                with contextlib.suppress(InfoXLMError):  # the tracker itself may have failed
                    step.run.end("FAILED", stage, str(error))
            raise

"""What all components share: report failures, build and publish artifacts, and log to the tracker."""

import contextlib
import functools
import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.platform import artifact_files, artifacts, costs, launchers, parameters, runtime, tracking
from components.platform.builds import BuildSpec
from infoxlm_core.config import StageConfig
from infoxlm_core.corpora.datasets import Dataset, list_datasets
from infoxlm_core.errors import DataCorrupt, InfoXLMError, TryAgain

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StageRun:
    """One execution of a component, with its connections to the store, the launchers and the tracker."""

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
        """The tracker's run of the pipeline run or of the trial. It is opened at the first access."""
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
        checkpoint_folder: str = "",
        send_curves: bool = False,
    ) -> Path:
        """Return the local directory of the artifact `kind/key`, after a launcher has built it if necessary.

        Args:
            kind: kind of the artifact.
            key: key of the artifact, from `artifacts.compute_key`.
            config: settings of the stage.
            num_workers: workers that build the artifact together; 0: this process builds it alone.
            cluster: a `ClusterConfig` as a mapping, or a reference to it; empty: no RayJob is started.
            task_config: KFP's `dsl.TaskConfig` of the step, with the environment of its pod.
            inputs: locations of the input artifacts by the names of the core's arguments.
            checkpoint_folder: folder of STORE/runs for the checkpoints of a training run.
            send_curves: whether to send the curves of a training run to the tracker while it runs.
        """
        spec = BuildSpec(
            stage=self.stage,
            store=self.store,
            kind=kind,
            name=key,
            config=config.model_dump(mode="json"),
            num_workers=num_workers,
            artifacts=dict(inputs or {}),
            run=checkpoint_folder,
            tracker_run=self.run.id if send_curves else "",
        )
        has_environment = task_config and task_config.env
        step_environment = task_config.env if has_environment else []
        return launchers.run(spec, self.read(cluster), step_environment)

    def read(self, parameter: Any) -> Any:
        """Return the value of a component's parameter, and read it from the store if it is a reference."""
        return parameters.dereference(self.store, parameter)

    def publish(self, output: Any, directory: Path, metrics: Any = None) -> dict[str, float]:
        """Make a KFP output point to an artifact. With a KFP output for metrics, log and return its numeric facts."""
        artifacts.publish(output, directory)
        return artifacts.log_facts(directory, metrics) if metrics else {}

    def report_cost(self, directory: Path, step: str = "") -> None:
        """Log the hours that this pipeline run spent on an artifact, as the cost of `step` (default: this stage)."""
        self.report(costs.read_hours(self.store, directory.parent.name, directory.name, step or self.stage))

    def report_corpus(self, location: str) -> list[Dataset]:
        """Log the corpora of a prepared corpus artifact as datasets of the tracker's run, and return them."""
        manifest = artifact_files.read_manifest(location)
        if manifest is None:
            raise DataCorrupt(f"{location} is missing or incomplete: run prepare_corpus again")
        report = artifacts.read(location, "report.json") or b"{}"
        datasets = list_datasets(manifest["files"], json.loads(report).get("files", ()))
        self.run.log_datasets(datasets, location)
        return datasets

    def summarise(self, *lines: str) -> None:
        """Write the printable results of the pipeline run, ending with how to open the tracker's run."""
        all_lines = [*lines, self.run.describe()]
        non_empty_lines = [line for line in all_lines if line]
        runtime.write_summary(self.store, "\n".join(non_empty_lines))

    def report(self, figures: Mapping[str, float] | None = None, **settings: Any) -> None:
        """Log figures as metrics, and settings as parameters, which are grouped by section."""
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
    reports_to_tracker: bool = True,
    ends_run: bool = False,
) -> Iterator[StageRun]:
    """Run the body of a component. If it fails, print the error in one line, store it as an outcome, and exit.

    Args:
        stage: name of the component.
        store: directory, or s3://bucket/prefix.
        trial: a trial of an ablation or a suite, which has its own run.
        tracker: name of the tracker; empty: INFOXLM_TRACKER chooses.
        reports_to_tracker: whether the body logs to the tracker, so that its run should be opened first.
        ends_run: whether this is the last step of a pipeline, which ends the tracker's run: as failed if the body
            fails; otherwise, the body ends the run.
    """
    with runtime.report_failure(store, stage, trial):
        step = StageRun(stage, store, trial, tracker)
        if reports_to_tracker:
            _open_tracker_run(step)
        try:
            yield step
        except Exception as error:
            if ends_run:
                with contextlib.suppress(InfoXLMError):  # the tracker itself may be the cause
                    step.run.end("FAILED", stage, str(error))
            raise


def _open_tracker_run(step: StageRun) -> None:
    """Open the tracker's run of a step, and log the address of its page, if it has one, as the first line."""
    try:
        page = step.run.page
        if page:
            logger.info("run: %s", page)
    except TryAgain as error:  # the body may take hours, and the tracker may answer again after it
        logger.warning("the tracker's run cannot be opened yet: %s", error)

"""Shared code of all components: report failures, build and publish artifacts, and log to the tracker."""

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
        """Local directory of the store."""
        return artifacts.local_directory(self.store)

    @functools.cached_property
    def run(self) -> tracking.Run:
        """The tracker's run for this pipeline run or trial, opened at the first access."""
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
        checkpoint_directory: str = "",
        send_curves: bool = False,
    ) -> Path:
        """Return a local directory with the small files of the artifact `kind/key`, as `artifacts.fetch_summary` does.

        Let a launcher build the artifact if needed.

        Args:
            kind: artifact kind.
            key: artifact key, from `artifacts.compute_key`.
            config: settings of the stage.
            num_workers: number of workers that build the artifact together; 0: build it in this process.
            cluster: a `ClusterConfig` as a mapping, or a reference to the mapping; empty: do not start a RayJob.
            task_config: KFP's `dsl.TaskConfig` of the step, with the environment of the step's pod.
            inputs: mapping from the core's argument name, such as `corpus`, to the location of an input artifact.
            checkpoint_directory: checkpoint directory in STORE/runs, for a training run.
            send_curves: whether to send the curves of a training run to the tracker during the training.
        """
        spec = BuildSpec(
            stage=self.stage,
            store=self.store,
            kind=kind,
            name=key,
            config=config.model_dump(mode="json"),
            num_workers=num_workers,
            artifacts=dict(inputs or {}),
            run=checkpoint_directory,  # of the training run, unlike the tracker's run below
            tracker_run=self.run.id if send_curves else "",
        )
        step_environment = (task_config and task_config.env) or []  # a local run has no task config
        return launchers.run(spec, self.read(cluster), step_environment)

    def read(self, parameter: Any) -> Any:
        """Return the value of a component's parameter. A reference is replaced by its content from the store."""
        return parameters.dereference(self.store, parameter)

    def publish(self, output: Any, directory: Path, metrics: Any = None) -> dict[str, float]:
        """Make a KFP output point to an artifact. If `metrics` is set, log and return the artifact's numeric facts."""
        artifacts.publish(output, directory)
        return artifacts.log_facts(directory, metrics) if metrics else {}

    def report_cost(self, directory: Path, step: str = "") -> None:
        """Log the GPU and CPU hours that this pipeline run spent on an artifact. `step` defaults to this stage."""
        self.report(costs.read_hours(self.store, directory.parent.name, directory.name, step or self.stage))

    def report_corpus(self, location: str) -> list[Dataset]:
        """Log the corpora of a corpus artifact as datasets of the tracker's run. Return the datasets."""
        # Read only two small files, because this step need not download the text.
        manifest = artifact_files.read_manifest(location)
        if manifest is None:
            raise DataCorrupt(f"{location} is missing or incomplete: run prepare_corpus again")
        report = artifacts.read(location, "report.json") or b"{}"
        datasets = list_datasets(manifest["files"], json.loads(report).get("files", ()))
        self.run.log_datasets(datasets, location)
        return datasets

    def summarise(self, *lines: str) -> None:
        """Write the printable results of the pipeline run, followed by instructions for opening the tracker's run.

        An empty line is omitted, such as the instructions of a tracker without pages.
        """
        runtime.write_summary(self.store, "\n".join(line for line in (*lines, self.run.describe()) if line))

    def report(self, figures: Mapping[str, float] | None = None, **settings: Any) -> None:
        """Log figures as metrics, and sections of settings as parameters."""
        for name, section in settings.items():  # a tracker logs only plain values
            if isinstance(section, StageConfig):
                settings[name] = section.model_dump(mode="json")
        if settings:
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
    ends_run_on_failure: bool = False,
) -> Iterator[StageRun]:
    """Run the block as a component's body. Report a failure as `runtime.report_failure` does.

    Args:
        stage: name of the component.
        store: directory, or s3://bucket/prefix.
        trial: trial of an ablation or a suite, which has its own tracker run.
        tracker: name of the tracker; empty: use the tracker that INFOXLM_TRACKER names.
        reports_to_tracker: whether to open the tracker's run before the block, because the block logs to it.
        ends_run_on_failure: whether to end the tracker's run as failed if the block fails, because this is the
            pipeline's last step. A successful block ends the run itself.
    """
    with runtime.report_failure(store, stage, trial):
        step = StageRun(stage, store, trial, tracker)
        if reports_to_tracker:
            _open_tracker_run(step)
        try:
            yield step
        except Exception as error:
            if ends_run_on_failure:
                # The tracker itself may have caused the failure. A second error would then hide the first.
                with contextlib.suppress(InfoXLMError):
                    step.run.end("FAILED", stage, str(error))
            raise


def _open_tracker_run(step: StageRun) -> None:
    """Open a step's tracker run. If the run has a page, log the page's URL."""
    try:
        page = step.run.page
        if page:
            logger.info("run: %s", page)
    except TryAgain as error:  # the step may take hours, and the tracker may answer again by then
        logger.warning("the tracker's run cannot be opened yet: %s", error)

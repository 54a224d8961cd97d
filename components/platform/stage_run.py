"""What every component does around its own work: end clearly, have an artifact made, publish it, report."""

import contextlib
import functools
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NotRequired

from typing_extensions import TypedDict

from components.platform import artifacts, costs, launchers, parameters, runtime, tracking
from components.platform.work import Work
from infoxlm_core import manifests, outside
from infoxlm_core.config import StageConfig
from infoxlm_core.corpora.datasets import Dataset, list_datasets
from infoxlm_core.errors import DataCorrupt, InfoXLMError, TryAgain

logger = logging.getLogger(__name__)


@outside.with_more
class ReadFile(TypedDict):
    """What report.json of a prepared text says of one file."""

    corpus: str
    kind: str
    read: int
    kept: int


@outside.with_more
class Report(TypedDict):
    """report.json of a prepared text, as far as it is read again."""

    files: NotRequired[list[ReadFile]]


@dataclass(frozen=True)
class StageRun:
    """One run of a component's body."""

    stage: str
    store: str
    trial: Mapping[str, Any] | None
    tracker: str

    @property
    def here(self) -> Path:
        """The store on this machine."""
        return artifacts.local(self.store)

    @functools.cached_property
    def run(self) -> tracking.Run:
        """The tracker's run, which all stages share; found or opened when it is asked for first."""
        return tracking.open_run(self.store, self.trial, self.tracker)

    def make(
        self,
        kind: str,
        key: str,
        config: StageConfig,
        *,
        num_workers: int,
        cluster: dict[str, Any],
        task_config: Any,
        inputs: dict[str, str] | None = None,
        checkpoints: str = "",
        follow: bool = False,
    ) -> Path:
        """Return the artifact `kind/key` on this machine; a launcher has it made if nobody has made it before.

        `inputs` are places in the store, by the names of the core's arguments. A training has `checkpoints`, a folder
        of STORE/runs, and the run may `follow` its curves while they are drawn. All others are as `launchers.run` says.
        """
        work = Work(
            stage=self.stage,
            store=self.store,
            kind=kind,
            name=key,
            config=config.model_dump(mode="json"),
            num_workers=num_workers,
            artifacts=inputs or {},
            run=checkpoints,
            tracker_run=self.run.id if follow else "",
        )
        step_environment = (task_config and task_config.env) or []
        return launchers.run(work, self.read(cluster), step_environment)

    def read(self, parameter: Any) -> Any:
        """Return the value of a parameter, which may be a reference to the store."""
        return parameters.resolve(self.store, parameter)

    def publish(self, output: Any, made: Path, metrics: Any = None) -> dict[str, float]:
        """Let a KFP output point to an artifact; the numbers of its manifest become KFP metrics, and are returned."""
        artifacts.publish(output, made)
        return artifacts.log_facts(made, metrics) if metrics else {}

    def report_cost(self, made: Path, step: str = "") -> None:
        """Tell the tracker what an artifact has cost this run, nothing if it was found; `step` if not the stage's."""
        cost = costs.report(self.store, self.trial, step or self.stage, made.parent.name, made.name)
        self.report(costs.metrics(cost))

    def report_corpus(self, place: str) -> list[Dataset]:
        """Tell the tracker which corpora a prepared text in the store has; return them."""
        content, report = (artifacts.read(place, name) for name in (manifests.NAME, "report.json"))
        files = outside.parse_json(content or b"", manifests.Manifest, place, "prepare again", DataCorrupt)["files"]
        said = outside.parse_json(report or b"{}", Report, f"{place}/report.json", "prepare again", DataCorrupt)
        found = list_datasets(files, said.get("files", ()))
        self.run.log_datasets(found, place)
        return found

    def report(self, figures: Mapping[str, float] | None = None, **settings: Any) -> None:
        """Tell the tracker figures, and settings by their section."""
        if settings:
            plain = {
                name: one.model_dump(mode="json") for name, one in settings.items() if isinstance(one, StageConfig)
            }
            self.run.log_params(settings | plain)
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
    """Run a component's body; what goes wrong becomes one line, an exit code and an outcome in the store.

    The first line of its log says where the tracker shows the run, if a server does.

    Args:
        stage: the component's name.
        store: directory, or s3://bucket/prefix.
        trial: of an ablation or a suite: it has a run of its own.
        tracker: which one has the run, if it is not for INFOXLM_TRACKER to choose.
        reports: False of a body that tells the tracker nothing: it need not open a run.
        last: of a pipeline: if the body fails, so has the tracker's run. One that succeeds ends it itself.
    """
    with runtime.report_failure(store, stage, trial):
        step = StageRun(stage, store, trial, tracker)
        if reports:
            try:
                if page := step.run.page:
                    logger.info("its run: %s", page)
            except TryAgain as error:  # what is to be done may take hours: the tracker may be back by then
                logger.warning("its run cannot be shown: %s", error)
        try:
            yield step
        except Exception:
            if last:
                with contextlib.suppress(InfoXLMError):  # the tracker may be what failed
                    step.run.end("FAILED")
            raise

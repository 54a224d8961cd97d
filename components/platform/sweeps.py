"""What the trials of a sweep left -> an artifact, a page and metrics: the end of an ablation and of a suite."""

import logging
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from components.platform import artifacts, tracking
from components.platform.stage_run import StageRun
from infoxlm_core import manifests
from infoxlm_core.results import note
from infoxlm_core.results.ablation import Comparison
from infoxlm_core.results.summary import Summary
from infoxlm_core.results.trials import Trial
from infoxlm_core.tasks.scores import Scores


def read_metrics(step: StageRun, planned: Sequence[Mapping[str, Any]]) -> list[tuple[Trial, Mapping[str, float]]]:
    """What each trial of an ablation has logged; nothing if it is not finished, and then it is ended as failed."""
    known = {one.trial.name: one.metrics for one in step.run.trials()}
    found = [(trial, known.get(trial.name, {})) for trial in map(Trial.parse, planned)]
    for values, (_, metrics) in zip(planned, found, strict=True):
        if not metrics:  # one that never began gets a run too, so that it is not forgotten
            tracking.open_run(step.store, values).end("FAILED")
    return found


def read_scores(step: StageRun) -> dict[str, Scores]:
    """The scores of a suite's trials that are finished, by name; those that nobody works on any more are ended."""
    found = step.run.trials()
    for one in found:
        if one.status == "RUNNING":
            tracking.tracker().find_run(one.run_id).end("FAILED")
    return {one.trial.name: one.read_scores() for one in found if one.status == "FINISHED"}


def publish(
    step: StageRun,
    kind: str,
    summary: Summary | Comparison,
    write: Callable[[Path, Any], None],
    comparison: Any,
    report: Any,
    metrics: Any,
) -> None:
    """Write the files of a sweep into the store, and tell KFP and the tracker.

    Args:
        step: that ends the sweep.
        kind: of the artifact; its page is called so too.
        summary: of its trials.
        write: writes its files into a directory.
        comparison: KFP's artifact, which points to them.
        report: KFP's page.
        metrics: KFP's metrics.
    """
    flat = summary.flatten()
    name = manifests.digest([summary.to_dict(), manifests.VERSIONS[kind]]).removeprefix("sha256:")[:16]

    def build(output: Path) -> dict[str, float]:
        write(output, summary)
        return flat

    made = artifacts.get_or_build(step.store, kind, name, build)
    step.publish(comparison, made, metrics)
    shutil.copy(made / f"{kind}.html", report.path)
    step.report({re.sub(r"[^\w.:/ -]", "_", metric): value for metric, value in flat.items()})
    step.run.log_artifacts(made, kind)
    missing = f" Not finished: {', '.join(summary.unfinished)}." if summary.unfinished else ""
    step.run.annotate(f"**{step.run.name}**: [the {kind}]({note.FILE}{kind}/{kind}.html).{missing}")
    if summary.unfinished:
        logging.warning("not finished, and not in the numbers: %s", ", ".join(summary.unfinished))
    step.run.end("FAILED" if summary.unfinished else "FINISHED")  # the last step of its pipeline

"""Finish a sweep: read its trials from the tracker and publish their summary."""

import logging
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from components.platform import artifacts, runtime, tracking
from components.platform.stage_run import StageRun
from components.platform.tracking import Run
from infoxlm_core import manifests
from infoxlm_core.results.evidence import Outcomes
from infoxlm_core.results.summary import Summary
from infoxlm_core.results.trials import LINK, Trial
from infoxlm_core.tasks.scores import Scores


def read_metrics(step: StageRun, planned: Sequence[Mapping[str, Any]]) -> list[tuple[Trial, Mapping[str, float]]]:
    """Return the metrics of each planned trial of an ablation, and end the runs of unfinished trials as failed."""
    logged = {run.trial.name: run.metrics for run in step.run.trials()}
    results = []
    for values in planned:
        trial = Trial.parse(values)
        metrics = logged.get(trial.name, {})
        if not metrics:  # a trial that never started gets a failed run, so that it is visible
            tracking.open_run(step.store, values).end(runtime.find_ending(step.store).status)
        results.append((trial, metrics))
    return results


def read_outcomes(run: Run) -> dict[str, dict[int, Outcomes]]:
    """Return the outcomes by question of an ablation's finished trials: variant -> seed -> outcomes."""
    outcomes: dict[str, dict[int, Outcomes]] = {}
    for trial_run in run.trials():
        trial_outcomes = trial_run.read_outcomes() if trial_run.metrics else None
        if trial_outcomes:
            outcomes.setdefault(trial_run.trial.model, {})[trial_run.trial.seed] = trial_outcomes
    return outcomes


def read_first_seeds(step: StageRun, planned: Sequence[Mapping[str, Any]], path: str) -> dict[str, dict[str, Any]]:
    """Return a JSON file of the first finished trial of each variant, in the order of the plan."""
    runs = {run.trial.name: run for run in step.run.trials() if run.status == "FINISHED"}
    contents: dict[str, dict[str, Any]] = {}
    for values in planned:
        trial = Trial.parse(values)
        if trial.model not in contents and trial.name in runs:
            contents[trial.model] = runs[trial.name].read_json(path)
    return contents


def read_scores(step: StageRun) -> dict[str, Scores]:
    """Return the scores of a suite's finished trials by name, and end the runs of unfinished trials as failed."""
    runs = step.run.trials()
    for run in runs:
        if run.status == "RUNNING":
            tracking.tracker().find_run(run.run_id).end(runtime.find_ending(step.store).status)
    return {run.trial.name: run.read_scores() for run in runs if run.status == "FINISHED"}


def publish(
    step: StageRun,
    kind: str,
    summary: Summary,
    figures: dict[str, float],
    comparison: Any,
    report: Any,
    metrics: Any,
    write: Callable[[Path, str, Summary], None] | None = None,
) -> None:
    """Write the report page of a sweep into the store, and publish it to KFP and the tracker.

    Args:
        step: the last step of the sweep.
        kind: kind of the artifact, and name of its page.
        summary: summary of the trials.
        figures: the metrics to log.
        comparison: KFP output that will point to the artifact.
        report: KFP output for the HTML page.
        metrics: KFP output for the metrics.
        write: writes the page into a directory; None: the page of all other sweeps.
    """
    key = manifests.digest([summary.to_dict(), manifests.VERSIONS[kind]]).removeprefix("sha256:")[:16]

    def build(output: Path) -> dict[str, float]:
        from infoxlm_core.results import page  # it imports matplotlib

        write_page = write or page.write
        write_page(output, kind, summary)
        return figures

    artifact = artifacts.get_or_build(step.store, kind, key, build)
    step.publish(comparison, artifact, metrics)
    shutil.copy(artifact / f"{kind}.html", report.path)
    step.report({re.sub(r"[^\w.:/ -]", "_", metric): value for metric, value in figures.items()})
    step.run.log_artifacts(artifact, kind)
    unfinished = ", ".join(summary.unfinished)
    note = f" Not finished: {unfinished}." if unfinished else ""
    step.run.annotate(f"**{step.run.name}**: [the {kind}]({LINK}{kind}/{kind}.html).{note}")
    if unfinished:
        logging.warning("Some trials are not finished, so the figures do not include them: %s.", unfinished)
    table = (artifact / f"{kind}.md").read_text(encoding="utf-8")
    step.summarise(table, f"report      {artifacts.url_of(artifact / f'{kind}.html')}")
    ending = runtime.find_ending(step.store) if unfinished else runtime.Ending("FINISHED")
    step.run.end(*ending)

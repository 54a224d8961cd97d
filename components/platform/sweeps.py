"""Finish a sweep: read the trial results from the tracker, and publish their summary."""

import logging
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from components.platform import artifacts, runtime, tracking
from components.platform.stage_run import StageRun
from components.platform.tracking import Run
from infoxlm_core import manifests
from infoxlm_core.results.evidence import Outcomes
from infoxlm_core.results.summaries.suite import Summary
from infoxlm_core.results.trials import LINK, Trial
from infoxlm_core.tasks.scores import Scores


def end_unfinished_and_read_metrics(
    step: StageRun, planned_trials: Sequence[Mapping[str, Any]]
) -> list[tuple[Trial, Mapping[str, float]]]:
    """Read the metrics of all trials of an ablation. End the tracker's runs of unfinished trials as failed or killed.

    Args:
        step: the last step of the ablation.
        planned_trials: planned trials, as mappings that `Trial.parse` accepts.

    Returns:
        (trial, metrics) for each planned trial. Unfinished trials have no metrics.
    """
    metrics_by_trial = {run.trial.name: run.metrics for run in step.run.trials()}
    results = []
    for planned_trial in planned_trials:
        trial = Trial.parse(planned_trial)
        metrics = metrics_by_trial.get(trial.name, {})
        if not metrics:
            # A trial that never started has no run. `open_run` creates one, so that the tracker shows the failure.
            tracking.open_run(step.store, planned_trial).end(runtime.find_final_status(step.store).status)
        results.append((trial, metrics))
    return results


def read_outcomes(run: Run) -> dict[str, dict[int, Outcomes]]:
    """Return which questions each finished trial answered correctly, as outcomes by variant (`Trial.model`) and seed.

    Args:
        run: the tracker's run of the ablation.
    """
    outcomes_by_variant: dict[str, dict[int, Outcomes]] = {}
    for trial_run in run.trials():
        outcomes = trial_run.read_outcomes() if trial_run.metrics else None  # an unfinished trial has no metrics
        if outcomes:
            outcomes_by_variant.setdefault(trial_run.trial.model, {})[trial_run.trial.seed] = outcomes
    return outcomes_by_variant


def read_first_trial_of_each_variant(
    step: StageRun, planned_trials: Sequence[Mapping[str, Any]], path: str
) -> dict[str, dict[str, Any]]:
    """Read a JSON file from the first finished trial of each variant, as an example. Return the contents by variant.

    Args:
        step: the last step of the ablation.
        planned_trials: planned trials, in order.
        path: path of the JSON file in the tracker's run.
    """
    finished_runs = {run.trial.name: run for run in step.run.trials() if run.status == "FINISHED"}
    contents_by_variant: dict[str, dict[str, Any]] = {}
    for planned_trial in planned_trials:
        trial = Trial.parse(planned_trial)
        if trial.model not in contents_by_variant and trial.name in finished_runs:
            contents_by_variant[trial.model] = finished_runs[trial.name].read_json(path)
    return contents_by_variant


def end_unfinished_and_read_scores(step: StageRun) -> dict[str, Scores]:
    """End the runs of a suite's unfinished trials, and return the scores of its finished trials by name."""
    runs = step.run.trials()
    for run in runs:  # end these runs before downloading scores, because a download may fail
        if run.status == "RUNNING":  # this is the last step, so the trial has died
            tracking.get_tracker().find_run(run.run_id).end(runtime.find_final_status(step.store).status)
    return {run.trial.name: run.read_scores() for run in runs if run.status == "FINISHED"}


class Outputs(NamedTuple):
    """KFP outputs of a sweep's last step."""

    comparison: Any
    """Pointer to the artifact with the page."""
    report: Any
    """HTML page."""
    metrics: Any


PageWriter = Callable[[Path, str, Summary], None]
"""Function that writes the page of an artifact kind into a directory."""


def publish(
    step: StageRun, kind: str, summary: Summary, outputs: Outputs, write_page: PageWriter | None = None
) -> None:
    """Publish a sweep's page to the store, KFP and the tracker, and end the tracker's run.

    Args:
        step: the last step of the sweep.
        kind: artifact kind, which also names the artifact's files.
        summary: summary of the trials.
        outputs: KFP outputs of the step.
        write_page: function that writes the page; default: `page.write_sweep_report`.
    """
    metrics = summary.name_metrics()
    artifact = _build_page(step, kind, summary, metrics, write_page)
    page_file = artifact / f"{kind}.html"
    step.publish(outputs.comparison, artifact, outputs.metrics)
    shutil.copy(page_file, outputs.report.path)  # not a pointer, because Kubeflow shows this file
    _log_to_tracker(step, kind, summary, metrics, artifact)
    table = (artifact / f"{kind}.md").read_text(encoding="utf-8")
    step.summarise(table, f"report      {artifacts.find_uri(page_file)}")
    # This step succeeds even if trials have failed, but the run of the sweep must show the failure.
    final_status = runtime.find_final_status(step.store) if summary.unfinished else runtime.FinalStatus("FINISHED")
    step.run.end(final_status.status, final_status.failed_stage, final_status.message)


def _build_page(
    step: StageRun, kind: str, summary: Summary, metrics: dict[str, float], write_page: PageWriter | None
) -> Path:
    """Build the artifact with a sweep's page, or reuse it if it exists for the same summary. Return its directory."""
    # As `artifacts.compute_key`, but for a summary instead of settings and inputs.
    key = manifests.digest([summary.to_dict(), manifests.VERSIONS[kind]]).removeprefix("sha256:")[:16]

    def build(output: Path) -> dict[str, float]:
        from infoxlm_core.results import page  # imports matplotlib, which is slow and unnecessary for a reused page

        write = write_page or page.write_sweep_report
        write(output, kind, summary)
        return metrics

    return artifacts.get_or_build(step.store, kind, key, build)


def _log_to_tracker(step: StageRun, kind: str, summary: Summary, metrics: dict[str, float], artifact: Path) -> None:
    """Log a sweep's metrics and page to the tracker's run, and set the run's description."""
    # A metric's name begins with the name of a model or variant, which may contain characters that MLflow refuses.
    tracker_metrics = {re.sub(r"[^\w.:/ -]", "_", name): value for name, value in metrics.items()}
    step.report(tracker_metrics)
    step.run.log_artifacts(artifact, kind)
    # The tracker replaces the prefix LINK by the address of the run's files.
    description = f"**{step.run.name}**: [the {kind}]({LINK}{kind}/{kind}.html)."
    if summary.unfinished:
        unfinished_names = ", ".join(summary.unfinished)
        logging.warning("Some trials are not finished, so the figures do not include them: %s.", unfinished_names)
        description += f" Not finished: {unfinished_names}."
    step.run.annotate(description)

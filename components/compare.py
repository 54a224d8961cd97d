"""Component: compare an ablation's variants over their seeds."""

from typing import Any

from kfp import dsl

from components.platform.stage import stage


@stage
def compare(
    trials: list[dict[str, Any]],
    store: str,
    comparison: dsl.Output[dsl.Artifact],
    report: dsl.Output[dsl.HTML],
    metrics: dsl.Output[dsl.Metrics],
) -> None:
    """Compare the metrics logged by the successful trials of this pipeline run.

    Args:
        trials: the loop's items; the key "trial" contains the variant, the seed and a description of the change.
        store: directory or s3://bucket/prefix of artifacts.
        comparison: the report with tables and figures, and all numbers as JSON.
        report: the report as HTML.
        metrics: mean and standard deviation of each variant's metrics.
    """
    from components.platform import sweeps
    from components.platform.stage_run import stage_run
    from infoxlm_core.results.summaries.ablation import summarise_metrics

    with stage_run("compare", store, ends_run_on_failure=True) as step:
        planned_trials = [trial["trial"] for trial in step.read(trials)]
        metrics_by_trial = sweeps.end_unfinished_and_read_metrics(step, planned_trials)
        summary = summarise_metrics(step.run.name, metrics_by_trial, outcomes=sweeps.read_outcomes(step.run))
        sweeps.publish(step, "comparison", summary, sweeps.Outputs(comparison, report, metrics))

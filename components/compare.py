"""Component: the trials of an ablation -> a page that compares its variants over their seeds."""

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
    """Compare the metrics that the trials of this pipeline run have logged, also when some of them failed.

    Args:
        trials: the items of the loop, each with its `trial`: variant, seed, and what the variant changes.
        store: directory where artifacts are found by content.
        comparison: the page, its tables and figures, and all numbers as JSON.
        report: the page as HTML.
        metrics: mean and deviation of every metric of every variant.
    """
    from components.platform import sweeps
    from components.platform.stage_run import stage_run
    from infoxlm_core.results.summary import summarise_metrics

    with stage_run("compare", store, last=True) as step:
        results = sweeps.read_metrics(step, [item["trial"] for item in step.read(trials)])
        summary = summarise_metrics(step.run.name, results)
        sweeps.publish(step, "comparison", summary, summary.name_headlines(), comparison, report, metrics)

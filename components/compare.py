"""Component: the trials of an ablation -> one comparison of its variants over their seeds."""

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
    """Compare what all trials of this pipeline run have logged, also when some of them failed.

    Args:
        trials: the items of the loop, each with its `trial`: variant, seed, and what the variant is.
        store: directory where artifacts are found by content.
        comparison: where table, figure and JSON are.
        report: the table and the figure as HTML.
        metrics: mean and deviation of every metric of every variant.
    """
    from components.platform import runtime, sweeps, tracking
    from infoxlm_core.results import ablation, ablation_page
    from infoxlm_core.results.trials import Trial

    with runtime.ending_clearly(store, "compare"):
        run = tracking.open_run(store)
        found = {one.trial.name: one.metrics for one in run.trials()}
        planned = [Trial.parse(item["trial"]) for item in trials]
        for item, trial in zip(trials, planned, strict=True):
            if not found.get(trial.name):  # one that never began gets a run too, so that it is not forgotten
                tracking.open_run(store, item["trial"]).end("FAILED")
        results = [(trial, found.get(trial.name, {})) for trial in planned]
        compared = ablation.compare(results, run.name)
        sweeps.publish(store, run, "comparison", compared, ablation_page.write, comparison, report, metrics)

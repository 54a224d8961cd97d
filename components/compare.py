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
    from components.platform import sweeps
    from components.platform.stage_run import stage_run
    from infoxlm_core.results import ablation, ablation_page

    with stage_run("compare", store, last=True) as step:
        found = sweeps.read_metrics(step, [item["trial"] for item in step.read(trials)])
        compared = ablation.compare(found, step.run.name)
        sweeps.publish(step, "comparison", compared, ablation_page.write, comparison, report, metrics)

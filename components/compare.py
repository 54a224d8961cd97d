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
    import logging
    import re
    import shutil
    from pathlib import Path

    from components.adapters.mlflow import nested_runs, trial_runs
    from components.adapters.mlflow import runs as mlflow_runs
    from components.platform import runtime, stores
    from infoxlm_core import manifests
    from infoxlm_core.results import comparison as comparisons
    from infoxlm_core.stages.evaluation import HEADLINES

    with runtime.ending_clearly(store, "compare"):
        run = runtime.run_id(store)
        found = trial_runs.expect(trial_runs.read(run), [item["trial"] for item in trials])
        for trial in found:
            if not trial["metrics"]:  # one that never began gets a run too, so that it is not forgotten
                mlflow_runs.end_run(runtime.run_id(store, trial), "FAILED")
        compared = comparisons.compare(found, comparisons.choose(HEADLINES), nested_runs.name_of(run))
        flat = comparisons.flatten(compared)
        name = manifests.digest([compared, manifests.VERSIONS["comparison"]]).removeprefix("sha256:")[:16]

        def write(output: Path) -> dict[str, float]:
            comparisons.write(output, compared)
            return flat

        made = stores.get_or_build(store, "comparison", name, write)
        stores.publish(comparison, made)
        shutil.copy(made / "comparison.html", report.path)
        stores.log_facts(made, metrics)
        legal = {re.sub(r"[^\w.:/ -]", "_", name): value for name, value in flat.items()}
        mlflow_runs.log_metrics(run, legal)
        mlflow_runs.log_artifacts(run, made, "comparison")
        if missing := comparisons.list_unfinished(compared):
            logging.warning("not finished, and not compared: %s", ", ".join(missing))

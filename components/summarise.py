"""Component: the points of a suite -> one comparison, beside what is published."""

from typing import Any

from kfp import dsl

from components.platform.stage import stage


@stage
def summarise(
    suite: dict[str, Any],
    store: str,
    comparison: dsl.Output[dsl.Artifact],
    report: dsl.Output[dsl.HTML],
    metrics: dsl.Output[dsl.Metrics],
) -> None:
    """Sum up all points of this pipeline run that are finished, also when some of them failed.

    Args:
        suite: a `SuiteConfig` in lists.
        store: directory where artifacts are found by content.
        comparison: tables, figures, the report, all numbers as JSON, a section for the model card.
        report: the report as HTML.
        metrics: the main scores of every model and task.
    """
    import logging
    import shutil
    from pathlib import Path

    from components.adapters.mlflow import point_runs
    from components.adapters.mlflow import runs as mlflow_runs
    from components.platform import runtime, stores
    from infoxlm_core import manifests
    from infoxlm_core.results import suite as suites
    from infoxlm_core.results.suite_config import SuiteConfig

    with runtime.ending_clearly(store, "summarise"):
        checked = SuiteConfig.parse(suite, "suite")
        run = runtime.run_id(store)
        point_runs.close_unfinished(run)
        summary = suites.summarise(checked, point_runs.read(run))
        flat = suites.flatten(summary)
        name = manifests.digest([summary, manifests.VERSIONS["suite"]]).removeprefix("sha256:")[:16]

        def write(output: Path) -> dict[str, float]:
            suites.write(output, summary)
            return flat

        made = stores.get_or_build(store, "suite", name, write)
        stores.publish(comparison, made)
        shutil.copy(made / "suite.html", report.path)
        stores.log_facts(made, metrics)
        mlflow_runs.log_params(run, {"suite": checked.model_dump(mode="json")})
        mlflow_runs.log_metrics(run, flat)
        mlflow_runs.log_artifacts(run, made, "suite")
        if missing := summary["unfinished"]:
            logging.warning("not finished, and not in the numbers: %s", ", ".join(missing))

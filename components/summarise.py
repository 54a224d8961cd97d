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
    overrides: dict[str, Any] = {},  # noqa: B006
) -> None:
    """Sum up all points of this pipeline run that are finished, also when some of them failed.

    Args:
        suite: a `SuiteConfig` in lists.
        store: directory where artifacts are found by content.
        comparison: tables, figures, the report, all numbers as JSON, a section for the model card.
        report: the report as HTML.
        metrics: the main scores of every model and task.
        overrides: as of `plan_suite`.
    """
    from components.platform import sweeps
    from components.platform.stage_run import stage_run
    from infoxlm_core import run_file
    from infoxlm_core.results import suite_page
    from infoxlm_core.results.suite_config import SuiteConfig
    from infoxlm_core.results.summary import summarise

    with stage_run("summarise", store, last=True) as step:
        checked = run_file.parse_changed(SuiteConfig, step.read(suite), step.read(overrides), "suite")
        found = summarise(checked, sweeps.read_scores(step))
        step.report(suite=checked)
        sweeps.publish(step, "suite", found, suite_page.write, comparison, report, metrics)

"""Component: the trials of a suite -> a page beside the published numbers."""

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
    """Summarise all trials of this pipeline run that are finished, also when some of them failed.

    Args:
        suite: a `SuiteConfig` in lists.
        store: directory where artifacts are found by content.
        comparison: the page, its tables and figures, all numbers as JSON, and a section for the model card.
        report: the page as HTML.
        metrics: the main scores of every model and task.
        overrides: as of `plan_suite`.
    """
    from components.platform import sweeps
    from components.platform.stage_run import stage_run
    from infoxlm_core import run_file
    from infoxlm_core.results import summary
    from infoxlm_core.results.suite_config import SuiteConfig

    with stage_run("summarise", store, last=True) as step:
        checked = run_file.parse_changed(SuiteConfig, step.read(suite), step.read(overrides), "suite")
        found = summary.summarise(checked, sweeps.read_scores(step))
        step.report(suite=checked)
        sweeps.publish(step, "suite", found, found.name_scores(), comparison, report, metrics)

"""Component: summarise the trials of a suite beside published results."""

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
    """Summarise the finished trials of this pipeline run, even if others failed.

    Args:
        suite: a `SuiteConfig` as lists.
        store: directory or s3://bucket/prefix of artifacts.
        comparison: the report with its tables and figures, all numbers as JSON, and a section for the model card.
        report: the report as HTML.
        metrics: the main scores of each model and task.
        overrides: single settings, as in `plan_suite`.
    """
    from components.platform import sweeps
    from components.platform.stage_run import stage_run
    from infoxlm_core import run_file
    from infoxlm_core.results import summary
    from infoxlm_core.results.suite_config import SuiteConfig

    with stage_run("summarise", store, last=True) as step:
        checked = run_file.parse_changed(SuiteConfig, step.read(suite), step.read(overrides), "suite")
        suite_summary = summary.summarise(checked, sweeps.read_scores(step))
        step.report(suite=checked)
        sweeps.publish(step, "suite", suite_summary, suite_summary.name_scores(), comparison, report, metrics)

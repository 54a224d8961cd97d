"""Components of a suite: plan, measure and summarise its trials."""

from typing import Any

from kfp import dsl

from components.platform.stage import stage


@stage
def plan_suite(
    suite: dict[str, Any],
    store: str,
    overrides: dict[str, Any] = {},  # noqa: B006
) -> list:  # type: ignore[type-arg]  # KFP compiles a different loop for a list with an item type
    """Plan the trials of a suite. Download all models and data, so that a wrong name fails before a GPU is used.

    Args:
        suite: a `SuiteConfig` with models and tasks as lists, because KFP does not keep the order of mappings.
        store: directory or s3://bucket/prefix for copies of models and data.
        overrides: single settings by dotted name, such as {"tasks.xnli.seeds": [1, 2]}. An override of a task does not
            change the tasks that inherit its settings by `like`.

    Returns:
        One {"points": REFERENCE} per batch. The store has the batch's list of trials under this reference. A trial has
        the keys "point" (model, task, seed, grid and name), "source" (of the model) and "settings" (of the task).
    """
    import logging

    from components.platform import parameters, sources, tracking
    from components.platform.stage_run import stage_run
    from infoxlm_core import run_file
    from infoxlm_core.results import trials
    from infoxlm_core.results.suite_config import SuiteConfig

    with stage_run("plan_suite", store, reports_to_tracker=False) as step:
        tracking.get_tracker().check_sweeps_supported()  # fail now instead of after the training
        suite_config = run_file.parse_with_overrides(SuiteConfig, step.read(suite), step.read(overrides), "suite")
        planned_trials = [trial.to_dict() for trial in trials.plan(suite_config)]
        for source in suite_config.models.values():
            sources.fetch_model(source, step.local_store)
        for task, suite_task in suite_config.tasks.items():
            trials.check(task, suite_task, sources.fetch_task_data(suite_task.settings, step.local_store))
            logging.info("The data of task %s are complete.", task)
        num_models, num_tasks = len(suite_config.models), len(suite_config.tasks)
        logging.info("%d trials: %d models, %d tasks.", len(planned_trials), num_models, num_tasks)
        batches = parameters.split_trials(planned_trials)
        # Return references, because the settings of many trials are too large for a Kubeflow parameter.
        return [{"points": parameters.write_reference(store, batch)} for batch in batches]


@stage
def measure(
    batch: dict[str, Any],
    store: str,
    num_workers: int,
    scores: dsl.Output[dsl.Artifact],
    metrics: dsl.Output[dsl.Metrics],
) -> None:
    """Measure the trials of a batch. Fine-tune the encoder first if the task needs fine-tuning.

    Args:
        batch: {"points": REFERENCE}, an output item of `plan_suite` that refers to a list of trials.
        store: directory or s3://bucket/prefix of artifacts and checkpoints.
        num_workers: number of workers per fine-tuning, one per GPU; 0 trains in this process.
        scores: location and digest of each trial's scores and predictions.
        metrics: the scores of a single trial, or the number of trials in a larger batch.
    """
    import json
    from pathlib import Path

    from components.platform import artifacts, evaluations
    from components.platform.stage_run import stage_run
    from infoxlm_core import manifests

    with stage_run("measure", store, reports_to_tracker=False) as step:
        planned_trials = step.read(batch["points"])
    # Outside the block, because each trial reports its own failure.
    results = evaluations.measure_all(planned_trials, store, num_workers)
    pointers = {name: {"location": trial.location, "digest": trial.digest} for name, trial in results.items()}
    Path(scores.path).parent.mkdir(parents=True, exist_ok=True)
    manifests.write_atomically(Path(scores.path), json.dumps(pointers, indent=1))
    [first_trial, *other_trials] = results.values()
    metric_values = {"points": len(results)} if other_trials else first_trial.metrics
    artifacts.log_metrics(metric_values, metrics)


@stage
def summarise(
    suite: dict[str, Any],
    store: str,
    comparison: dsl.Output[dsl.Artifact],
    report: dsl.Output[dsl.HTML],
    metrics: dsl.Output[dsl.Metrics],
    overrides: dict[str, Any] = {},  # noqa: B006
) -> None:
    """Summarise the successful trials of this pipeline run, even if some trials failed.

    Args:
        suite: a `SuiteConfig` with models and tasks as lists, because KFP does not keep the order of mappings.
        store: directory or s3://bucket/prefix of artifacts.
        comparison: the report with tables and figures, all numbers as JSON, and a section for the model card.
        report: the report as HTML.
        metrics: the main scores of each model and task.
        overrides: single settings, as in `plan_suite`.
    """
    from components.platform import sweeps
    from components.platform.stage_run import stage_run
    from infoxlm_core import run_file
    from infoxlm_core.results.suite_config import SuiteConfig
    from infoxlm_core.results.summaries.suite import summarise as summarise_suite

    with stage_run("summarise", store, ends_run_on_failure=True) as step:
        suite_config = run_file.parse_with_overrides(SuiteConfig, step.read(suite), step.read(overrides), "suite")
        suite_summary = summarise_suite(suite_config, sweeps.end_unfinished_and_read_scores(step))
        step.report(suite=suite_config)
        sweeps.publish(step, "suite", suite_summary, sweeps.Outputs(comparison, report, metrics))

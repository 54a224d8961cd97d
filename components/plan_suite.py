"""Component: plan the trials of a suite after checking its models and data."""

from typing import Any

from components.platform.stage import stage


@stage
def plan_suite(
    suite: dict[str, Any],
    store: str,
    overrides: dict[str, Any] = {},  # noqa: B006
) -> list:  # type: ignore[type-arg]  # with an item's type KFP compiles another loop
    """Plan the trials of a suite; download models and data, so that a wrong name fails before a GPU is used.

    Args:
        suite: a `SuiteConfig` as lists.
        store: directory or s3://bucket/prefix for copies of models and data.
        overrides: single settings, such as {"tasks.xnli.seeds": [1, 2]}.

    Returns:
        Batches, each a reference to its trials: {"point": model, task, seed, grid, name; "source", "settings"}.
    """
    import logging

    from components.platform import parameters, sources, tracking
    from components.platform.stage_run import stage_run
    from infoxlm_core import run_file
    from infoxlm_core.results import trials
    from infoxlm_core.results.suite_config import SuiteConfig

    with stage_run("plan_suite", store, reports=False) as step:
        tracking.tracker().check_sweeps()
        checked = run_file.parse_changed(SuiteConfig, step.read(suite), step.read(overrides), "suite")
        planned = [trial.to_dict() for trial in trials.plan(checked)]
        for source in checked.models.values():
            sources.fetch_model(source, step.local_store)
        for task, measure in checked.tasks.items():
            trials.check(task, measure, sources.localise(measure.settings, step.local_store))
            logging.info("The data of task %s are complete.", task)
        logging.info("%d trials: %d models, %d tasks.", len(planned), len(checked.models), len(checked.tasks))
        batches = parameters.split_trials(planned)
        return [{"points": parameters.write_reference(store, batch)} for batch in batches]

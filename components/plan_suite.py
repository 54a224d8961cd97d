"""Component: a suite's config -> its points in batches, after a look at every model and every set that they need."""

from typing import Any

from components.platform.stage import stage


@stage
def plan_suite(
    suite: dict[str, Any],
    store: str,
    overrides: dict[str, Any] = {},  # noqa: B006
) -> list:  # type: ignore[type-arg]  # with an item's type KFP compiles another loop
    """Plan a suite; fetch models and data into the store, so that a wrong name fails before a GPU is used.

    Args:
        suite: a `SuiteConfig` in lists.
        store: directory where copies of models and data are kept.
        overrides: single fields of the suite by their names, such as {"tasks.xnli.seeds": [1, 2]}.

    Returns:
        batches, each a reference to points: {"point": model, task, seed, grid, name; "source", "settings"}.
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
        points = [planned.to_dict() for planned in trials.plan(checked)]
        for source in checked.models.values():
            sources.fetch_model(source, step.here)
        for task, measure in checked.tasks.items():
            trials.check(task, measure, sources.localise(measure.settings, step.here))
            logging.info("%s: its data are there", task)
        logging.info("%d points: %d models, %d tasks", len(points), len(checked.models), len(checked.tasks))
        return [{"points": parameters.by_reference(store, batch)} for batch in parameters.split_points(points)]

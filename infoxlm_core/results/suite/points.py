"""A suite's config -> its points, each with settings that were checked before any of them starts.

A point is one measurement: a model on a task, at one place of the grid, with one seed. Retrieval trains nothing and has
one point a model.
"""

import itertools
from collections.abc import Iterator
from typing import Any

from infoxlm_core.errors import ConfigError
from infoxlm_core.results.suite_config import Settings, SuiteConfig, SuiteTaskConfig
from infoxlm_core.tasks import task_of


def plan(config: SuiteConfig) -> list[dict[str, Any]]:
    """List the points of a suite, task by task in the order of the config.

    Returns:
        {"point": {"model", "task", "seed", "grid": {field: value}, "name"}, "source", "settings"} each, plain values
        and nowhere None. Names are unique. `settings` leaves defaults out: all points together travel as one value.

    Raises:
        ConfigError: a task cannot be planned so; one line that names it and the field.
    """
    _check_models(config)
    points = []
    for task, measure in config.tasks.items():
        _check(task, measure)
        for model, source in config.models.items():
            for grid in combine(measure):
                label = describe(grid)
                for seed in measure.seeds:
                    named = [model, task, label, f"seed {seed}" if is_trained(measure) else ""]
                    point = {"model": model, "task": task, "seed": seed, "grid": grid}
                    point["name"] = " ".join(part for part in named if part)
                    settings = apply(task, measure, grid, seed)
                    points.append({"point": point, "source": source, "settings": dump(settings)})
    return points


def combine(measure: SuiteTaskConfig) -> Iterator[dict[str, Any]]:
    """Every place of a grid, fields by name, values in their order: {field: value}; {} once if there is no grid."""
    fields = sorted(measure.grid)
    for values in itertools.product(*(measure.grid[field] for field in fields)):
        yield dict(zip(fields, map(_whole, values), strict=True))


def _whole(value: Any) -> Any:
    """16 for 16.0: KFP makes floats of all numbers, and names must stay the same."""
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else value


def describe(grid: dict[str, Any]) -> str:
    """`batch_size=16 learning_rate=2e-05`: the last parts of the names, if they tell the fields apart."""
    last = [field.rpartition(".")[2] for field in grid]
    names = last if len(set(last)) == len(last) else list(grid)
    return " ".join(f"{name}={value}" for name, value in zip(names, grid.values(), strict=True))


def is_trained(measure: SuiteTaskConfig) -> bool:
    """Whether a task needs fine-tuning."""
    return task_of(measure.settings).trained


def apply(task: str, measure: SuiteTaskConfig, grid: dict[str, Any], seed: int) -> Settings:
    """The settings at one place of the grid, with one seed."""
    values = measure.settings.model_dump(mode="json")
    for field, value in grid.items():
        *sections, last = field.split(".")
        place = values
        for section in sections:
            place = place[section]
        place[last] = value
    if is_trained(measure):
        values["seed"] = seed
    return type(measure.settings).parse(values, f"tasks.{task}.settings")


def dump(settings: Settings) -> dict[str, Any]:
    """Settings as plain values without defaults, but with the name of the task, by which they are read again.

    KFP has no word for None: a field that is None is left out, which means the same.
    """
    return {"task": settings.task, **settings.model_dump(mode="json", exclude_defaults=True, exclude_none=True)}


def slug(model: str) -> str:
    """A model's name as it stands in names of metrics."""
    return model.lower().replace("_", "-")


def _check_models(config: SuiteConfig) -> None:
    seen: dict[str, str] = {}
    for model in config.models:
        if slug(model) in seen:
            raise ConfigError(f"models: {seen[slug(model)]} and {model} would have the same metrics: rename one")
        seen[slug(model)] = model


def _check(task: str, measure: SuiteTaskConfig) -> None:
    """Refuse seeds and grids that say nothing, or that nothing could be chosen by."""
    settings, where = measure.settings, f"tasks.{task}"
    if not is_trained(measure):
        if measure.grid or len(measure.seeds) > 1:
            raise ConfigError(f"{where}: {settings.task} trains nothing: leave out grid and seeds")
        return
    if len(set(measure.seeds)) < len(measure.seeds):
        raise ConfigError(f"{where}.seeds: {list(measure.seeds)} has a seed twice")
    for field, values in measure.grid.items():
        if len(set(values)) < len(values):
            raise ConfigError(f"{where}.grid.{field}: {list(values)} has a value twice")
        _check_field(field, settings, where)
    task_of(settings).check_plan(settings, len(list(combine(measure))), where)


def _check_field(field: str, settings: Settings, where: str) -> None:
    """Refuse a field of a grid that the settings do not have, or that is no matter of a grid."""
    values: Any = settings.model_dump(mode="json")
    if field in ("seed", "task"):
        raise ConfigError(f"{where}.grid.{field}: not here: seeds and settings.task say it")
    for part in field.split("."):
        if not isinstance(values, dict) or part not in values:
            known = ", ".join(sorted(values)) if isinstance(values, dict) else "none below it"
            raise ConfigError(f"{where}.grid.{field}: unknown name {part!r}; known are {known}")
        values = values[part]

"""Trials: what a sweep consists of. A suite's config -> its trials, each checked before any of them starts.

A trial is one measurement: a model (of an ablation: a variant) with one seed; of a suite on one task, at one place of
the grid. A task that trains nothing has one trial a model.
"""

import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from dataclasses import field as default
from pathlib import Path
from typing import Any, NamedTuple, Self

from infoxlm_core import manifests, outside
from infoxlm_core.errors import ConfigError, InputError
from infoxlm_core.results.suite_config import Settings, SuiteConfig, SuiteTaskConfig
from infoxlm_core.tasks import task_of, unreserved
from infoxlm_core.tasks.scores import Scores

SCORES = "scores.json"
LINK = "artifact:"
"""Begins a link to a file of a run; the tracker replaces it with the file's address."""
HEADLINES = (
    "retrieval/best", "retrieval/no_overlap", "perplexity/mean", "classification/mean", "classification/transfer_gap"
)  # fmt: skip
"""Metrics that describe a version in the registry, and that variants are compared by; all others are in their runs."""


@dataclass(frozen=True)
class Trial:
    """One measurement of a sweep."""

    name: str  # unique in the sweep; what people read
    model: str  # of an ablation the variant
    seed: int
    task: str = ""  # of a suite; a trial of an ablation is measured on all tasks of its evaluation
    grid: Mapping[str, Any] = default(default_factory=dict)
    what: str = ""  # what a variant is

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> Self:
        """Read a trial as it travels through a pipeline: {"variant", "seed", "what"}, or of a suite all fields."""
        seed = int(values["seed"])  # KFP makes 1.0 of 1
        if "variant" in values:
            name = f"{values['variant']} seed {seed}"
            return cls(name, values["variant"], seed, what=values.get("what", ""))
        grid = {name: _whole(value) for name, value in values["grid"].items()}
        return cls(values["name"], values["model"], seed, values["task"], grid)


class Planned(NamedTuple):
    """A trial of a suite, where its model is, and its settings."""

    trial: Trial
    source: str
    settings: Settings

    def to_dict(self) -> dict[str, Any]:
        """Plain values, nowhere None. Settings leave defaults out: all trials together travel as one value."""
        point = {"model": self.trial.model, "task": self.trial.task, "seed": self.trial.seed, "grid": self.trial.grid}
        return {"point": point | {"name": self.trial.name}, "source": self.source, "settings": dump(self.settings)}


def plan(config: SuiteConfig) -> list[Planned]:
    """List the trials of a suite, task by task in the order of the config; ConfigError if one cannot be planned so."""
    _check_models(config)
    planned = []
    for task, measure in config.tasks.items():
        _check(task, measure)
        for model, source in config.models.items():
            for grid in combine(measure):
                for seed in measure.seeds:
                    named = [model, task, describe(grid), f"seed {seed}" if task_of(measure.settings).trained else ""]
                    trial = Trial(" ".join(filter(None, named)), model, seed, task, grid)
                    planned.append(Planned(trial, source, apply(task, measure, grid, seed)))
    return planned


def combine(measure: SuiteTaskConfig) -> Iterator[dict[str, Any]]:
    """Every place of a grid, fields by name, values in their order: {field: value}; {} once if there is no grid."""
    fields = sorted(measure.grid)
    for values in itertools.product(*(measure.grid[field] for field in fields)):
        yield dict(zip(fields, map(_whole, values), strict=True))


def _whole(value: Any) -> Any:
    """16 for 16.0: KFP makes floats of all numbers, and names must stay the same."""
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else value


def describe(grid: Mapping[str, Any]) -> str:
    """`batch_size=16 learning_rate=2e-05`: the last parts of the names, if they tell the fields apart."""
    last = [field.rpartition(".")[2] for field in grid]
    names = last if len(set(last)) == len(last) else list(grid)
    return " ".join(f"{name}={value}" for name, value in zip(names, grid.values(), strict=True))


def apply(task: str, measure: SuiteTaskConfig, grid: Mapping[str, Any], seed: int) -> Settings:
    """The settings at one place of the grid, with one seed."""
    values = measure.settings.model_dump(mode="json")
    for field, value in grid.items():
        *sections, last = field.split(".")
        place = values
        for section in sections:
            place = place[section]
        place[last] = value
    if task_of(measure.settings).trained:
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
    if not task_of(settings).trained:
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


def read_settings(values: Mapping[str, Any]) -> Settings:
    """The settings of a trial, of the kind that their `task` names."""
    return SuiteTaskConfig.parse({"settings": values}).settings


def check(task: str, measure: SuiteTaskConfig, settings: Settings) -> None:
    """Read all sets of a task once, its paths local: a wrong path or an empty set is found in seconds, by the task."""
    try:
        task_of(settings).check(settings, any(len(values) > 1 for values in measure.grid.values()))
    except InputError as error:
        raise type(error)(f"tasks.{task}: {error}") from None


def measure(settings: Settings, encoder: Path, model: Path, training: Mapping[str, Any], output: Path) -> Scores:
    """Measure an encoder, or the model that was fine-tuned from it; write scores.json beside the predictions.

    `training` is what fine-tuning said of itself: `steps`, `examples`, and `tuned`, where in the store the model is.
    Files of the test that were not taken out of the encoder's training text are in the scores: `not_reserved`.
    """
    task = task_of(settings)
    data = [Path(path) for paths in task.data(settings).values() for path in paths]
    corpus = next((path for path in data if (path / "held_out").is_dir()), None)
    missing = unreserved.find(encoder, task.tests(settings), corpus)
    scores = task.measure(settings, model, output)
    scores = replace(
        scores,
        trained_on=task.training_languages(settings),
        training=training,
        details={**scores.details, **({"not_reserved": missing} if missing else {})},
    )
    manifests.write_atomically(output / SCORES, json.dumps(scores.to_dict(), indent=1, ensure_ascii=False) + "\n")
    return scores


def read_scores(path: Path) -> Scores:
    """Read what `measure` wrote, today or before; InputError if it is something else."""
    return Scores.from_dict(outside.read_json(path, dict[str, Any], "measure again"), str(path))

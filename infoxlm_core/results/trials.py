"""Plan the trials of a suite, check them before the first trial starts, and measure them.

A trial of an ablation is one variant with one seed. A trial of a suite is one model on one task, with one seed, at one
grid point. A task without training has one trial per model.
"""

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

from infoxlm_core import manifests, user_files
from infoxlm_core.config.base import set_by_name
from infoxlm_core.errors import ConfigError, InputError
from infoxlm_core.results.evidence import STARTS
from infoxlm_core.results.suite_config import Settings, SuiteConfig, SuiteTaskConfig
from infoxlm_core.tasks import task_of, unreserved
from infoxlm_core.tasks.scores import Scores

SCORES = "scores.json"
LINK = "artifact:"
"""Prefix of links to a run's files. The tracker replaces the prefix with the run's address."""
HEADLINES = (
    "retrieval/served", "retrieval/best", "retrieval/no_overlap", "guard/mean", "perplexity/mean",
    "classification/mean", "classification/transfer_gap", "translation/bleu", "translation/mean",
)  # fmt: skip
"""Headline metrics: they describe a registered version and compare an ablation's variants."""


def describe_headlines(metrics: Mapping[str, float]) -> list[str]:
    """Return one line per headline metric of a run, with the value before the training."""
    lines = []
    for name in HEADLINES:
        if name not in metrics:
            continue
        line = f"{name:28}{metrics[name]:10.4f}"
        for start in STARTS:
            start_value = metrics.get(f"{start}/{name}")
            if start_value is not None:
                line += f"    {start} {start_value:10.4f}"
        lines.append(line)
    return lines


@dataclass(frozen=True)
class Trial:
    """One measurement of a sweep."""

    name: str  # unique in the sweep
    model: str  # in an ablation, the variant
    seed: int
    task: str = ""  # empty in an ablation, because each trial measures all tasks
    grid: Mapping[str, Any] = field(default_factory=dict)
    what: str = ""  # what a variant changes
    rank: int = 0  # position of the variant in the sweep; rank 0 is the baseline

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> Self:
        """Parse a trial from a pipeline parameter: {"variant", "seed", "what", "rank"}, or all fields for a suite."""
        seed = int(values["seed"])  # KFP turns 1 into 1.0
        if "variant" in values:
            name = f"{values['variant']} seed {seed}"
            rank = int(values.get("rank", 0))  # trials of older releases have no rank
            return cls(name, values["variant"], seed, what=values.get("what", ""), rank=rank)
        grid = {name: _to_int(value) for name, value in values["grid"].items()}
        return cls(values["name"], values["model"], seed, values["task"], grid)


class PlannedTrial(NamedTuple):
    """A trial of a suite with the source of its model and its settings."""

    trial: Trial
    source: str
    settings: Settings

    def to_dict(self) -> dict[str, Any]:
        """Return plain values without None, because KFP has no null."""
        trial_fields = {name: getattr(self.trial, name) for name in ("model", "task", "seed", "grid", "name")}
        return {"point": trial_fields, "source": self.source, "settings": dump_settings(self.settings)}


def plan(config: SuiteConfig) -> list[PlannedTrial]:
    """Plan the trials of a suite: every model with every grid point and seed, task by task.

    Raises:
        ConfigError: the names of two models give the same metric names, or a grid or its seeds cannot be used.
    """
    _check_model_names(config)
    planned_trials = []
    for task, suite_task in config.tasks.items():
        _check_grid_and_seeds(task, suite_task)
        grid_points = list_grid_points(suite_task)
        for (model, source), grid_point, seed in itertools.product(
            config.models.items(), grid_points, suite_task.seeds
        ):
            name = f"{model} {task}"
            if grid_point:
                name += f" {describe_grid_point(grid_point)}"
            if task_of(suite_task.settings).is_finetuned:
                name += f" seed {seed}"
            trial = Trial(name, model, seed, task, grid_point)
            planned_trials.append(PlannedTrial(trial, source, apply_grid_point(task, suite_task, grid_point, seed)))
    return planned_trials


def list_grid_points(suite_task: SuiteTaskConfig) -> list[dict[str, Any]]:
    """Return every combination of grid values as a mapping. Without a grid, return one empty mapping."""
    names = sorted(suite_task.grid)
    value_lists = [map(_to_int, suite_task.grid[name]) for name in names]
    return [dict(zip(names, values, strict=True)) for values in itertools.product(*value_lists)]


def _to_int(value: Any) -> Any:
    """Convert 16.0 to 16, because KFP converts all numbers to floats and trial names must not change."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:  # larger floats are not exact
        return int(value)
    return value


def describe_grid_point(grid: Mapping[str, Any]) -> str:
    """Describe a grid point by its values: `batch_size=16 learning_rate=2e-05`.

    If two short names are equal, all fields have their full names, such as `optimization.learning_rate`.
    """
    names = [name.rpartition(".")[2] for name in grid]
    if len(set(names)) < len(names):
        names = list(grid)
    return " ".join(f"{name}={value}" for name, value in zip(names, grid.values(), strict=True))


def apply_grid_point(task: str, suite_task: SuiteTaskConfig, grid: Mapping[str, Any], seed: int) -> Settings:
    """Return the settings of a task at one grid point, with one seed."""
    values = suite_task.settings.model_dump(mode="json")
    for name, value in grid.items():
        set_by_name(values, name, value, f"tasks.{task}.grid.{name}")  # `parse` below rejects unknown names
    if task_of(suite_task.settings).is_finetuned:
        values["seed"] = seed
    return type(suite_task.settings).parse(values, f"tasks.{task}.settings")


def dump_settings(settings: Settings) -> dict[str, Any]:
    """Return settings as plain values, without defaults and None. KFP has no null."""
    return {"task": settings.task, **settings.model_dump(mode="json", exclude_defaults=True, exclude_none=True)}


def slug(model: str) -> str:
    """Convert a model's name to the form used in metric names."""
    return model.lower().replace("_", "-")


def _check_model_names(config: SuiteConfig) -> None:
    """Raise ConfigError if two models would have the same metric names."""
    models_by_slug: dict[str, str] = {}
    for model in config.models:
        first_model = models_by_slug.setdefault(slug(model), model)
        if first_model != model:
            raise ConfigError(
                f"The models {first_model} and {model} would have the same metric names. Rename one of them."
            )


def _check_grid_and_seeds(task: str, suite_task: SuiteTaskConfig) -> None:
    """Raise ConfigError if a task's seeds or grid values are repeated or have no effect."""
    settings = suite_task.settings
    location = f"tasks.{task}"
    if not task_of(settings).is_finetuned:
        if suite_task.grid or len(suite_task.seeds) > 1:
            raise ConfigError(f"{location}: {settings.task} trains nothing. Leave out grid and seeds.")
        return
    if len(set(suite_task.seeds)) < len(suite_task.seeds):
        raise ConfigError(f"{location}.seeds {list(suite_task.seeds)} has a seed twice.")
    for name, values in suite_task.grid.items():
        if len(set(values)) < len(values):
            raise ConfigError(f"{location}.grid.{name} {list(values)} has a value twice.")
        if name in ("seed", "task"):
            raise ConfigError(f"{location}.grid.{name} is not a field of a grid. Use seeds or settings.task.")
    task_of(settings).check_plan(settings, len(list_grid_points(suite_task)), location)


def read_settings(values: Mapping[str, Any]) -> Settings:
    """Parse the settings of a trial. Their field `task` selects the kind of settings."""
    return SuiteTaskConfig.parse({"settings": values}).settings


def check(task: str, suite_task: SuiteTaskConfig, settings: Settings) -> None:
    """Read a task's data once, to find wrong paths and empty files before training.

    Args:
        task: name of the task in the suite, for error messages.
        suite_task: task of the suite. Its grid needs development sets.
        settings: settings of the task with local paths.

    Raises:
        InputError: a file is missing, empty or malformed.
    """
    has_grid = any(len(values) > 1 for values in suite_task.grid.values())
    try:
        task_of(settings).check(settings, has_grid)
    except InputError as error:
        raise type(error)(f"tasks.{task}: {error}") from None  # keeps subclasses such as ConfigError


def measure_model(settings: Settings, encoder: Path, model: Path, training: Mapping[str, Any], output: Path) -> Scores:
    """Measure a model on a task, and write its predictions and scores.json.

    Args:
        settings: settings of the task.
        encoder: directory of the encoder. Its manifest lists the test files that were removed from its training text.
        model: directory of the model to measure; the encoder's directory if the task has no training.
        training: facts about the fine-tuning: `steps`, `examples`, and `tuned`, the model's location in the store.
        output: directory for scores and predictions.
    """
    task = task_of(settings)
    data_paths = [Path(path) for paths in task.list_data(settings).values() for path in paths]
    # The prepared corpus, if the task is measured on held-out text.
    corpus = next((path for path in data_paths if (path / "held_out").is_dir()), None)
    leaked_files = unreserved.find_unreserved_files(encoder, task.list_test_files(settings), corpus)
    scores = task.measure(settings, model, output)
    details = dict(scores.details)
    if leaked_files:
        details["not_reserved"] = leaked_files
    trained_on = task.list_training_languages(settings)
    scores = replace(scores, trained_on=trained_on, training=training, details=details)
    manifests.write_atomically(output / SCORES, json.dumps(scores.to_dict(), indent=1, ensure_ascii=False) + "\n")
    return scores


def read_scores(path: Path) -> Scores:
    """Read scores.json, written by `measure_model`. Raise InputError if the file is malformed."""
    return Scores.from_dict(user_files.read_json(path, dict[str, Any], "measure again"), str(path))

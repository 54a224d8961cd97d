"""The config of a suite: its encoders and its tasks."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, Union

from pydantic import Field, model_validator

from infoxlm_core.config import StageConfig
from infoxlm_core.config.base import Name, NonNegativeInt, merge
from infoxlm_core.errors import ConfigError
from infoxlm_core.tasks import TASKS

if TYPE_CHECKING:
    Settings = Any
    Table = str
else:
    Settings = Union[tuple(task.settings for task in TASKS.values())]  # noqa: UP007 - the tasks are known only at run time
    Table = Literal[(*(table for task in TASKS.values() for table in task.tables), "none")]


class SuiteTaskConfig(StageConfig):
    """One task of a suite, with its seeds and its grid."""

    like: Name | None = None
    """Name of an earlier task of the suite. This task takes everything from it that it does not set itself."""

    settings: Annotated[Settings, Field(discriminator="task")]
    """Settings of the task. The field `task` in them names the kind of the task."""

    grid: dict[str, Annotated[tuple[float | int | str, ...], Field(min_length=1)]] = Field(default_factory=dict)
    """Values to try for each field of `settings`, such as `optimization.learning_rate`. The suite reports the values
    with the best score on the development sets."""

    seeds: Annotated[tuple[NonNegativeInt, ...], Field(min_length=1)] = (1,)
    """Seeds of fine-tuning. The suite reports the mean and the standard deviation over the seeds."""

    table: Table = "none"
    """The published table that is shown beside our scores."""


class SuiteConfig(StageConfig):
    """A suite evaluates several encoders on several tasks, and reports tables, figures and metrics."""

    models: Annotated[dict[Name, str], Field(min_length=1)]
    """Models by name. A model is a directory, s3://bucket/prefix, a name on the hub, or models:/NAME@ALIAS. The first
    model is the one that is tested. The others are compared with it."""

    tasks: Annotated[dict[Name, SuiteTaskConfig], Field(min_length=1)]
    """Tasks by name. The names of the metrics of a task start with its name."""

    @model_validator(mode="before")
    @classmethod
    def _read_lists(cls, values: Any) -> Any:
        """Convert lists of models and tasks, made by `listed`, to mappings. Resolve the field `like` of tasks."""
        if not isinstance(values, dict):
            return values
        values = dict(values)  # the caller's mapping must not change
        if isinstance(values.get("models"), list):
            models = _index_by_name("models", values["models"])
            values["models"] = {name: model.get("source") for name, model in models.items()}
        if isinstance(values.get("tasks"), list):
            values["tasks"] = _index_by_name("tasks", values["tasks"])
        if isinstance(values.get("tasks"), dict):
            values["tasks"] = _inherit_settings(values["tasks"])
        return values

    def choose(self, tasks: Sequence[str]) -> Self:
        """Return a copy with only the named tasks, in the order of the config. Without names, keep all tasks."""
        for name in tasks:
            if name not in self.tasks:
                raise ConfigError(f"The suite has no task {name!r}. Choose from {', '.join(self.tasks)}.")
        chosen = {name: task for name, task in self.tasks.items() if name in tasks or not tasks}
        return self.model_copy(update={"tasks": chosen})

    def listed(self) -> dict[str, Any]:
        """Return plain values with lists, because Kubeflow loses the order of mappings. The first model is special."""
        values = self.model_dump(mode="json", exclude_none=True)
        return {
            "models": [{"name": name, "source": source} for name, source in values["models"].items()],
            "tasks": [{"name": name, **task} for name, task in values["tasks"].items()],
        }


def _inherit_settings(tasks: Mapping[str, Any]) -> dict[str, Any]:
    """Add inherited values to each task. Its field `like` names an earlier task to inherit from.

    Raises:
        ValueError: no earlier task has this name.
    """
    resolved: dict[str, Any] = {}
    for name, task in tasks.items():
        if not isinstance(task, Mapping) or not task.get("like"):
            resolved[name] = task
            continue
        base_name = task["like"]
        base = resolved.get(base_name) if isinstance(base_name, str) else None
        if not isinstance(base, Mapping):
            raise ValueError(f"tasks.{name}.like: no task {base_name!r} before this one")
        resolved[name] = merge(base, {**task, "like": None})  # `like` has now been applied
    return resolved


def _index_by_name(key: str, items: Sequence[Any]) -> dict[str, dict[str, Any]]:
    """Index the items of a list by their field `name`. Raise ValueError if a name is missing or repeated."""
    names = [item.get("name") if isinstance(item, dict) else None for item in items]
    if None in names or len(set(names)) < len(names):
        raise ValueError(f"{key}: every item of the list needs a unique name, not {names}")
    fields_by_name = {}
    for item in items:
        fields_by_name[item["name"]] = {field: value for field, value in item.items() if field != "name"}
    return fields_by_name

"""The tasks, each in a file of its own; who needs one finds it here by the name that its settings bear."""

from collections.abc import Mapping
from typing import Any

from infoxlm_core.config import StageConfig
from infoxlm_core.errors import ConfigError
from infoxlm_core.tasks.classification.task import Classification
from infoxlm_core.tasks.named_entities.task import NamedEntities
from infoxlm_core.tasks.question_answering.task import QuestionAnswering
from infoxlm_core.tasks.retrieval.task import Retrieval
from infoxlm_core.tasks.task import Task

_TASKS: tuple[Task[Any], ...] = (
    Classification(),
    QuestionAnswering(),
    Retrieval(),
    NamedEntities(),
)
TASKS: dict[str, Task[Any]] = {task.name: task for task in _TASKS}


def parse(values: Mapping[str, Any], where: str = "") -> Any:
    """The settings of the task that a mapping names, of classification if it names none; or a ConfigError."""
    name = values.get("task", Classification.name)
    if name not in TASKS:
        raise ConfigError(f"{where}.task: {name!r} is no task; known are {', '.join(TASKS)}")
    return TASKS[name].settings.parse(values, where)


def task_of(settings: StageConfig) -> Task[Any]:
    """The task that settings are of."""
    return TASKS[settings.task]  # type: ignore[attr-defined]

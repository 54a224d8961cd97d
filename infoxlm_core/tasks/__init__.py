"""The task registry. Processes without torch import it, so tasks import torch only inside their methods."""

from collections.abc import Mapping
from typing import Any

from infoxlm_core.config import StageConfig
from infoxlm_core.errors import ConfigError
from infoxlm_core.tasks.classification.task import Classification
from infoxlm_core.tasks.mining.task import Mining
from infoxlm_core.tasks.named_entities.task import NamedEntities
from infoxlm_core.tasks.question_answering.task import QuestionAnswering
from infoxlm_core.tasks.retrieval.task import Retrieval
from infoxlm_core.tasks.task import Task

_TASKS: tuple[Task[Any], ...] = (Classification(), QuestionAnswering(), Retrieval(), NamedEntities(), Mining())
TASKS: dict[str, Task[Any]] = {task.name: task for task in _TASKS}


def parse(values: Mapping[str, Any], where: str = "") -> Any:
    """Parse the settings of the task `values["task"]`, by default classification. Raise ConfigError if invalid."""
    name = values.get("task", Classification.name)
    if name not in TASKS:
        raise ConfigError(f"{where}.task: {name!r} is not a task; known are {', '.join(TASKS)}")
    return TASKS[name].settings.parse(values, where)


def task_of(settings: StageConfig) -> Task[Any]:
    """Return the task that the settings configure."""
    return TASKS[settings.task]  # type: ignore[attr-defined]

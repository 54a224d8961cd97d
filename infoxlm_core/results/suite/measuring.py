"""One point of a suite: its settings, a look at what it reads, and its scores."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from infoxlm_core import manifests
from infoxlm_core.errors import InputError
from infoxlm_core.results.suite_config import Settings, SuiteTaskConfig
from infoxlm_core.tasks import task_of
from infoxlm_core.tasks.task import with_training

SCORES = "scores.json"


def read_settings(values: Mapping[str, Any]) -> Settings:
    """The settings of a point, of the kind that their `task` names."""
    return SuiteTaskConfig.parse({"settings": values}).settings


def check(task: str, measure: SuiteTaskConfig, settings: Settings) -> None:
    """Read all sets of a task once, its paths local: a wrong path or an empty set is found in seconds.

    Raises:
        InputError: a set is missing, not readable, or lacks what the task needs of it; the line names the task.
    """
    try:
        task_of(settings).check(settings, any(len(values) > 1 for values in measure.grid.values()))
    except InputError as error:
        raise type(error)(f"tasks.{task}: {error}") from None


def measure(settings: Settings, model: Path, training: Mapping[str, Any], output: Path) -> None:
    """Measure an encoder, or a model that was fine-tuned from one; write scores.json beside the predictions.

    Args:
        settings: of the task.
        model: a Hugging Face directory.
        training: what fine-tuning said of itself: `steps`, `examples`, and `tuned`, where in the store the model is;
            empty where nothing was trained.
        output: gets scores and predictions.
    """
    task = task_of(settings)
    scores = with_training(task.measure(settings, model, output), task.training_languages(settings), training)
    manifests.write_atomically(output / SCORES, json.dumps(scores.to_dict(), indent=1, ensure_ascii=False) + "\n")

"""One point of a suite: which settings, which part of them training depends on, and its scores."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from infoxlm_core import manifests
from infoxlm_core.config import AnsweringConfig, FinetuningConfig, MeasureConfig, RetrievalConfig
from infoxlm_core.languages import two_letters
from infoxlm_core.model import pretrained
from infoxlm_core.results.suite.points import Settings
from infoxlm_core.tasks import aligned, classifying, reading

SCORES = "scores.json"


def read_settings(values: Mapping[str, Any]) -> Settings:
    """The settings of a point, of the kind that their `task` names."""
    return MeasureConfig.parse({"settings": values}).settings


def without_data(settings: Settings) -> Settings:
    """Settings as they belong to a key: where the data lie does not matter, digests say what they are."""
    if isinstance(settings, AnsweringConfig):
        return settings.model_copy(update={"train": (), "dev": (), "test": ()})
    return settings.model_copy(update={"data": ""})


def training_part(settings: Settings) -> tuple[FinetuningConfig | AnsweringConfig, dict[str, list[str]]] | None:
    """What a fine-tuned model depends on, and the places of its data by role: not on how it is tested afterwards.

    None where nothing is trained.
    """
    if isinstance(settings, RetrievalConfig):
        return None
    data = data_by_role(settings)
    if isinstance(settings, AnsweringConfig):
        part = settings.model_copy(update={"test": (), "mixed": False})
        return part, {role: data[role] for role in ("train", "dev")}
    return settings.model_copy(update={"mixed": False}), data


def data_by_role(settings: Settings) -> dict[str, list[str]]:
    """Every place of data that settings name: `train`, `dev` and `test`, or `data` whose files say what they are."""
    if isinstance(settings, AnsweringConfig):
        return {role: list(getattr(settings, role)) for role in ("train", "dev", "test")}
    return {"data": [settings.data] if isinstance(settings.data, str) else list(settings.data or ())}


def depends_on_workers(settings: FinetuningConfig | AnsweringConfig, encoder: Path) -> bool:
    """Whether training draws luck by worker: dropout of the encoder, and all of models that Hugging Face computes."""
    head = isinstance(settings, FinetuningConfig) and settings.head_dropout > 0
    return settings.dropout > 0 or (head and not pretrained.is_ours(pretrained.read_config(encoder)))


def list_training_languages(settings: Settings) -> list[str]:
    """Languages of the training text, the source first; data are on this machine. Of retrieval none."""
    if isinstance(settings, RetrievalConfig):
        return []
    if isinstance(settings, FinetuningConfig):
        return list(dict.fromkeys(map(two_letters, settings.train_languages)))
    return reading.training_languages(settings)


def measure(settings: Settings, model: Path, training: Mapping[str, Any], output: Path) -> None:
    """Measure an encoder, or a model that was fine-tuned from one; write scores.json beside the predictions.

    Args:
        settings: of the task.
        model: a Hugging Face directory.
        training: what fine-tuning said of itself: `steps`, `examples`, and `tuned`, where in the store the model is;
            empty where nothing was trained.
        output: gets scores and predictions.
    """
    if isinstance(settings, RetrievalConfig):
        scores = aligned.measure(settings, model, output)
    elif isinstance(settings, AnsweringConfig):
        scores = reading.measure(settings, model, output)
    else:
        scores = classifying.measure(settings, model, None, output)
    scores |= {"training": dict(training), "trained_on": list_training_languages(settings)}
    manifests.write_atomically(output / SCORES, json.dumps(scores, indent=1, ensure_ascii=False) + "\n")

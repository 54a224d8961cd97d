"""One point of a suite: which settings, which part of them training depends on, and its scores."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from infoxlm_core import manifests
from infoxlm_core.config import AnsweringConfig, FinetuningConfig, MeasureConfig, RetrievalConfig
from infoxlm_core.suite.points import Settings
from infoxlm_core.tasks import aligned, classification, reading

SCORES = "scores.json"


def read_settings(values: Mapping[str, Any]) -> Settings:
    """The settings of a point, of the kind that their `task` names."""
    return MeasureConfig.parse({"settings": values}).settings


def without_data(settings: Settings) -> Settings:
    """Settings as they belong to a key: where the data lie does not matter, digests say what they are."""
    if isinstance(settings, AnsweringConfig):
        return settings.model_copy(update={"train": (), "dev": (), "test": ()})
    return settings.model_copy(update={"data": ""})


def training_part(settings: Settings) -> tuple[FinetuningConfig | AnsweringConfig, list[str]] | None:
    """What a fine-tuned model depends on, and the places of its data: not on how it is tested afterwards.

    None where nothing is trained.
    """
    if isinstance(settings, RetrievalConfig):
        return None
    if isinstance(settings, AnsweringConfig):
        return settings.model_copy(update={"test": (), "mixed": False}), [*settings.train, *settings.dev]
    return settings.model_copy(update={"mixed": False}), list_data(settings)


def list_data(settings: Settings) -> list[str]:
    """Every place of data that settings name."""
    if isinstance(settings, AnsweringConfig):
        return [*settings.train, *settings.dev, *settings.test]
    return [settings.data] if isinstance(settings.data, str) else list(settings.data or ())


def measure(settings: Settings, model: Path, training: Mapping[str, Any], output: Path) -> None:
    """Measure an encoder, or a model that was fine-tuned from one; write scores.json beside the predictions.

    Args:
        model: a Hugging Face directory.
        training: what fine-tuning said of itself: `steps`, `examples`; empty where nothing was trained.
    """
    if isinstance(settings, RetrievalConfig):
        scores = aligned.measure(settings, model, output)
    elif isinstance(settings, AnsweringConfig):
        scores = reading.measure(settings, model, output)
    else:
        scores = classification.measure(settings, model, None, output)
    scores["training"] = dict(training)
    manifests.write_atomically(output / SCORES, json.dumps(scores, indent=1, ensure_ascii=False) + "\n")

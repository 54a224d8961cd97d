"""Evaluate the models of a pipeline run: find them in the store, and build the artifact with their scores."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.platform import artifacts, costs, sources
from components.platform.stage_run import StageRun
from infoxlm_core import manifests
from infoxlm_core.config import EvaluationConfig
from infoxlm_core.results import evidence


@dataclass(frozen=True)
class EvaluatedModel:
    """An encoder and its classifier in the store."""

    name: str
    encoder_location: str
    classifier_location: str
    digests: tuple[str, str]
    """Digests of the encoder and of the classifier."""


def read_model(name: str, encoder: Any, classifier: Any) -> EvaluatedModel:
    """Return the model whose encoder and classifier are these KFP inputs."""
    encoder_location, encoder_digest = artifacts.read_pointer(encoder)
    classifier_location, classifier_digest = artifacts.read_pointer(classifier)
    return EvaluatedModel(name, encoder_location, classifier_location, (encoder_digest, classifier_digest))


def read_start(encoder: Any, classifier: Any) -> EvaluatedModel:
    """Return the model before its training. Its name says whether it is a public model or has random weights."""
    location, _ = artifacts.read_pointer(encoder)
    inputs = manifests.load(artifacts.locate(location, hashed=False))["inputs"]
    name = evidence.PUBLIC_START if "model.start" in inputs else evidence.UNTRAINED
    return read_model(name, encoder, classifier)


def build_scores(step: StageRun, config: EvaluationConfig, corpus: Any, models: Sequence[EvaluatedModel]) -> Path:
    """Evaluate models on the held-out text of a corpus, unless it is done. Return the directory of their scores.

    Args:
        step: the running component.
        config: settings of the evaluation.
        corpus: KFP input with the corpus.
        models: the trained model, and perhaps the model before its training.
    """
    corpus_location, corpus_digest = artifacts.read_pointer(corpus)
    local_config = sources.localise_guard(config, step.local_store)
    names = [model.name for model in models]
    digests = [digest for model in models for digest in model.digests]
    key = sources.key_with_guard("scores", local_config, corpus_digest, *names, *digests)
    # The report of an adaptation shows the hours of all steps before this one.
    is_adaptation = evidence.PUBLIC_START in names
    hours_before = costs.sum_up(step.run.read_metrics()) if is_adaptation else {}

    def build(output: Path) -> dict[str, float]:
        from infoxlm_core.model.huggingface import origin
        from infoxlm_core.stages.evaluation import evaluate

        encoders = {}
        classifiers = {}
        for model in models:
            encoder = artifacts.locate(model.encoder_location)
            is_adapted_model = is_adaptation and model is models[0] and not step.trial
            name = origin.name_adapted(encoder) if is_adapted_model else model.name
            encoders[name] = encoder
            classifier = artifacts.locate(model.classifier_location)
            is_trained = manifests.load(classifier)["facts"]["steps"] > 0
            if is_trained:  # without labelled text, `finetune` trains nothing
                classifiers[name] = classifier
        corpus_path = artifacts.locate(corpus_location)
        with costs.measured_alone(step.store, "scores", key):
            return evaluate(local_config, corpus_path, encoders, classifiers, output, hours_before)

    return artifacts.get_or_build(step.store, "scores", key, build)

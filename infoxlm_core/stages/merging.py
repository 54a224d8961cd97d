"""Stage merge: a trained encoder and its start model -> an interpolated model that stays accurate on general text.

Training on special text can reduce an encoder's accuracy on general text. A general test set, the guard, measures this
loss. Interpolating the weights of both models avoids most of the loss and keeps most of the gain.
"""

import logging
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from infoxlm_core import manifests
from infoxlm_core.config import EvaluationConfig
from infoxlm_core.errors import InputError
from infoxlm_core.model.huggingface.interpolation import interpolate
from infoxlm_core.results import evidence
from infoxlm_core.results.bootstrap import paired_bootstrap
from infoxlm_core.tasks import reference_vectors
from infoxlm_core.tasks.embedding import load_embedder
from infoxlm_core.tasks.questions import draw_questions
from infoxlm_core.tasks.retrieval import guard
from infoxlm_core.tasks.retrieval.files import AlignedSentences
from infoxlm_core.tasks.retrieval.run import score_directions
from infoxlm_core.tasks.retrieval.task import BOTH_DIRECTIONS
from infoxlm_core.tasks.scores import mean_over

logger = logging.getLogger(__name__)

LARGEST_LOSS = 0.005
"""Largest acceptable loss of accuracy on the guard: half a percentage point."""


class MergedAccuracies(NamedTuple):
    """The merged encoder's retrieval accuracies (0 to 1) at one weight."""

    weight: float
    held_out: float
    guard: float
    guard_lower: float
    """Lower bound of the paired confidence interval for the gain on the guard over the start model."""


def merge(start: Path, encoder: Path, weight: float, output: Path, choice: Mapping[str, Any] | None = None) -> None:
    """Write the model `start + weight * (encoder - start)` with its reference vectors and a manifest.

    Args:
        start: directory of the start model.
        encoder: directory of the trained model.
        weight: weight of the trained model, from 0 (start model) to 1 (trained model).
        output: directory to create.
        choice: how the weight was chosen, for the manifest; None if the user chose it.

    Raises:
        InputError: `output` exists, or the models differ in more than the values of their weights.
    """
    if output.exists():
        raise InputError(f"{output} exists: give another directory")
    interpolate(start, encoder, weight, output)
    reference_vectors.write_reference(output)
    merged_facts: dict[str, Any] = {}
    inputs: dict[str, str] = {}
    encoder_manifest = manifests.load_if_ours(encoder)
    if encoder_manifest:  # the merged encoder was trained on the same text
        merged_facts |= encoder_manifest["facts"]
        inputs |= encoder_manifest.get("inputs", {})
        inputs["encoder"] = encoder_manifest["digest"]
    start_manifest = manifests.load_if_ours(start)
    if start_manifest:
        inputs["start"] = start_manifest["digest"]
    merged_facts["merge"] = {"weight": weight, **(choice or {})}
    manifests.write(output, "encoder", merged_facts, inputs)


def merge_best(config: EvaluationConfig, corpus: Path, encoder: Path, start: Path, output: Path) -> dict[str, Any]:
    """Write the merged encoder with the largest weight that preserves accuracy on the guard, a general test set.

    If every weight loses too much accuracy, log a warning and use the smallest weight.

    Args:
        config: evaluation settings that contain the weights (`merge`) and the guard.
        corpus: a prepared corpus. Accuracy on its held-out pairs is reported, but does not affect the choice.
        encoder: directory of the trained model.
        start: directory of the start model.
        output: directory in which `encoder/` is created.

    Returns:
        The chosen weight, its accuracies, and `passed`: 1 if the guard's accuracy is preserved, else 0.
    """
    held_out: dict[str, AlignedSentences] = {}
    for language, pairs in draw_questions(corpus, encoder, config).pairs.items():
        held_out[language] = ([source for source, _ in pairs], [target for _, target in pairs])
    start_accuracies, start_scores = _measure_accuracies(start, config, held_out)
    # Weight 0 is the start model, whose gain over itself is 0: the first point of the curve, but not a candidate.
    start_point = MergedAccuracies(0.0, **start_accuracies, guard_lower=0.0)
    candidates = []
    for weight in sorted(set(config.merge)):
        # Keep only one merged model on disk at a time. The chosen one is written again at the end.
        with tempfile.TemporaryDirectory(prefix="infoxlm-merge-") as directory:
            merged_encoder = Path(directory, "encoder")
            interpolate(start, encoder, weight, merged_encoder)
            accuracies, guard_scores = _measure_accuracies(merged_encoder, config, held_out)
        gain_interval = paired_bootstrap(guard_scores, start_scores)
        candidates.append(MergedAccuracies(weight, **accuracies, guard_lower=gain_interval.lower))
        logger.info("weight %g: held out %.4f, guard %.4f", weight, accuracies["held_out"], accuracies["guard"])
    chosen = choose_weight(candidates)
    passed = keeps_guard_accuracy(chosen)
    if not passed:
        message = "every weight in evaluation.merge loses too much accuracy on the guard: using the smallest, %g"
        logger.warning(message, chosen.weight)
    curve = [accuracies._asdict() for accuracies in (start_point, *candidates)]
    choice = {"passed": passed, "largest_loss": LARGEST_LOSS, "curve": curve}
    merge(start, encoder, chosen.weight, output / "encoder", choice)
    return chosen._asdict() | {"passed": int(passed)}


def _measure_accuracies(
    model: Path, config: EvaluationConfig, held_out: Mapping[str, AlignedSentences]
) -> tuple[dict[str, float], pd.Series]:
    """Return a model's accuracies on the held-out pairs and the guard, and its score on each guard question."""
    assert config.guard  # noqa: S101 - EvaluationConfig requires a guard if `merge` has weights
    embedder = load_embedder(model, batch_size=config.batch_size, max_tokens=config.max_tokens)
    hits = guard.retrieve(held_out, embedder)
    held_out_scores = {language: score_directions(hits[language]) for language in held_out}
    guard_scores = guard.measure(config.guard, model, embedder)
    accuracies = {"held_out": mean_over(held_out_scores)[BOTH_DIRECTIONS], "guard": guard_scores.mean[BOTH_DIRECTIONS]}
    outcomes = evidence.Outcomes(guard_scores.outcomes, config.guard.pivot)
    return accuracies, outcomes.score_questions("guard/mean")


def keeps_guard_accuracy(accuracies: MergedAccuracies) -> bool:
    """Return whether the confidence interval excludes a loss of `LARGEST_LOSS`, which is also the gate's criterion."""
    return accuracies.guard_lower > -LARGEST_LOSS


def choose_weight(candidates: Sequence[MergedAccuracies]) -> MergedAccuracies:
    """Return the candidate with the largest weight that preserves accuracy on the guard.

    If no candidate does, return the candidate with the smallest weight.
    """
    by_weight = sorted(candidates)  # the weight is the first field
    accepted = [candidate for candidate in by_weight if keeps_guard_accuracy(candidate)]
    return accepted[-1] if accepted else by_weight[0]

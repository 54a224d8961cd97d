"""Stage merge: an encoder and its start -> a model between them that stays accurate on general text.

Training on special text can make an encoder worse on general text. The guard, a general test set, measures this loss.
Interpolating the weights of the start and the trained encoder keeps most of the gain with less of the loss.
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
from infoxlm_core.tasks.scores import mean_over

logger = logging.getLogger(__name__)

LARGEST_LOSS = 0.005
"""The accuracy that the merged encoder may lose on the guard: half a percentage point."""


class Point(NamedTuple):
    """The retrieval accuracies (0 to 1) of the merged encoder at one weight."""

    weight: float
    held_out: float
    guard: float
    guard_lower: float
    """Lower end of the paired confidence interval of the gain over the start on the guard."""


def merge(start: Path, encoder: Path, weight: float, output: Path, facts: Mapping[str, Any] | None = None) -> None:
    """Write the model `start + weight * (encoder - start)` with its reference vectors and a manifest.

    Args:
        start: directory of the model that the training of `encoder` started from.
        encoder: directory of the trained model.
        weight: from 0, the start, to 1, the encoder.
        output: directory to create.
        facts: further facts about the merge for the manifest.

    Raises:
        InputError: `output` exists, or the models differ in more than the values of their weights.
    """
    if output.exists():
        raise InputError(f"{output} exists: give another directory")
    interpolate(start, encoder, weight, output)
    reference_vectors.write_reference(output)
    encoder_manifest = manifests.load_if_ours(encoder) or {}
    lineage = dict(encoder_manifest.get("inputs", {}))
    for name, directory in (("encoder", encoder), ("start", start)):
        manifest = manifests.load_if_ours(directory)
        if manifest:
            lineage[name] = manifest["digest"]
    merge_facts = {"merge": {"weight": weight, **(facts or {})}}
    manifests.write(output, "encoder", encoder_manifest.get("facts", {}) | merge_facts, lineage)


def merge_best(config: EvaluationConfig, corpus: Path, encoder: Path, start: Path, output: Path) -> dict[str, Any]:
    """Write the merged encoder with the largest weight that loses little on the guard, see `choose_weight`.

    If the loss is too large at every weight, the smallest one is taken, and a warning is logged.

    Args:
        config: settings of the evaluation, with weights and guard.
        corpus: a prepared corpus, on whose held-out pairs each weight is measured for comparison.
        encoder: directory of the trained model.
        start: directory of the model that its training started from.
        output: receives the model in `encoder/`.

    Returns:
        The chosen weight, `passed` (1 if its loss is small enough, else 0), and the accuracies at this weight.
    """
    held_out: dict[str, AlignedSentences] = {}
    for language, pairs in draw_questions(corpus, encoder, config).pairs.items():
        held_out[language] = ([source for source, _ in pairs], [target for _, target in pairs])
    start_accuracies, start_answers = _measure(start, config, held_out)
    curve = [Point(0.0, **start_accuracies, guard_lower=0.0)]
    for weight in sorted(set(config.merge)):
        with tempfile.TemporaryDirectory(prefix="infoxlm-merge-") as folder:
            interpolate(start, encoder, weight, Path(folder, "encoder"))
            accuracies, answers = _measure(Path(folder, "encoder"), config, held_out)
        interval = paired_bootstrap(answers, start_answers)  # of the gain over the start
        curve.append(Point(weight, **accuracies, guard_lower=interval.lower))
        logger.info("weight %g: held out %.4f, guard %.4f", weight, accuracies["held_out"], accuracies["guard"])
    chosen, passed = choose_weight(curve[1:])
    if not passed:
        logger.warning("every weight of evaluation.merge loses too much: the smallest one, %g, is taken", chosen.weight)
    facts = {"passed": passed, "largest_loss": LARGEST_LOSS, "curve": [point._asdict() for point in curve]}
    merge(start, encoder, chosen.weight, output / "encoder", facts)
    return chosen._asdict() | {"passed": int(passed)}


def _measure(
    model: Path, config: EvaluationConfig, held_out: Mapping[str, AlignedSentences]
) -> tuple[dict[str, float], pd.Series]:
    """Return the accuracies of a model on the held-out pairs and the guard, and its score of each guard question."""
    assert config.guard  # noqa: S101 - EvaluationConfig requires a guard if `merge` has weights
    embedder = load_embedder(model, batch_size=config.batch_size, max_tokens=config.max_tokens)
    hits = guard.retrieve(held_out, embedder)
    held_out_scores = {language: score_directions(hits[language]) for language in held_out}
    guard_scores = guard.measure(config.guard, model, embedder)
    accuracies = {"held_out": mean_over(held_out_scores)["mean"], "guard": guard_scores.mean["mean"]}
    outcomes = evidence.Outcomes(guard_scores.outcomes, config.guard.pivot)
    return accuracies, outcomes.score_questions("guard/mean")


def choose_weight(curve: Sequence[Point]) -> tuple[Point, bool]:
    """Return the point with the largest weight that passes, or with the smallest weight if none passes.

    A point passes if the paired interval of the gain over the start on the guard lies above -`LARGEST_LOSS`, as in the
    promotion gate. The second value tells whether the returned point passes.
    """
    accepted = [point for point in curve if point.guard_lower > -LARGEST_LOSS]
    if accepted:
        return max(accepted, key=lambda point: point.weight), True
    return min(curve, key=lambda point: point.weight), False

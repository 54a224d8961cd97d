"""Retrieval among the held-out pairs of a prepared corpus: every layer, with both poolings, in both directions."""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

import pandas as pd
from torch import Tensor
from transformers import PreTrainedTokenizerBase as Tokenizer

from infoxlm_core.config import EvaluationConfig
from infoxlm_core.model.huggingface.any_encoder import describe, load_encoder, served_space
from infoxlm_core.tasks.embedding import POOLINGS, VectorSpec, embed
from infoxlm_core.tasks.questions import Questions, digest_question
from infoxlm_core.tasks.retrieval.nearest import Nearest, Vectors, mark_hits, search, share
from infoxlm_core.tasks.scores import Scores, mean_over

if TYPE_CHECKING:
    from infoxlm_core.model.huggingface.any_encoder import Model

logger = logging.getLogger(__name__)
Hits = Mapping[str, Tensor]  # direction -> (N,) bool, whether each question was answered correctly


class VectorScores(NamedTuple):
    """How often the translations are found with one vector."""

    hits: Mapping[str, Hits]  # by language
    languages: Mapping[str, dict[str, Any]]  # language -> the result of `score`
    mean: Mapping[str, Any]  # over languages


def measure(questions: Questions, directory: Path, config: EvaluationConfig) -> Scores:
    """Retrieve with the vectors of every layer; report those of the vector that users get.

    Details also have the scores of the vector that is best on these pairs, the mean at every layer, and the scores of
    the served vectors without their language's centre, which is the mean of training sentences (Libovický et al. 2020).
    """
    model, tokenizer = load_encoder(directory)
    layers = range(model.config.num_hidden_layers + 1)
    specs = [VectorSpec(pooling, layer) for pooling in POOLINGS for layer in layers]
    served_layer, served_pooling = served_space(model)
    served, centred = VectorSpec(served_pooling, served_layer), VectorSpec("centred", served_layer)
    sides = _embed(model, tokenizer, questions, specs, config)
    if questions.training_text:
        centres = find_centres(model, tokenizer, questions, served, config)
        sides = _subtract_centres(sides, served, centred, questions.pivot, centres)
        specs.append(centred)
    nearest = search(sides)
    results = {spec: _score_vector(spec, nearest, questions) for spec in specs}
    candidates = [spec for spec in specs if spec != centred]
    best = max(candidates, key=lambda spec: results[spec].mean["mean"])  # the first of equals
    logger.info("%s: retrieval %.4f (%s, layer %d)", directory, results[served].mean["mean"], *served)
    by_layer = {}
    for pooling in POOLINGS:
        by_layer[pooling] = [results[VectorSpec(pooling, layer)].mean["mean"] for layer in layers]
    details = {
        "served": served._asdict(),
        "best": {**best._asdict(), **results[best].mean, "languages": results[best].languages},
        "chance": fmean(1 / len(drawn) for drawn in questions.pairs.values()),
        "by_layer": by_layer,
        "encoder": describe(model),
    }
    reported = {"served": results[served].hits, "best": results[best].hits}
    if centred in results:
        details["centred"] = {**results[centred].mean, "languages": results[centred].languages}
        reported["centred"] = results[centred].hits
    return Scores(
        "retrieval",
        results[served].languages,
        results[served].mean,
        counts={language: len(drawn) for language, drawn in questions.pairs.items()},
        test_set=questions.digest,
        details=details,
        outcomes=tabulate(questions, reported),
    )


def _score_vector(
    spec: VectorSpec, nearest: Mapping[str, Mapping[VectorSpec, Nearest]], questions: Questions
) -> VectorScores:
    hits = {language: mark_hits(by_spec[spec]) for language, by_spec in nearest.items()}
    rows = {language: score(hits[language], questions.select_unshared(language)) for language in nearest}
    return VectorScores(hits, rows, mean_over(rows))


def _embed(
    model: "Model",
    tokenizer: Tokenizer,
    questions: Questions,
    specs: Sequence[VectorSpec],
    config: EvaluationConfig,
) -> Iterator[tuple[str, Vectors, Vectors]]:
    """Yield each language with the vectors of the pivot's sentences and those of their translations."""

    def embed_texts(texts: list[str], language: str) -> dict[VectorSpec, Tensor]:
        return embed(model, tokenizer, texts, specs, config.batch_size, config.max_tokens, language=language)

    distinct = list(dict.fromkeys(source for rows in questions.pairs.values() for source, _ in rows))
    row_of = {source: row for row, source in enumerate(distinct)}
    pivot = embed_texts(distinct, questions.pivot)  # once, because most sources are questions in several languages
    for language, rows in questions.pairs.items():
        source_rows = [row_of[source] for source, _ in rows]
        sources = {spec: vectors[source_rows] for spec, vectors in pivot.items()}
        yield language, sources, embed_texts([target for _, target in rows], language)


def find_centres(
    model: "Model", tokenizer: Tokenizer, questions: Questions, spec: VectorSpec, config: EvaluationConfig
) -> dict[str, Tensor]:
    """Return the mean vector of the training sentences of each language: (d,)."""
    centres = {}
    for language, texts in questions.training_text.items():
        vectors = embed(model, tokenizer, texts, [spec], config.batch_size, config.max_tokens, language=language)
        centres[language] = vectors[spec].mean(dim=0)
    return centres


def _subtract_centres(
    sides: Iterable[tuple[str, Vectors, Vectors]],
    spec: VectorSpec,
    centred: VectorSpec,
    pivot: str,
    centres: Mapping[str, Tensor],
) -> Iterator[tuple[str, Vectors, Vectors]]:
    """Add the vector `centred` to both sides: the vector `spec` minus the centre of the side's language."""
    for language, sources, targets in sides:
        centred_sources = {centred: sources[spec] - centres[pivot]}
        centred_targets = {centred: targets[spec] - centres[language]}
        yield language, {**sources, **centred_sources}, {**targets, **centred_targets}


def score(hits: Hits, subset: Tensor) -> dict[str, Any]:
    """Return the scores of one language: each direction, their mean, and the mean of the subset (`no_overlap`).

    Args:
        hits: direction -> (N,) bool.
        subset: (N,) bool, which questions belong to the subset. The candidates are always all N.
    """
    shares: dict[str, Any] = {direction: share(right) for direction, right in hits.items()}
    mean, no_overlap = fmean(shares.values()), None
    if subset.any():
        no_overlap = fmean(share(right[subset]) for right in hits.values())
    return {**shares, "mean": mean, "no_overlap": no_overlap}


def tabulate(questions: Questions, hits: Mapping[str, Mapping[str, Hits]]) -> pd.DataFrame:
    """Return a row for each question, direction and reported vector (`place`); see `results/evidence.py`.

    Args:
        questions: the questions of the evaluation.
        hits: place (`served`, `best`, `centred`) -> language -> direction -> (N,) bool.
    """
    tables = []
    for place, by_language in hits.items():
        for language, by_direction in by_language.items():
            ids = [digest_question(source) for source, _ in questions.pairs[language]]
            for direction, right in by_direction.items():
                columns: dict[str, Any] = {
                    "task": "retrieval",
                    "place": place,
                    "language": language,
                    "direction": direction,
                    "question": ids,
                    "unshared": questions.select_unshared(language).numpy(),
                    "right": right.numpy(),
                }
                tables.append(pd.DataFrame(columns))
    return pd.concat(tables, ignore_index=True)

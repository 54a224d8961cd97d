"""Measure retrieval on a prepared corpus's held-out pairs, at every layer and with both poolings."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import pandas as pd
from torch import Tensor

from infoxlm_core.config import EvaluationConfig
from infoxlm_core.model.huggingface.any_encoder import (
    describe,
    find_default_prefix,
    find_embedding_settings,
    load_encoder,
)
from infoxlm_core.tasks.embedding import POOLINGS, VectorEncoder, VectorSpec
from infoxlm_core.tasks.questions import Questions, digest_question, tabulate_outcomes
from infoxlm_core.tasks.retrieval import sentence_map
from infoxlm_core.tasks.retrieval.nearest import Hits, NearestRows, accuracy, find_nearest_by_spec, mark_hits
from infoxlm_core.tasks.retrieval.task import BOTH_DIRECTIONS
from infoxlm_core.tasks.scores import Scores, mean_over

logger = logging.getLogger(__name__)

NearestBySpec = Mapping[VectorSpec, NearestRows]
CENTRED = "centred"  # used as a pooling name: the served vector minus the mean vector of its language


class VectorScores(NamedTuple):
    """The retrieval results of one kind of vector."""

    nearest: Mapping[str, NearestRows]  # by language
    languages: Mapping[str, dict[str, Any]]  # results of `score_language` by language
    mean: Mapping[str, Any]  # means over languages

    @property
    def accuracy(self) -> float:
        """The mean accuracy over languages and both directions."""
        return self.mean[BOTH_DIRECTIONS]

    def to_dict(self) -> dict[str, Any]:
        """Return the means and the scores by language, for scores.json."""
        return {**self.mean, "languages": self.languages}


def measure(questions: Questions, directory: Path, config: EvaluationConfig) -> Scores:
    """Measure retrieval at every layer, and return the scores of the served vector, which `infoxlm embed` computes.

    The details contain the scores of the best vector on these pairs, the mean accuracy at every layer, and a map of the
    served vectors. If training text is available, the details also contain the scores of centred vectors: the served
    vectors minus the mean vector of training sentences in the same language (Libovický et al. 2020).
    """
    model, tokenizer = load_encoder(directory)
    num_layers = model.config.num_hidden_layers + 1  # 0 is the output of the embeddings
    specs = [VectorSpec(pooling, layer) for pooling in POOLINGS for layer in range(num_layers)]
    served_layer, served_pooling = find_embedding_settings(model)
    served = VectorSpec(served_pooling, served_layer)
    encoder = VectorEncoder(model, tokenizer, config.batch_size, config.max_tokens, find_default_prefix(model))
    nearest, map_vectors = _retrieve(questions, specs, served, encoder)
    results = {spec: _score_vector(spec, nearest, questions) for spec in specs}
    best = max(specs, key=lambda spec: results[spec].accuracy)  # ties go to the first spec
    logger.info("%s: retrieval %.4f (%s, layer %d)", directory, results[served].accuracy, *served)

    by_layer = {}
    for pooling in POOLINGS:
        by_layer[pooling] = [results[VectorSpec(pooling, layer)].accuracy for layer in range(num_layers)]
    details = {
        "served": served._asdict(),
        "best": best._asdict() | results[best].to_dict(),
        "chance": fmean(1 / len(pairs) for pairs in questions.pairs.values()),
        "by_layer": by_layer,
        "encoder": describe(model),
        "map": sentence_map.project(map_vectors),
    }
    nearest_by_vector = {"served": results[served].nearest, "best": results[best].nearest}
    if questions.training_text:  # then `_retrieve` also searched with centred vectors
        centred_result = _score_vector(VectorSpec(CENTRED, served_layer), nearest, questions)
        details["centred"] = centred_result.to_dict()
        nearest_by_vector["centred"] = centred_result.nearest
    return Scores(
        "retrieval",
        results[served].languages,
        results[served].mean,
        counts={language: len(pairs) for language, pairs in questions.pairs.items()},
        test_set=questions.digest,
        details=details,
        outcomes=tabulate(questions, nearest_by_vector),
    )


def _score_vector(spec: VectorSpec, nearest: Mapping[str, NearestBySpec], questions: Questions) -> VectorScores:
    """Score the search results of one kind of vector in every language."""
    nearest_of_vector = {language: nearest_by_spec[spec] for language, nearest_by_spec in nearest.items()}
    scores = {}
    for language, rows in nearest_of_vector.items():
        scores[language] = score_language(mark_hits(rows), questions.select_unshared(language))
    return VectorScores(nearest_of_vector, scores, mean_over(scores))


def _retrieve(
    questions: Questions, specs: Sequence[VectorSpec], served: VectorSpec, encoder: VectorEncoder
) -> tuple[dict[str, NearestBySpec], dict[str, Tensor]]:
    """Find the nearest sentences in every language with each kind of vector, and with centred vectors if possible.

    Also return each language's first served vectors, for the map in the report. All vectors would not fit into memory.
    """
    centres = {}  # mean vector (d,) of each language's training sentences
    for language, sentences in questions.training_text.items():
        centres[language] = encoder.embed(sentences, [served], language)[served].mean(dim=0)
    centred = VectorSpec(CENTRED, served.layer)

    # Most pivot sentences occur in the pairs of several languages, so each distinct sentence is embedded once.
    distinct_sources = list(dict.fromkeys(source for pairs in questions.pairs.values() for source, _ in pairs))
    row_of_source = {source: row for row, source in enumerate(distinct_sources)}
    pivot_vectors = encoder.embed(distinct_sources, specs, questions.pivot)

    nearest: dict[str, NearestBySpec] = {}
    map_vectors: dict[str, Tensor] = {}
    for language, pairs in questions.pairs.items():
        source_rows = [row_of_source[source] for source, _ in pairs]
        source_vectors = {spec: vectors[source_rows] for spec, vectors in pivot_vectors.items()}
        target_vectors = encoder.embed([target for _, target in pairs], specs, language)
        if centres:
            source_vectors[centred] = source_vectors[served] - centres[questions.pivot]
            target_vectors[centred] = target_vectors[served] - centres[language]
        nearest[language] = find_nearest_by_spec(source_vectors, target_vectors)
        sentence_map.add_vectors(map_vectors, questions.pivot, source_vectors[served])
        sentence_map.add_vectors(map_vectors, language, target_vectors[served])
    return nearest, map_vectors


def score_language(hits: Hits, is_unshared: Tensor) -> dict[str, Any]:
    """Return the accuracy in each direction, the mean of both directions, and the score `no_overlap`.

    The score `no_overlap` is the mean accuracy on the pairs in `is_unshared`, searched among all candidates. It is None
    if there are no such pairs.

    Args:
        hits: mapping from direction to a mask (N,) of the queries whose translation was found.
        is_unshared: mask (N,) of the pairs whose sentences have no token in common.
    """
    scores: dict[str, Any] = {direction: accuracy(is_hit) for direction, is_hit in hits.items()}
    scores[BOTH_DIRECTIONS] = fmean(scores.values())
    scores["no_overlap"] = None
    if is_unshared.any():
        scores["no_overlap"] = fmean(accuracy(is_hit[is_unshared]) for is_hit in hits.values())
    return scores


def tabulate(questions: Questions, nearest_by_vector: Mapping[str, Mapping[str, NearestRows]]) -> pd.DataFrame:
    """Tabulate the outcome of each question by direction and vector.

    The column `nearest` contains the row of the retrieved sentence. It is used for examples in reports, and not stored.
    The keys of `nearest_by_vector` are vector names (`served`, `best`, `centred`) and languages.
    """
    tables = []
    for vector_name, nearest_by_language in nearest_by_vector.items():
        for language, nearest in nearest_by_language.items():
            question_ids = [digest_question(source) for source, _ in questions.pairs[language]]
            is_unshared = questions.select_unshared(language).numpy()  # pairs without a common token
            for direction, is_hit in mark_hits(nearest).items():
                table = tabulate_outcomes(
                    "retrieval", language, question_ids, is_hit.numpy(), vector_name, direction, is_unshared
                )
                tables.append(table.assign(nearest=nearest[direction].numpy()))
    return pd.concat(tables, ignore_index=True)

"""Retrieval among the held-out pairs of a prepared corpus: every layer, with both poolings, in both directions."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import pandas as pd
from torch import Tensor
from transformers import PreTrainedTokenizerBase as Tokenizer

from infoxlm_core.config import EvaluationConfig
from infoxlm_core.model.huggingface.any_encoder import contrast_space, describe, load_encoder
from infoxlm_core.tasks.embedding import POOLINGS, VectorSpec, embed
from infoxlm_core.tasks.questions import Questions, digest_question
from infoxlm_core.tasks.retrieval.files import Pairs
from infoxlm_core.tasks.retrieval.nearest import Vectors, mark_hits, search, share
from infoxlm_core.tasks.scores import Scores, mean_over

if TYPE_CHECKING:
    from infoxlm_core.model.huggingface.any_encoder import Model

logger = logging.getLogger(__name__)
Shares = dict[str, dict[str, float | None]]  # direction -> {"all", "subset"} -> share; None for an empty subset


def measure(questions: Questions, directory: Path, config: EvaluationConfig) -> Scores:
    """Retrieve with the vectors of every layer; report those of the vector that is best on these pairs.

    Details have the scores at the contrast layer, which pre-training chose, and those of every layer.
    """
    model, tokenizer = load_encoder(directory)
    layers = range(model.config.num_hidden_layers + 1)
    specs = [VectorSpec(pooling, layer) for pooling in POOLINGS for layer in layers]
    nearest = search(_embed(model, tokenizer, questions.pairs, specs, config))
    hits = {spec: {language: mark_hits(by_spec[spec]) for language, by_spec in nearest.items()} for spec in specs}
    shares = {spec: score_languages(by_language, questions.unshared) for spec, by_language in hits.items()}
    rows = {spec: {language: summarise(cell) for language, cell in shares[spec].items()} for spec in specs}
    means = {spec: mean_over(rows[spec]) for spec in specs}

    best = max(specs, key=lambda spec: means[spec]["mean"])  # the first of equals
    space = contrast_space(model)
    contrast = VectorSpec(space[1], space[0]) if space else None
    logger.info("%s: retrieval %.4f (%s, layer %d)", directory, means[best]["mean"], *best)
    by_layer: dict[str, list[float]] = {}
    cells: dict[str, dict[str, Any]] = {}
    for pooling in POOLINGS:
        at_layers = [VectorSpec(pooling, layer) for layer in layers]
        by_layer[pooling] = [means[spec]["mean"] for spec in at_layers]
        cells[pooling] = {language: transpose([shares[spec][language] for spec in at_layers]) for language in nearest}
    at_contrast = contrast and {**contrast._asdict(), **means[contrast], "languages": rows[contrast]}
    details = {
        "best": best._asdict(),
        "contrast": at_contrast,
        "chance": fmean(1 / len(drawn) for drawn in questions.pairs.values()),
        "by_layer": by_layer,
        "cells": cells,
        "encoder": describe(model),
    }
    counts = {language: len(drawn) for language, drawn in questions.pairs.items()}
    reported = {"best": hits[best]} | ({"contrast": hits[contrast]} if contrast else {})
    outcomes = tabulate(questions, reported)
    return Scores("retrieval", rows[best], means[best], counts, questions.digest, details=details, outcomes=outcomes)


def _embed(
    model: "Model",
    tokenizer: Tokenizer,
    pairs: Mapping[str, Pairs],
    specs: Sequence[VectorSpec],
    config: EvaluationConfig,
) -> Iterator[tuple[str, Vectors, Vectors]]:
    def embed_texts(texts: list[str]) -> dict[VectorSpec, Tensor]:
        return embed(model, tokenizer, texts, specs, config.batch_size, config.max_tokens)

    distinct = list(dict.fromkeys(source for rows in pairs.values() for source, _ in rows))
    row_of = {source: row for row, source in enumerate(distinct)}
    pivot = embed_texts(distinct)  # once, because most sources are asked in several languages
    for language, rows in pairs.items():
        sources = [row_of[source] for source, _ in rows]
        yield language, {spec: vectors[sources] for spec, vectors in pivot.items()}, embed_texts([t for _, t in rows])


def score_languages(hits: Mapping[str, Mapping[str, Tensor]], subsets: Mapping[str, Tensor]) -> dict[str, Shares]:
    """Return the shares of hits of every language and direction: of all questions, and of a subset.

    Args:
        hits: language -> direction -> (N,) bool.
        subsets: language -> (N,) bool, which questions belong to the subset. The candidates are always all N.
    """
    shares: dict[str, Shares] = {}
    for language, by_direction in hits.items():
        subset = subsets[language]
        shares[language] = {
            direction: {"all": share(right), "subset": share(right[subset]) if subset.any() else None}
            for direction, right in by_direction.items()
        }
    return shares


def summarise(shares: Shares) -> dict[str, Any]:
    """Return the scores of one language: its directions, their mean, and the mean of the subset (`no_overlap`)."""
    row: dict[str, Any] = {direction: cell["all"] for direction, cell in shares.items()}
    subset = [cell["subset"] for cell in shares.values() if cell["subset"] is not None]
    return {**row, "mean": fmean(row.values()), "no_overlap": fmean(subset) if subset else None}


def transpose(by_layer: Sequence[Shares]) -> dict[str, dict[str, list[float | None]]]:
    """Turn the shares of each layer into lists over layers: direction -> {"all", "subset"} -> list."""
    first = by_layer[0]
    return {
        direction: {part: [shares[direction][part] for shares in by_layer] for part in first[direction]}
        for direction in first
    }


def tabulate(questions: Questions, hits: Mapping[str, Mapping[str, Mapping[str, Tensor]]]) -> pd.DataFrame:
    """Return a row for each question, direction and reported vector (`place`); see `results/evidence.py`.

    Args:
        questions: the questions of the evaluation.
        hits: `best` or `contrast` -> language -> direction -> (N,) bool.
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
                }
                columns |= {"question": ids, "unshared": questions.unshared[language].numpy(), "right": right.numpy()}
                tables.append(pd.DataFrame(columns))
    return pd.concat(tables, ignore_index=True)

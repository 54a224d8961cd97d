"""Stage: models and held-out text -> scores, tables, figures, a model card.

The first encoder is the one under test; the others (an untrained one, a baseline) are floors to compare it with.
Every model answers the same questions: the same pairs, and, with the same tokenizer, the same gaps.
"""

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pandas as pd
from torch import Tensor

from infoxlm_core import manifests
from infoxlm_core.config import EvaluationConfig
from infoxlm_core.errors import InputError
from infoxlm_core.model.any_encoder import Model, Tokenizer, contrast_space, describe, load_encoder
from infoxlm_core.results import evaluation_page, evidence
from infoxlm_core.results.evaluation import Evaluated, Evaluation
from infoxlm_core.tasks import classifying, nearest, perplexity
from infoxlm_core.tasks.aligned_files import read_held_out
from infoxlm_core.tasks.embedding import POOLINGS, Place, embed
from infoxlm_core.tasks.task import Scores
from infoxlm_core.training import tracker

logger = logging.getLogger(__name__)

Pairs = list[tuple[str, str]]
CURVE_POINTS = 400


def evaluate(
    config: EvaluationConfig,
    corpus: Path,
    encoders: Mapping[str, Path],
    classifiers: Mapping[str, Path],
    output: Path,
) -> dict[str, float]:
    """Score models and write scores.json, items.parquet, report.html, figures/ and model_card.md.

    Args:
        config: what is measured, and how.
        corpus: a prepared corpus with held_out/<pivot>-<language>/*.parquet; its report.json is shown if there is one.
        encoders: Hugging Face directories by name, the model under test first.
        classifiers: directories of fine-tuned classifiers, each with its test.parquet, by the same names; or none.
        output: gets these files.

    Returns:
        one flat mapping of metrics such as "retrieval/best" (shares from 0 to 1); a floor's carry its name in front.

    Raises:
        InputError: no held-out pairs, no model where one should be, or a test set that does not fit its classifier.
    """
    corpus = Path(corpus)
    if not encoders:
        raise InputError("no encoder to evaluate: give at least one model directory")
    pivot, held_out = read_held_out(corpus)
    pairs = {language: draw_pairs(rows, config) for language, rows in held_out.items()}
    sentences = draw_sentences(pivot, held_out, config)

    test_set = manifests.digest([pairs, sentences])

    models: dict[str, Evaluated] = {}
    answered: dict[str, list[pd.DataFrame]] = {}
    unshared: dict[str, Tensor] = {}
    for name, directory in encoders.items():
        model, tokenizer = load_encoder(directory)
        # The tokenizer of the model under test decides once for all models which pairs share no token.
        unshared = unshared or {language: find_unshared(tokenizer, rows, config) for language, rows in pairs.items()}
        retrieved, hits = score_retrieval(model, tokenizer, pairs, unshared, config, test_set)
        answered[name] = [evidence.of_retrieval(pairs, hits, unshared)]
        tasks = {"retrieval": retrieved}
        if perplexities := score_perplexity(model, tokenizer, sentences, config, test_set):
            tasks["perplexity"] = perplexities
        models[name] = Evaluated(describe(model), tasks, read_curves(Path(directory)))
        best = retrieved.details["best"]
        logger.info("%s: retrieval %.4f (%s, layer %d)", name, retrieved.mean["mean"], best["pooling"], best["layer"])
    for name, directory in classifiers.items():
        labelled, rows = score_classifier(Path(directory), pivot, config)
        known = models.get(name, Evaluated())
        models[name] = replace(known, tasks={**known.tasks, "classification": labelled})
        answered.setdefault(name, []).append(evidence.of_classification(rows))

    report = corpus / "report.json"
    found = Evaluation(
        model=next(iter(encoders)),
        pivot=pivot,
        test_set=test_set,
        pairs={
            language: {
                "held_out": len(held_out[language]),
                "drawn": len(rows),
                "no_overlap": int(unshared[language].sum()),
            }
            for language, rows in pairs.items()
        },
        models=models,
        corpus=json.loads(report.read_bytes()) if report.is_file() else None,
        settings=config.model_dump(),
    )
    evaluation_page.write(Path(output), found)
    evidence.write(Path(output) / evidence.FILE, answered)
    return found.flatten()


def draw_pairs(rows: Pairs, config: EvaluationConfig) -> Pairs:
    """Draw pairs of which no two share a side: otherwise the right answer would not be the only one.

    A pivot sentence has the same rank in all languages, so that they are asked the same questions as far as they can.
    """
    drawn: Pairs = []
    seen: set[tuple[int, str]] = set()
    for source, target in sorted(rows, key=lambda pair: _rank(config.seed, pair[0])):
        sides = {(0, source.casefold()), (1, target.casefold())}
        if not sides & seen:
            seen |= sides
            drawn.append((source, target))
        if len(drawn) == config.retrieval_pairs:
            break
    return drawn


def draw_sentences(pivot: str, held_out: dict[str, Pairs], config: EvaluationConfig) -> dict[str, list[str]]:
    """Draw distinct held-out sentences of every language, the pivot first."""
    by_language = {pivot: [source for rows in held_out.values() for source, _ in rows]}
    by_language |= {language: [target for _, target in rows] for language, rows in held_out.items()}
    return {
        language: sorted(set(sentences), key=lambda text: _rank(config.seed, text))[: config.perplexity_sentences]
        for language, sentences in by_language.items()
    }


def _rank(seed: int, text: str) -> bytes:
    """Place of a text in a random order that depends on nothing but seed and text."""
    return hashlib.sha256(f"{seed}/{text}".encode()).digest()


def find_unshared(tokenizer: Tokenizer, rows: Pairs, config: EvaluationConfig) -> Tensor:
    """Which pairs share no token: (N,) bool."""
    options: dict[str, Any] = {"add_special_tokens": False, "truncation": True, "max_length": config.max_tokens}
    sources, targets = (tokenizer(list(side), **options)["input_ids"] for side in zip(*rows, strict=True))
    return nearest.shares_no_token(sources, targets)


def score_retrieval(
    model: Model,
    tokenizer: Tokenizer,
    pairs: dict[str, Pairs],
    unshared: dict[str, Tensor],
    config: EvaluationConfig,
    test_set: str,
) -> tuple[Scores, dict[str, Any]]:
    """Retrieve at every layer with both poolings; sum up at the best one and at the contrast layer.

    Returns:
        the scores, and which queries found their translation: "best" | "contrast" -> language -> direction -> (N,).
    """
    cells: dict[str, dict[str, Any]] = {pooling: {} for pooling in POOLINGS}
    hits: dict[str, dict[str, Any]] = {pooling: {} for pooling in POOLINGS}
    layers = range(model.config.num_hidden_layers + 1)
    places = [Place(pooling, layer) for pooling in POOLINGS for layer in layers]

    def vectors(texts: list[str]) -> dict[Place, Tensor]:
        return embed(model, tokenizer, texts, places, config.batch_size, config.max_tokens)

    distinct = {source: None for rows in pairs.values() for source, _ in rows}  # most are asked in many languages
    number = {source: row for row, source in enumerate(distinct)}
    pivot = vectors(list(distinct))
    for language, rows in pairs.items():
        targets = vectors([target for _, target in rows])
        sources = [number[source] for source, _ in rows]
        for pooling in POOLINGS:
            own = [place for place in places if place.pooling == pooling]
            hits[pooling][language] = nearest.find_hits(
                [pivot[place][sources] for place in own], [targets[place] for place in own]
            )
            cells[pooling][language] = nearest.score_layers(hits[pooling][language], unshared[language])
        logger.info("retrieved %d pairs of %s", len(rows), language)
    by_layer = {pooling: [nearest.summarise(cells[pooling], layer)["mean"] for layer in layers] for pooling in POOLINGS}
    best = max(places, key=lambda place: by_layer[place.pooling][place.layer])  # the first of equals
    spaces = {"best": (best.layer, best.pooling), "contrast": contrast_space(model)}
    found: dict[str, Any] = {
        name: {"layer": space[0], "pooling": space[1], **nearest.summarise(cells[space[1]], space[0])}
        if space
        else None
        for name, space in spaces.items()
    }
    at = {
        name: {
            language: {direction: found[space[0]] for direction, found in directions.items()}
            for language, directions in hits[space[1]].items()
        }
        for name, space in spaces.items()
        if space
    }
    details = {
        "best": {name: found["best"][name] for name in ("layer", "pooling")},
        "contrast": found["contrast"],
        "chance": fmean(1 / len(rows) for rows in pairs.values()),
        "by_layer": by_layer,
        "cells": cells,
    }
    mean = {name: found["best"][name] for name in ("mean", "to_pivot", "from_pivot", "no_overlap")}
    counts = {language: len(rows) for language, rows in pairs.items()}
    return Scores("retrieval", found["best"]["languages"], mean, counts, test_set, details=details), at


def score_perplexity(
    model: Model, tokenizer: Tokenizer, sentences: dict[str, list[str]], config: EvaluationConfig, test_set: str
) -> Scores | None:
    """Perplexity of every language and their mean; None for an encoder without a language-model head."""
    if model.get_output_embeddings() is None or tokenizer.mask_token_id is None:
        return None
    languages = {
        language: perplexity.measure(model, tokenizer, texts, config.batch_size, config.max_tokens, config.seed)
        for language, texts in sentences.items()
    }
    counts = {language: len(texts) for language, texts in sentences.items()}
    cells = {language: {"perplexity": value} for language, value in languages.items()}
    return Scores("perplexity", cells, {"perplexity": fmean(languages.values())}, counts, test_set)


def score_classifier(directory: Path, pivot: str, config: EvaluationConfig) -> tuple[Scores, pd.DataFrame]:
    """Accuracy by language on a classifier's own test set, and its rows with what was predicted."""
    found, rows = classifying.score(directory, pivot, config.batch_size, config.max_tokens)
    gap = None if found["transfer_gap"] is None else {"accuracy": found["transfer_gap"]}
    cells = {language: {"accuracy": value} for language, value in found["languages"].items()}
    counts = {str(language): int(number) for language, number in rows["language"].value_counts().items()}
    details = {name: found[name] for name in ("majority", "rows", "labels")}
    digest = manifests.digest(rows.drop(columns="predicted").to_dict("list"))
    return Scores("classification", cells, {"accuracy": found["mean"]}, counts, digest, gap, details=details), rows


def read_curves(directory: Path) -> dict[str, list[Sequence[float]]]:
    """Training curves beside an encoder: (step, value) points by metric, thinned to what a figure can show."""
    path = directory / "metrics.jsonl"
    curves: dict[str, list[Sequence[float]]] = {}
    for step, values in tracker.read(path) if path.is_file() else ():
        for name, value in values.items():
            if name.startswith("loss/") or name in ("xlco/accuracy", "probe/retrieval"):  # not those by language
                curves.setdefault(name, []).append((step, value))
    return {name: points[:: -(-len(points) // CURVE_POINTS)] for name, points in curves.items()}

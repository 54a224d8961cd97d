"""Task of an evaluation: find translations among the held-out pairs of a prepared corpus, at every layer."""

import hashlib
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase as Tokenizer

from infoxlm_core import manifests
from infoxlm_core.config import EvaluationConfig
from infoxlm_core.model.huggingface import tokenizers
from infoxlm_core.model.huggingface.any_encoder import contrast_space, describe, load_encoder
from infoxlm_core.tasks import outcomes
from infoxlm_core.tasks.embedding import POOLINGS, Place, embed
from infoxlm_core.tasks.retrieval import nearest
from infoxlm_core.tasks.retrieval.files import read_held_out
from infoxlm_core.tasks.task import Scores, Task, finite, mean_over

if TYPE_CHECKING:
    from infoxlm_core.model.huggingface.any_encoder import Model

logger = logging.getLogger(__name__)

Pairs = list[tuple[str, str]]


class HeldOutConfig(EvaluationConfig):
    """What the tasks of an evaluation are told: how to ask, and what the stage knows of its inputs."""

    data: str
    """The prepared corpus."""

    pivot: str
    """The language that all others are aligned with."""

    reference: str
    """The model under test: its tokenizer decides once for all models which pairs share no token."""


class Questions(NamedTuple):
    """What every model is asked."""

    pivot: str
    counts: dict[str, int]  # language -> held-out pairs, of which `pairs` were drawn
    pairs: dict[str, Pairs]
    sentences: dict[str, list[str]]

    @property
    def digest(self) -> str:
        """Known by what is asked."""
        return manifests.digest([self.pairs, self.sentences])


def draw(corpus: Path, config: EvaluationConfig) -> Questions:
    """Draw pairs for retrieval and sentences for perplexity; InputError if the corpus has no held-out pairs."""
    pivot, held_out = read_held_out(corpus)
    pairs = {language: draw_pairs(rows, config) for language, rows in held_out.items()}
    counts = {language: len(rows) for language, rows in held_out.items()}
    return Questions(pivot, counts, pairs, draw_sentences(pivot, held_out, config))


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


def find_unshared(settings: HeldOutConfig, pairs: Mapping[str, Pairs]) -> dict[str, Tensor]:
    """Of each language which pairs share no token: (N,) bool."""
    tokenizer = tokenizers.load(Path(settings.reference))
    options: dict[str, Any] = {"add_special_tokens": False, "truncation": True, "max_length": settings.max_tokens}
    unshared = {}
    for language, rows in pairs.items():
        sources, targets = (tokenizer(list(side), **options)["input_ids"] for side in zip(*rows, strict=True))
        unshared[language] = nearest.shares_no_token(sources, targets)
    return unshared


class HeldOut(Task[HeldOutConfig]):
    """Each held-out sentence looks for its translation among all that were drawn of the other language."""

    name: ClassVar[str] = "retrieval"
    settings = HeldOutConfig
    metrics: ClassVar[tuple[str, ...]] = ("mean", "to_pivot", "from_pivot", "no_overlap")
    unit: ClassVar[str] = "pairs"

    def measure(self, settings: HeldOutConfig, model: Path, output: Path) -> Scores:  # noqa: ARG002 - no predictions
        """Retrieve at every layer with both poolings; sum up at the best one and at the contrast layer."""
        asked = draw(Path(settings.data), settings)
        encoder, tokenizer = load_encoder(model)
        unshared = find_unshared(settings, asked.pairs)
        layers = range(encoder.config.num_hidden_layers + 1)
        places = [Place(pooling, layer) for pooling in POOLINGS for layer in layers]
        found = nearest.search(_embed(encoder, tokenizer, asked.pairs, places, settings))
        right = {
            place: {
                code: {way: rows == torch.arange(len(rows)) for way, rows in cells[place].items()}
                for code, cells in found.items()
            }
            for place in places
        }
        shares = {place: {code: score(ways, unshared[code]) for code, ways in right[place].items()} for place in places}
        rows = {place: {code: sum_up(cell) for code, cell in shares[place].items()} for place in places}
        means = {place: mean_over(rows[place]) for place in places}

        best = max(places, key=lambda place: means[place]["mean"])  # the first of equals
        space = contrast_space(encoder)
        fixed = Place(space[1], space[0]) if space else None
        logger.info("%s: retrieval %.4f (%s, layer %d)", model, means[best]["mean"], *best)
        details = {
            "best": {"layer": best.layer, "pooling": best.pooling},
            "contrast": {"layer": fixed.layer, "pooling": fixed.pooling, **means[fixed], "languages": rows[fixed]}
            if fixed
            else None,
            "chance": fmean(1 / len(drawn) for drawn in asked.pairs.values()),
            "by_layer": {pooling: [means[Place(pooling, layer)]["mean"] for layer in layers] for pooling in POOLINGS},
            "cells": {
                pooling: {code: _trace([shares[Place(pooling, layer)][code] for layer in layers]) for code in found}
                for pooling in POOLINGS
            },
            "encoder": describe(encoder),
        }
        counts = {code: len(drawn) for code, drawn in asked.pairs.items()}
        read_at = {"best": right[best]} | ({"contrast": right[fixed]} if fixed else {})
        table = outcomes.of_retrieval(asked.pairs, read_at, unshared)
        return Scores(self.name, rows[best], means[best], counts, asked.digest, details=details, outcomes=table)

    def name_metrics(self, scores: Scores, settings: HeldOutConfig, prefix: str) -> dict[str, float]:
        """`PREFIX/best` and its layer, `PREFIX/contrast`, `PREFIX/xx_en`, `PREFIX/en_xx`, `PREFIX/de`."""
        mean, details, pivot = scores.mean, scores.details, settings.pivot
        flat = {"best": mean["mean"], "best_layer": details["best"]["layer"], "chance": details["chance"]}
        flat |= {f"xx_{pivot}": mean["to_pivot"], f"{pivot}_xx": mean["from_pivot"], "no_overlap": mean["no_overlap"]}
        flat |= {"contrast": (details["contrast"] or {}).get("mean")}
        flat |= {code: row["mean"] for code, row in scores.languages.items()}
        return finite({f"{prefix}/{name}": value for name, value in flat.items()})


def _embed(
    model: "Model", tokenizer: Tokenizer, pairs: Mapping[str, Pairs], places: list[Place], settings: HeldOutConfig
) -> Iterator[tuple[str, nearest.Vectors, nearest.Vectors]]:
    def vectors(texts: list[str]) -> dict[Place, Tensor]:
        return embed(model, tokenizer, texts, places, settings.batch_size, settings.max_tokens)

    distinct = {source: None for rows in pairs.values() for source, _ in rows}  # most are asked in many languages
    number = {source: row for row, source in enumerate(distinct)}
    pivot = vectors(list(distinct))
    for language, rows in pairs.items():
        sources = [number[source] for source, _ in rows]
        own = {place: every[sources] for place, every in pivot.items()}
        yield language, own, vectors([target for _, target in rows])


def score(right: Mapping[str, Tensor], subset: Tensor) -> dict[str, dict[str, float | None]]:
    """Direction -> (N,) bool, what was right: direction -> {"all" | "subset": share}; None where the subset is empty.

    The subset, (N,) bool, are queries that are scored once more on their own; candidates were always all N.
    """
    return {
        direction: {
            "all": answers.double().mean().item(),
            "subset": answers[subset].double().mean().item() if subset.any() else None,
        }
        for direction, answers in right.items()
    }


def sum_up(cell: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """One language: its directions, their mean, and the mean on pairs that share no token."""
    row = {direction: part["all"] for direction, part in cell.items()}
    subset = [part["subset"] for part in cell.values()]
    return {**row, "mean": fmean(row.values()), "no_overlap": None if None in subset else fmean(subset)}


def _trace(cells: list[dict[str, dict[str, float | None]]]) -> dict[str, dict[str, list[float | None]]]:
    """Shares by layer -> direction -> part -> share of each layer."""
    first = cells[0]
    return {
        direction: {part: [cell[direction][part] for cell in cells] for part in parts}
        for direction, parts in first.items()
    }

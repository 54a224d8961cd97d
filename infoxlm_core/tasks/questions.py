"""Draw the questions of an evaluation from the held-out pairs of a prepared corpus, equal for all models."""

import hashlib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase as Tokenizer

from infoxlm_core import manifests
from infoxlm_core.config import EvaluationConfig
from infoxlm_core.corpora import tables
from infoxlm_core.model.huggingface import tokenizers
from infoxlm_core.tasks.retrieval.files import Pairs, read_held_out
from infoxlm_core.tasks.retrieval.task import FEWEST_UNSHARED

CENTRE_SENTENCES = 500
"""Training sentences whose mean vector is the centre of a language; 4,000 gave the same accuracy as 250."""


@dataclass(frozen=True)
class Questions:
    """Pairs for retrieval and sentences for perplexity, by language."""

    pivot: str  # the language of the first sentence of every pair
    counts: Mapping[str, int]  # language -> number of held-out pairs, from which `pairs` were drawn
    pairs: Mapping[str, Pairs]
    sentences: Mapping[str, list[str]]  # the pivot's first
    unshared: Mapping[str, Tensor]  # (N,) bool: whether a pair's sentences share no token of the model under test
    training_text: Mapping[str, list[str]] = field(default_factory=dict)  # sentences of each language; empty if unknown

    def select_unshared(self, language: str) -> Tensor:
        """Return which pairs of a language count for the score `no_overlap`, (N,) bool. If there are few, none does."""
        unshared = self.unshared[language]
        if unshared.sum() < FEWEST_UNSHARED:
            return torch.zeros_like(unshared)
        return unshared

    @cached_property
    def digest(self) -> str:
        """Identifies the questions, so that only scores on equal questions are compared."""
        return manifests.digest([self.pairs, self.sentences])


def draw_questions(corpus: Path, model: Path, config: EvaluationConfig) -> Questions:
    """Draw pairs for retrieval and sentences for perplexity.

    Args:
        corpus: a prepared corpus.
        model: directory of the model under test. Its tokenizer decides for all models which pairs share a token.
        config: how many to draw, with which seed.

    Raises:
        InputError: the corpus has no held-out pairs.
    """
    pivot, held_out = read_held_out(corpus)
    pairs = {language: draw_pairs(rows, config) for language, rows in held_out.items()}
    tokenizer = tokenizers.load(model)
    unshared = {language: mark_unshared(tokenizer, drawn, config.max_tokens) for language, drawn in pairs.items()}
    counts = {language: len(rows) for language, rows in held_out.items()}
    sentences = draw_sentences(pivot, held_out, config)
    training_text = draw_training_text(corpus, sentences, config.seed)
    return Questions(pivot, counts, pairs, sentences, unshared, training_text)


def draw_pairs(rows: Pairs, config: EvaluationConfig) -> Pairs:
    """Draw pairs of which no two have a sentence in common, so that every question has one right answer.

    The order of pivot sentences is the same in all languages, so that languages share as many questions as possible.
    """
    drawn: Pairs = []
    drawn_sources: set[str] = set()
    drawn_targets: set[str] = set()
    for source, target in sorted(rows, key=lambda pair: _make_sort_key(config.seed, pair[0])):
        source_key = source.casefold()
        target_key = target.casefold()
        if source_key not in drawn_sources and target_key not in drawn_targets:
            drawn_sources.add(source_key)
            drawn_targets.add(target_key)
            drawn.append((source, target))
        if len(drawn) == config.retrieval_pairs:
            break
    return drawn


def draw_sentences(pivot: str, held_out: Mapping[str, Pairs], config: EvaluationConfig) -> dict[str, list[str]]:
    """Draw distinct held-out sentences of every language, the pivot first."""
    sentences_by_language: dict[str, set[str]] = {pivot: set()}
    for language, pairs in held_out.items():
        sentences_by_language[pivot].update(source for source, _ in pairs)
        sentences_by_language[language] = {target for _, target in pairs}
    drawn = {}
    for language, sentences in sentences_by_language.items():
        shuffled = sorted(sentences, key=lambda text: _make_sort_key(config.seed, text))
        drawn[language] = shuffled[: config.perplexity_sentences]
    return drawn


def draw_training_text(corpus: Path, languages: Iterable[str], seed: int) -> dict[str, list[str]]:
    """Draw up to `CENTRE_SENTENCES` training sentences of each language, or none if a language has no training text.

    Their mean vector is the centre of the language.
    """
    drawn: dict[str, list[str]] = {}
    for language in languages:
        columns = [(path, "text") for path in sorted(corpus.glob(f"mono/{language}/*.parquet"))]
        columns += [(path, "source") for path in sorted(corpus.glob(f"pairs/{language}-*/*.parquet"))]
        columns += [(path, "target") for path in sorted(corpus.glob(f"pairs/*-{language}/*.parquet"))]
        texts: set[str] = set()
        for path, column in columns:
            # The first rows of each file suffice, so that the time does not grow with the corpus.
            first_rows = itertools.islice(tables.read_text_columns(path, (column,)), CENTRE_SENTENCES)
            texts.update(text for (text,) in first_rows if text)
        if not texts:
            return {}
        drawn[language] = sorted(texts, key=lambda text: _make_sort_key(seed, text))[:CENTRE_SENTENCES]
    return drawn


def _make_sort_key(seed: int, text: str) -> bytes:
    """Return the sort key of a text in a random order that depends only on seed and text."""
    return hashlib.sha256(f"{seed}/{text}".encode()).digest()


def mark_unshared(tokenizer: Tokenizer, pairs: Pairs, max_tokens: int) -> Tensor:
    """Return which of N pairs have sentences without a common token, (N,) bool.

    Such pairs cannot be found by names, numbers or placeholders that a translation copies. Only tokens with a letter or
    digit count, because nearly all pairs share punctuation and spaces.
    """
    options: dict[str, Any] = {"add_special_tokens": False, "truncation": True, "max_length": max_tokens}
    source_ids = tokenizer([source for source, _ in pairs], **options)["input_ids"]
    target_ids = tokenizer([target for _, target in pairs], **options)["input_ids"]
    token_ids = set(itertools.chain(*source_ids, *target_ids))
    word_ids = set()
    for token_id in token_ids:
        if any(character.isalnum() for character in str(tokenizer.decode([token_id]))):
            word_ids.add(token_id)
    is_unshared = []
    for source, target in zip(source_ids, target_ids, strict=True):
        shared_ids = set(source) & set(target)
        is_unshared.append(word_ids.isdisjoint(shared_ids))
    return torch.tensor(is_unshared)


def tabulate_outcomes(
    task: str,
    language: Any,
    question_ids: Sequence[str],
    is_right: Any,
    vector: str = "",
    direction: str = "",
    unshared: Any = False,
) -> pd.DataFrame:
    """Return a table with a row for each question. `results/evidence.py` describes its columns and reads it.

    `language`, `is_right` and `unshared` are one value for all questions, or an array with one for each.
    """
    return pd.DataFrame(
        {
            "task": task,
            "place": vector,
            "language": language,
            "direction": direction,
            "question": question_ids,
            "unshared": unshared,
            "right": is_right,
        }
    )


def digest_question(text: str) -> str:
    """Return the id of a question in the table of outcomes: a digest, because the text may be confidential."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]

"""Draw an evaluation's questions from a prepared corpus's held-out pairs. All models get the same questions."""

import hashlib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from numpy.typing import ArrayLike
from torch import Tensor
from transformers import PreTrainedTokenizerBase as Tokenizer

from infoxlm_core import manifests
from infoxlm_core.config import EvaluationConfig
from infoxlm_core.corpora import tables
from infoxlm_core.model.huggingface import tokenizers
from infoxlm_core.tasks.retrieval.files import Pairs, read_held_out
from infoxlm_core.tasks.retrieval.task import FEWEST_UNSHARED

CENTRE_SENTENCES = 500
"""Number of training sentences whose mean vector is a language's centre. 4,000 and 250 gave the same accuracy."""


@dataclass(frozen=True)
class Questions:
    """Retrieval pairs and perplexity sentences by language."""

    pivot: str  # language of the first sentence of every pair
    counts: Mapping[str, int]  # number of held-out pairs by language, before drawing
    pairs: Mapping[str, Pairs]
    sentences: Mapping[str, list[str]]  # in the order of languages, the pivot first
    unshared: Mapping[str, Tensor]  # masks (N,) of the pairs without a common token
    training_text: Mapping[str, list[str]] = field(default_factory=dict)  # training sentences; empty if unknown

    def select_unshared(self, language: str) -> Tensor:
        """Return a mask (N,) of the language's pairs that count for the score `no_overlap`.

        The pairs without a common token count, unless there are fewer than `FEWEST_UNSHARED`.
        """
        is_unshared = self.unshared[language]
        if is_unshared.sum() < FEWEST_UNSHARED:
            return torch.zeros_like(is_unshared)
        return is_unshared

    @cached_property
    def digest(self) -> str:
        """The digest of the questions. Only scores with equal digests are comparable."""
        return manifests.digest([self.pairs, self.sentences])


def draw_questions(corpus: Path, model: Path, config: EvaluationConfig) -> Questions:
    """Draw retrieval pairs and perplexity sentences from a prepared corpus's held-out pairs.

    Args:
        corpus: directory of the prepared corpus.
        model: directory of the model under test; its tokenizer determines for all models which pairs share a token.
        config: the numbers to draw and the seed.

    Raises:
        InputError: the corpus has no held-out pairs.
    """
    pivot, held_out = read_held_out(corpus)
    tokenizer = tokenizers.load(model)
    counts = {}
    pairs = {}
    unshared = {}
    for language, held_out_pairs in held_out.items():
        counts[language] = len(held_out_pairs)
        pairs[language] = draw_pairs(held_out_pairs, config)
        unshared[language] = mark_unshared(tokenizer, pairs[language], config.max_tokens)
    sentences = draw_sentences(pivot, held_out, config)
    training_text = draw_training_text(corpus, sentences, config.seed)
    return Questions(pivot, counts, pairs, sentences, unshared, training_text)


def draw_pairs(pairs: Pairs, config: EvaluationConfig) -> Pairs:
    """Draw pairs without repeated sentences (ignoring case), so that every question has one right answer.

    All languages use the same random order of the sources (the pivot sentences), and therefore share most questions.
    """
    drawn: Pairs = []
    drawn_sources: set[str] = set()
    drawn_targets: set[str] = set()
    for source, target in sorted(pairs, key=lambda pair: _hash_with_seed(config.seed, pair[0])):
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
    """Draw distinct held-out sentences in every language, the pivot first."""
    sentences_by_language: dict[str, set[str]] = {pivot: set()}
    for language, pairs in held_out.items():
        sentences_by_language[pivot].update(source for source, _ in pairs)
        sentences_by_language[language] = {target for _, target in pairs}
    drawn = {}
    for language, sentences in sentences_by_language.items():
        shuffled = sorted(sentences, key=lambda text: _hash_with_seed(config.seed, text))
        drawn[language] = shuffled[: config.perplexity_sentences]
    return drawn


def draw_training_text(corpus: Path, languages: Iterable[str], seed: int) -> dict[str, list[str]]:
    """Draw up to `CENTRE_SENTENCES` training sentences per language.

    Their mean vector is later subtracted from the language's vectors (centring). Centred and other vectors cannot be
    compared, so return an empty mapping if a language has no training text.
    """
    drawn: dict[str, list[str]] = {}
    for language in languages:
        columns = [(path, "text") for path in sorted(corpus.glob(f"mono/{language}/*.parquet"))]
        columns += [(path, "source") for path in sorted(corpus.glob(f"pairs/{language}-*/*.parquet"))]
        columns += [(path, "target") for path in sorted(corpus.glob(f"pairs/*-{language}/*.parquet"))]
        texts: set[str] = set()
        for path, column in columns:
            # Read only each file's first rows, so that the time does not grow with the corpus.
            first_rows = itertools.islice(tables.read_text_columns(path, (column,)), CENTRE_SENTENCES)
            texts.update(text for (text,) in first_rows if text)
        if not texts:
            return {}
        drawn[language] = sorted(texts, key=lambda text: _hash_with_seed(seed, text))[:CENTRE_SENTENCES]
    return drawn


def _hash_with_seed(seed: int, text: str) -> bytes:
    """Return a digest of a text and the seed. Sorting by it gives a random order that is the same in every run."""
    return hashlib.sha256(f"{seed}/{text}".encode()).digest()


def mark_unshared(tokenizer: Tokenizer, pairs: Pairs, max_tokens: int) -> Tensor:
    """Return a mask (N,) of the pairs whose two sentences have no token in common.

    A model cannot find such translations by copied names, numbers or placeholders. Only tokens with a letter or digit
    count, because nearly all pairs share punctuation and spaces.
    """
    options: dict[str, Any] = {"add_special_tokens": False, "truncation": True, "max_length": max_tokens}
    ids_of_sources = tokenizer([source for source, _ in pairs], **options)["input_ids"]
    ids_of_targets = tokenizer([target for _, target in pairs], **options)["input_ids"]
    word_ids = set()
    for token_id in set(itertools.chain(*ids_of_sources, *ids_of_targets)):
        if any(character.isalnum() for character in str(tokenizer.decode([token_id]))):
            word_ids.add(token_id)
    pairs_of_ids = zip(ids_of_sources, ids_of_targets, strict=True)
    return torch.tensor([word_ids.isdisjoint(set(source) & set(target)) for source, target in pairs_of_ids])


def tabulate_outcomes(
    task: str,
    language: ArrayLike,
    question_ids: Sequence[str],
    scores: ArrayLike,
    vector: str = "",
    direction: str = "",
    is_unshared: ArrayLike = False,
) -> pd.DataFrame:
    """Tabulate the outcome of each question, for the comparison of two models.

    `language`, `scores` and `is_unshared` are a single value for all questions, or an array with a value per question.
    A score is True or False for a right or wrong answer. `results/evidence.py` describes the columns.
    """
    return pd.DataFrame(
        {
            "task": task,
            "place": vector,  # the column's name in items.parquet
            "language": language,
            "direction": direction,
            "question": question_ids,
            "unshared": is_unshared,
            "right": scores,
        }
    )


def digest_question(text: str) -> str:
    """Return a question's id in the table of outcomes: a digest, because the text may be confidential."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]

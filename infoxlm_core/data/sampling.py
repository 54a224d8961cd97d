"""Draw samples from corpora of several languages with reproducible random numbers.

First, a language (pair) with n samples is drawn with a probability proportional to n^alpha. Then, a sample is drawn
uniformly from all corpora of this language (InfoXLM, appendix).
"""

import hashlib
import itertools

import numpy as np


def digest_key(*key: object) -> bytes:
    """Return a key's SHA-256 digest, as a seed for random generators."""
    text = "/".join(str(part) for part in key)
    return hashlib.sha256(text.encode()).digest()


def make_rng(*key: object) -> np.random.Generator:
    """Return a random generator that depends only on a key, such as (seed, step, virtual shard, purpose)."""
    words = np.frombuffer(digest_key(*key), np.uint64)  # (4,): two for Philox's key, two for its counter
    return np.random.Generator(np.random.Philox(key=words[:2], counter=[*words[2:], 0, 0]))


def probabilities(sizes: np.ndarray, alpha: float) -> np.ndarray:
    """Return probabilities proportional to n^alpha. Languages without samples have probability 0."""
    weights = np.where(sizes > 0, np.power(np.maximum(sizes, 1).astype(float), alpha), 0.0)
    return weights / max(weights.sum(), np.finfo(float).tiny)  # avoids division by 0 without samples


class TableSampler:
    """Draws samples from tables. Each table is one corpus in one language (pair).

    First, a table is drawn with the probability of its language times its share of the language's samples. Then, a row
    of the table is drawn uniformly. The result is equivalent to drawing a language, and then any of its samples.

    Args:
        corpus_sizes: number of samples by language (pair) and corpus. Tables are numbered in this order.
        alpha: exponent of the language sizes.
    """

    def __init__(self, corpus_sizes: list[list[int]], alpha: float) -> None:
        self.sizes = np.array(list(itertools.chain.from_iterable(corpus_sizes)), np.int64)  # (tables,)
        language_sizes = np.array([sum(sizes) for sizes in corpus_sizes], np.int64)  # (languages,)
        sample_probabilities = probabilities(language_sizes, alpha) / np.maximum(language_sizes, 1)  # (languages,)
        corpora_per_language = [len(sizes) for sizes in corpus_sizes]
        self.shares = self.sizes * sample_probabilities.repeat(corpora_per_language)  # (tables,)

    def draw(
        self, count: int, rng: np.random.Generator, row_counts: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Draw samples. Return table numbers (count,) and rows within these tables (count,).

        `row_counts` (tables,) is the number of rows available in each table, by default all rows.
        """
        tables = choose_indices(self.shares, rng.random(count))
        return tables, self._draw_rows(tables, rng, row_counts)

    def draw_partners(
        self,
        tables: np.ndarray,
        corpora: list[str],
        rng: np.random.Generator,
        row_counts: np.ndarray | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Draw a partner for each sample, if possible from a different corpus.

        Args:
            tables: table numbers of the samples (count,).
            corpora: corpus name of every table.
            rng: random generator.
            row_counts: number of rows available in each table (tables,), by default all rows.

        Returns:
            Table numbers of the partners (count,), and rows within these tables (count,).
        """
        corpus_names = np.array(corpora)
        corpus_of_sample = corpus_names[tables]  # (count,)
        uniform = rng.random(len(tables))  # drawn before the loop, because a set has no reproducible order
        partner_tables = np.empty_like(tables)
        for corpus in set(corpus_of_sample.tolist()):
            is_in_corpus = corpus_of_sample == corpus
            partner_shares = self._select_shares_outside(corpus, corpus_names)
            partner_tables[is_in_corpus] = choose_indices(partner_shares, uniform[is_in_corpus])
        return partner_tables, self._draw_rows(partner_tables, rng, row_counts)

    def table_probabilities(self) -> np.ndarray:
        """Return each table's probability (tables,) in `draw`."""
        return self.shares / max(self.shares.sum(), np.finfo(float).tiny)

    def partner_probabilities(self, corpora: list[str]) -> np.ndarray:
        """Return each table's probability (tables,) in `draw_partners`, for samples from `draw`."""
        corpus_names = np.array(corpora)
        table_probabilities = self.table_probabilities()
        partner_probabilities = np.zeros(len(corpora))
        for corpus in set(corpora):
            corpus_probability = table_probabilities[corpus_names == corpus].sum()
            partner_shares = self._select_shares_outside(corpus, corpus_names)
            partner_probabilities += corpus_probability * partner_shares / partner_shares.sum()
        return partner_probabilities

    def _select_shares_outside(self, corpus: str, corpus_names: np.ndarray) -> np.ndarray:
        """Return the shares of the tables (tables,), with 0 for tables of `corpus` unless there are no others."""
        other_shares = self.shares * (corpus_names != corpus)
        return other_shares if other_shares.any() else self.shares

    def _draw_rows(self, tables: np.ndarray, rng: np.random.Generator, row_counts: np.ndarray | None) -> np.ndarray:
        """Draw a row (count,) uniformly from each table."""
        sizes = self.sizes if row_counts is None else row_counts
        return (rng.random(len(tables)) * sizes[tables]).astype(np.int64)


def choose_indices(weights: np.ndarray, uniform: np.ndarray) -> np.ndarray:
    """Draw indices of `weights`, with probabilities proportional to the weights.

    `uniform` contains a random number in [0, 1) for each draw.
    """
    cumulative_weights = weights.cumsum()
    indices = np.searchsorted(cumulative_weights, uniform * cumulative_weights[-1], side="right")
    last_possible_index = int(np.flatnonzero(weights)[-1])
    return indices.clip(0, last_possible_index)  # rounding may exceed the last index with a weight

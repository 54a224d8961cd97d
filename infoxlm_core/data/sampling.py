"""Decide which samples a step sees: a pure function of (seed, step, virtual shard).

Languages, or language pairs, are drawn with p proportional to n^alpha over their number of samples n, then a sample
uniformly from all corpora of the language together (InfoXLM, appendix).
"""

import hashlib

import numpy as np


def digest_key(*key: object) -> bytes:
    """Return the SHA-256 of a key, which seeds a random decision."""
    return hashlib.sha256("/".join(map(str, key)).encode()).digest()


def generator(*key: object) -> np.random.Generator:
    """Return a counter-based generator for a key such as (seed, step, virtual shard, purpose)."""
    words = np.frombuffer(digest_key(*key), np.uint64)
    return np.random.Generator(np.random.Philox(key=words[:2], counter=[*words[2:], 0, 0]))


def probabilities(sizes: np.ndarray, alpha: float) -> np.ndarray:
    """Return p proportional to n^alpha; a language without samples has p = 0."""
    weights = np.where(sizes > 0, np.power(np.maximum(sizes, 1).astype(float), alpha), 0.0)
    return weights / max(weights.sum(), np.finfo(float).tiny)


class TableSampler:
    """Draws a table, then a row of it.

    A table is one corpus of one language (pair). It is drawn with p(language), proportional to n^alpha, times its share
    of the language, then a row uniformly. This equals drawing a language, then any of its samples.

    Args:
        sizes: the number of samples of each corpus, by language (pair); tables are numbered in this order.
        alpha: exponent of the language sizes.
    """

    def __init__(self, sizes: list[list[int]], alpha: float) -> None:
        self.sizes = np.array([size for counts in sizes for size in counts], np.int64)
        self.totals = np.array([sum(counts) for counts in sizes], np.int64)  # of each language
        each = probabilities(self.totals, alpha) / np.maximum(self.totals, 1)  # of one sample
        self.shares = self.sizes * each.repeat([len(counts) for counts in sizes])

    def draw(self, count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Draw samples; return their table numbers (count,) and rows within the tables (count,)."""
        return self._rows(pick(self.shares, rng.random(count)), rng)

    def draw_elsewhere(
        self, tables: np.ndarray, corpora: list[str], rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """Draw one sample for each table, from another corpus if there is one.

        Args:
            tables: (count,) table numbers.
            corpora: the corpus name of every table; tables with the same name belong to one corpus.
            rng: draws tables and rows.
        """
        number_of_corpus = {name: number for number, name in enumerate(corpora)}
        corpus_of_table = np.array([number_of_corpus[name] for name in corpora])
        own_corpus, uniform = corpus_of_table[tables], rng.random(len(tables))
        chosen = np.empty_like(tables)
        for corpus in set(own_corpus.tolist()):
            is_own = own_corpus == corpus
            other_shares = self.shares * (corpus_of_table != corpus)
            chosen[is_own] = pick(other_shares if other_shares.any() else self.shares, uniform[is_own])
        return self._rows(chosen, rng)

    def chances(self) -> np.ndarray:
        """Return the probability of each table in a draw, (tables,)."""
        return self.shares / max(self.shares.sum(), np.finfo(float).tiny)

    def chances_elsewhere(self, corpora: list[str]) -> np.ndarray:
        """Return the probability of each table in `draw_elsewhere` for tables from `draw`, (tables,)."""
        names, chances = np.array(corpora), np.zeros(len(corpora))
        for name in set(corpora):
            other_shares = self.shares * (names != name)
            if not other_shares.any():
                other_shares = self.shares
            chances += self.chances()[names == name].sum() * other_shares / other_shares.sum()
        return chances

    def _rows(self, tables: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        return tables, (rng.random(len(tables)) * self.sizes[tables]).astype(np.int64)


def pick(weights: np.ndarray, uniform: np.ndarray) -> np.ndarray:
    """Turn numbers uniform in [0, 1) into outcomes with probabilities proportional to `weights`."""
    edges = weights.cumsum()
    return np.searchsorted(edges, uniform * edges[-1], side="right").clip(0, int(np.flatnonzero(weights)[-1]))

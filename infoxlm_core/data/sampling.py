"""Which samples a step sees: a pure function of (seed, step, virtual shard), no state but the step.

Languages, or language pairs, are drawn with p proportional to n^alpha over their number of samples n, then a sample
uniformly over all corpora of the language together (InfoXLM, appendix).
"""

import hashlib

import numpy as np


def digest_key(*key: object) -> bytes:
    """SHA-256 of a key: what every random decision is drawn by."""
    return hashlib.sha256("/".join(map(str, key)).encode()).digest()


def generator(*key: object) -> np.random.Generator:
    """A counter-based generator of its own for each key, such as (seed, step, virtual shard, purpose)."""
    words = np.frombuffer(digest_key(*key), np.uint64)
    return np.random.Generator(np.random.Philox(key=words[:2], counter=[*words[2:], 0, 0]))


def probabilities(sizes: np.ndarray, alpha: float) -> np.ndarray:
    """p proportional to n^alpha; a language without samples has p = 0."""
    weights = np.where(sizes > 0, np.power(np.maximum(sizes, 1).astype(float), alpha), 0.0)
    return weights / max(weights.sum(), np.finfo(float).tiny)


class TableSampler:
    """Draws samples of a corpus table by table; `sizes`: of each language (pair), the samples of each of its corpora.

    Tables are numbered in the order of `sizes`, flattened. A table is drawn with p(language), proportional to n^alpha,
    times its share of the language, then a row uniformly: the same as a language first, then any of its samples.
    """

    def __init__(self, sizes: list[list[int]], alpha: float) -> None:
        self.sizes = np.array([size for counts in sizes for size in counts], np.int64)
        self.totals = np.array([sum(counts) for counts in sizes], np.int64)  # of each language
        each = probabilities(self.totals, alpha) / np.maximum(self.totals, 1)  # of one sample
        self.shares = self.sizes * each.repeat([len(counts) for counts in sizes])

    def draw(self, count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """`count` samples: their table numbers (count,) and rows within the table (count,)."""
        return self._rows(pick(self.shares, rng.random(count)), rng)

    def draw_elsewhere(
        self, tables: np.ndarray, corpora: list[str], rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """For each given table (count,) a sample drawn likewise, but from another corpus where there is one; `corpora`
        names that of every table, and two tables of one name are one corpus."""
        number = {name: i for i, name in enumerate(corpora)}
        names = np.array([number[name] for name in corpora])
        own, uniform, chosen = names[tables], rng.random(len(tables)), np.empty_like(tables)
        for name in set(own.tolist()):
            mine = own == name
            others = self.shares * (names != name)
            chosen[mine] = pick(others if others.any() else self.shares, uniform[mine])
        return self._rows(chosen, rng)

    def chances(self) -> np.ndarray:
        """(tables,) the probability with which a draw is from each."""
        return self.shares / max(self.shares.sum(), np.finfo(float).tiny)

    def chances_elsewhere(self, corpora: list[str]) -> np.ndarray:
        """(tables,) that of `draw_elsewhere`, for tables that `draw` has drawn."""
        names, found = np.array(corpora), np.zeros(len(corpora))
        for name in set(corpora):
            others = self.shares * (names != name)
            others = others if others.any() else self.shares
            found += self.chances()[names == name].sum() * others / others.sum()
        return found

    def _rows(self, tables: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        return tables, (rng.random(len(tables)) * self.sizes[tables]).astype(np.int64)


def pick(weights: np.ndarray, uniform: np.ndarray) -> np.ndarray:
    """Outcomes with probabilities like `weights`, from numbers uniform in [0, 1); never one of probability 0."""
    edges = weights.cumsum()
    return np.searchsorted(edges, uniform * edges[-1], side="right").clip(0, int(np.flatnonzero(weights)[-1]))

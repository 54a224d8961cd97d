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


class Law:
    """Draws samples of a corpus table by table.

    Args:
        sizes: for each language (pair), the number of samples of each of its corpora.
        alpha: exponent of the language law.

    Tables are numbered in the order of `sizes`, flattened.
    """

    def __init__(self, sizes: list[list[int]], alpha: float) -> None:
        self.by_language = [np.asarray(counts, np.int64) for counts in sizes]
        self.totals = np.array([counts.sum() for counts in self.by_language], np.int64)
        self.law = probabilities(self.totals, alpha)
        self.first_table = np.cumsum([0, *(len(counts) for counts in self.by_language)])[:-1]

    def draw(self, count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """`count` samples: their table numbers (count,) and rows within the table (count,)."""
        languages = _pick(self.law, rng.random(count))
        places = (rng.random(count) * self.totals[languages]).astype(np.int64)
        return self._locate(languages, places)

    def draw_elsewhere(
        self, tables: np.ndarray, corpora: list[str], rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """For each given table a sample by the same law, but from another corpus where there is one.

        Args:
            tables: (count,) tables the partners must avoid.
            corpora: the corpus each table belongs to; two tables of one name are one corpus.
        """
        chosen_table, chosen_row = self.draw(len(tables), rng)
        luck = rng.random((2, len(tables)))
        names = np.array(corpora)
        for corpus in sorted({corpora[table] for table in tables}):
            mine = names[tables] == corpus
            allowed = [
                counts * (names[first : first + len(counts)] != corpus)
                for counts, first in zip(self.by_language, self.first_table, strict=True)
            ]
            totals = np.array([counts.sum() for counts in allowed])
            if not totals.any():
                continue  # only one corpus: keep the plain draw
            # p(language) and the share of it that lies elsewhere
            law = self.law * totals / np.maximum(self.totals, 1)
            languages = _pick(law / law.sum(), luck[0, mine])
            places = (luck[1, mine] * totals[languages]).astype(np.int64)
            chosen_table[mine], chosen_row[mine] = self._locate(languages, places, allowed)
        return chosen_table, chosen_row

    def _locate(
        self, languages: np.ndarray, places: np.ndarray, counts: list[np.ndarray] | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Table and row of the samples at `places` of their languages, whose corpora hold `counts` samples."""
        tables, rows = np.empty_like(places), np.empty_like(places)
        for language in np.unique(languages):
            mine = languages == language
            ends = (counts or self.by_language)[language].cumsum()
            table = np.searchsorted(ends, places[mine], side="right")
            rows[mine] = places[mine] - np.where(table > 0, ends[table - 1], 0)
            tables[mine] = self.first_table[language] + table
        return tables, rows


def _pick(law: np.ndarray, luck: np.ndarray) -> np.ndarray:
    """Inverse of the cumulative law at `luck`, uniform in [0, 1); never an outcome of probability 0."""
    edges = law.cumsum()
    return np.searchsorted(edges, luck * edges[-1], side="right").clip(0, int(np.flatnonzero(law)[-1]))

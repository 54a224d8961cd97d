"""Is a model better than another on the same questions, or was it luck with these? A paired bootstrap interval.

The questions are drawn anew, as many as there are and with replacement, thousands of times; both models are scored on
each draw, and the interval holds the middle of the differences. A question that is asked in several languages is drawn
in all of them or in none: a sentence that is hard is hard in every language, and languages are no independent tests.
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd

CHUNK = 500  # draws at a time; only memory depends on it
NOT_ASKED = 9.0  # gains are between -1 and 1


@dataclass(frozen=True)
class Interval:
    """What a candidate gains over another model, and how sure that is."""

    gain: float
    lower: float
    upper: float
    questions: int


def paired_bootstrap(
    candidate: pd.Series, other: pd.Series, resamples: int = 10_000, level: float = 0.95, seed: int = 1
) -> Interval:
    """Percentile interval of the difference between two models' means over languages.

    Args:
        candidate: (language, question) -> score from 0 to 1 (`items.answers`).
        other: that of the other model, of the same questions.
        resamples: draws of the questions.
        level: share of the draws that the interval holds.
        seed: of the draws; the same answers and the same seed give the same interval.

    Raises:
        ValueError: the two were not asked the same.
    """
    if not candidate.index.equals(other.index):
        raise ValueError("the models were not asked the same questions")
    table = (candidate - other).unstack("language").fillna(NOT_ASKED)
    gains = table.to_numpy(dtype=float)  # (questions, languages)
    # Questions with equal outcomes are exchangeable: a draw is how often each kind of outcome comes up.
    kinds, counts = np.unique(gains, axis=0, return_counts=True)
    asked = kinds != NOT_ASKED
    values = np.where(asked, kinds, 0.0)
    draws = np.random.default_rng(seed)
    means = []
    for first in range(0, resamples, CHUNK):
        drawn = draws.multinomial(len(gains), counts / len(gains), size=min(CHUNK, resamples - first))
        means.append(_mean_over_languages(drawn, values, asked))
    lower, upper = np.quantile(np.concatenate(means), [(1 - level) / 2, (1 + level) / 2])
    gain = _mean_over_languages(counts[None], values, asked)[0]
    return Interval(float(gain), float(lower), float(upper), len(gains))


def _mean_over_languages(drawn: np.ndarray, values: np.ndarray, asked: np.ndarray) -> np.ndarray:
    """Score of each draw: drawn (R, kinds) with values and asked (kinds, languages) -> (R,)."""
    weights = drawn.astype(float)
    with np.errstate(invalid="ignore"):  # a language of few questions may not be drawn at all
        return np.nanmean((weights @ values) / (weights @ asked), axis=1)

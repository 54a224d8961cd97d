"""The paired bootstrap shows whether a model's gain could be due to the choice of questions.

All questions are resampled with replacement thousands of times, and both models are scored on each sample. A question
asked in several languages is sampled in all these languages together, because a hard sentence is hard in every
language.
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from infoxlm_core.results.statistics import CONFIDENCE

CHUNK = 500  # samples scored at a time; changes only memory
MISSING = 9.0  # marks a question that a language lacks; no gain has this value, because gains are between -1 and 1


@dataclass(frozen=True)
class Interval:
    """The gain of a candidate over another model, with its confidence interval."""

    gain: float
    lower: float
    upper: float
    questions: int


def paired_bootstrap(
    candidate: pd.Series, reference: pd.Series, resamples: int = 10_000, level: float = CONFIDENCE, seed: int = 1
) -> Interval:
    """Compute a candidate's gain over a reference, with a percentile bootstrap interval.

    The gain is the difference of the question scores, averaged over the questions of each language, then over
    languages.

    Args:
        candidate: the candidate's scores from 0 to 1 by (language, question), see `Outcomes.score_questions`.
        reference: the reference's scores on the same questions.
        resamples: number of bootstrap samples.
        level: share of the samples inside the interval.
        seed: random seed of the samples.

    Raises:
        ValueError: the models answered different questions.
    """
    if not candidate.index.equals(reference.index):
        raise ValueError("the models answered different questions")
    gain_table = (candidate - reference).unstack("language").fillna(MISSING)  # `np.unique` would not merge NaN rows
    gains = gain_table.to_numpy(dtype=float)  # (questions, languages)
    # Questions with equal rows of gains are interchangeable. Drawing how often each distinct row occurs is much faster
    # than drawing questions.
    distinct_gains, counts = np.unique(gains, axis=0, return_counts=True)  # (D, languages), (D,)
    is_present = distinct_gains != MISSING
    gains_or_zero = np.where(is_present, distinct_gains, 0.0)
    rng = np.random.default_rng(seed)
    sampled_gains = []
    for start in range(0, resamples, CHUNK):
        chunk_size = min(CHUNK, resamples - start)
        sampled_counts = rng.multinomial(len(gains), counts / len(gains), size=chunk_size)  # (chunk_size, D)
        sampled_gains.append(_average_over_languages(sampled_counts, gains_or_zero, is_present))
    lower, upper = np.quantile(np.concatenate(sampled_gains), [(1 - level) / 2, (1 + level) / 2])
    gain = _average_over_languages(counts[None], gains_or_zero, is_present)[0]  # without resampling
    return Interval(float(gain), float(lower), float(upper), len(gains))


def _average_over_languages(
    sampled_counts: np.ndarray, gains_or_zero: np.ndarray, is_present: np.ndarray
) -> np.ndarray:
    """Average the gains of each sample over the questions of a language, then over languages.

    Args:
        sampled_counts: how often each sample contains each of the D distinct rows of gains (samples, D).
        gains_or_zero: distinct rows of gains (D, languages); 0 if a question is missing in a language.
        is_present: mask of the questions that exist in a language (D, languages).
    """
    weights = sampled_counts.astype(float)
    with np.errstate(invalid="ignore"):  # 0 / 0 if a sample contains no question of a small language
        gains_by_language = (weights @ gains_or_zero) / (weights @ is_present)  # (samples, languages)
        return np.nanmean(gains_by_language, axis=1)

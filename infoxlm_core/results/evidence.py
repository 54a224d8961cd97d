"""The outcomes of an evaluation by question, and whether one model is better than another on the same questions.

The outcomes are a table with a row for each question and direction, the same for every model that took the same test:

    model | task | place | language | direction | question | unshared | right

`place` is the layer and pooling that was read, "best" or "contrast", and `direction` is "to_pivot" or "from_pivot";
both are empty for other tasks than retrieval. `question` is a digest, so that the table may stay with a model whose
test is confidential; a sentence that is asked in several languages has the same digest in all of them.

A paired bootstrap interval tells whether a gain is due to the choice of questions: questions are drawn anew thousands
of times, as many as there are and with replacement, and both models are scored on each draw. A question that is asked
in several languages is drawn in all of them or in none: a sentence that is hard is hard in every language, so languages
are no independent tests.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from typing_extensions import TypedDict

from infoxlm_core import outside
from infoxlm_core.corpora import tables
from infoxlm_core.errors import InputError
from infoxlm_core.results.statistics import CONFIDENCE

FILE = "items.parquet"
COLUMNS = ("model", "task", "place", "language", "direction", "question", "unshared", "right")
CHUNK = 500  # draws at a time; only memory depends on it
NOT_ASKED = 9.0  # gains are between -1 and 1


@dataclass(frozen=True)
class Outcomes:
    """The questions that one model answered."""

    table: pd.DataFrame
    pivot: str

    def answers(self, metric: str) -> pd.Series:
        """Return (language, question) -> share of directions in which the question was answered, by a metric.

        The metric is the mean over languages of the mean over their questions.

        Raises:
            InputError: the metric is no share of right answers, or the model has no such outcomes.
        """
        task, _, name = metric.partition("/")
        rows, pivot = self.table[self.table["task"] == task], self.pivot
        place, direction = rows["place"], rows["direction"]
        counted = {
            "mean": place == "",
            "best": place == "best",
            "contrast": place == "contrast",
            "no_overlap": (place == "best") & rows["unshared"],
            f"xx_{pivot}": (place == "best") & (direction == "to_pivot"),
            f"{pivot}_xx": (place == "best") & (direction == "from_pivot"),
        }
        rows = rows[counted[name] if name in counted else (place != "contrast") & (rows["language"] == name)]
        if rows.empty:
            raise InputError(
                f"{metric} has no outcomes by question: compare by a share of right answers (retrieval/best)"
            )
        return rows.groupby(["language", "question"], sort=True)["right"].mean()


def write(path: Path, tables: Mapping[str, list[pd.DataFrame]]) -> None:
    """Write the outcomes of models: name -> tables."""
    named = [part.assign(model=name) for name, parts in tables.items() for part in parts]
    pd.concat(named, ignore_index=True)[list(COLUMNS)].to_parquet(path, index=False, compression="zstd")


@outside.allow_extra_keys
class _ScoresFile(TypedDict):
    """The fields of an evaluation's scores.json that are read again."""

    model: str
    pivot: str
    test_set: str


def read_scores(evaluation: Path) -> dict[str, Any]:
    """Return the content of scores.json; InputError if it is malformed."""
    return outside.read_json(evaluation / "scores.json", _ScoresFile, "evaluate again")


def read(path: Path, model: str) -> pd.DataFrame:
    """Return the outcomes of one model; InputError if the file is malformed."""
    table = tables.read_frame(path, COLUMNS, "evaluate again")
    return table[table["model"] == model]


@dataclass(frozen=True)
class Interval:
    """The gain of a candidate over another model, with its confidence interval."""

    gain: float
    lower: float
    upper: float
    questions: int


def paired_bootstrap(
    candidate: pd.Series, other: pd.Series, resamples: int = 10_000, level: float = CONFIDENCE, seed: int = 1
) -> Interval:
    """Return the percentile interval of the difference between two models' means over languages.

    Args:
        candidate: (language, question) -> score from 0 to 1, see `Outcomes.answers`.
        other: the same of the other model.
        resamples: number of draws.
        level: share of the draws inside the interval.
        seed: of the draws.

    Raises:
        ValueError: the models were not asked the same questions.
    """
    if not candidate.index.equals(other.index):
        raise ValueError("the models were not asked the same questions")
    table = (candidate - other).unstack("language").fillna(NOT_ASKED)
    gains = table.to_numpy(dtype=float)  # (questions, languages)
    # Questions with equal outcomes are exchangeable, so a draw is the number of questions of each kind of outcome.
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
    """Return the score of each draw, (R,), from drawn (R, kinds), values and asked (kinds, languages)."""
    weights = drawn.astype(float)
    with np.errstate(invalid="ignore"):  # a language of few questions may not be drawn at all
        return np.nanmean((weights @ values) / (weights @ asked), axis=1)

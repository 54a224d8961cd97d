"""Question by question: which ones a model answered, and whether another model is better on the same ones.

The outcomes are a table with a row for each question and direction, the same for every model that took the same test:

    model | task | place | language | direction | question | unshared | right

`place` is the layer and pooling that is read, "best" or "contrast", and `direction` "to_pivot" or "from_pivot"; a task
without such a choice leaves them empty. A metric is known by the rows that it counts, whatever the task. A question is
known by a digest, so that the table may stay with a model whose test is confidential; the same sentence asked in
several languages has the same one.

Whether a gain is due to the choice of questions, a paired bootstrap interval tells. Questions are drawn anew, as many
as there are and with replacement, thousands of times; both models are scored on each draw, and the interval holds the
middle of the differences. A question that is asked in several languages is drawn in all of them or in none: a sentence
that is hard is hard in every language, and languages are no independent tests.
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

FILE = "items.parquet"
COLUMNS = ("model", "task", "place", "language", "direction", "question", "unshared", "right")
CHUNK = 500  # draws at a time; only memory depends on it
NOT_ASKED = 9.0  # gains are between -1 and 1


@dataclass(frozen=True)
class Outcomes:
    """Which questions one model answered."""

    table: pd.DataFrame
    pivot: str

    def answers(self, metric: str) -> pd.Series:
        """(language, question) -> share of directions in which it was answered, of the questions that a metric counts.

        The metric is the mean over languages of the mean over their questions.

        Raises:
            InputError: the metric is not a share of right answers, or the model has no such outcomes.
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
    """Write the outcomes of models by name."""
    named = [part.assign(model=name) for name, parts in tables.items() for part in parts]
    pd.concat(named, ignore_index=True)[list(COLUMNS)].to_parquet(path, index=False, compression="zstd")


@outside.with_more
class Judged(TypedDict):
    """What scores.json of `evaluate` says, as far as it is read again."""

    model: str
    pivot: str
    test_set: str


def read_scores(evaluation: Path) -> dict[str, Any]:
    """The scores.json of an evaluation; InputError if it is none."""
    return outside.read_json(evaluation / "scores.json", Judged, "evaluate again")


def read(path: Path, model: str) -> pd.DataFrame:
    """The outcomes of one model; InputError if the file holds something else."""
    table = tables.read_frame(path, COLUMNS, "evaluate again")
    return table[table["model"] == model]


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

    Both are (language, question) -> score from 0 to 1 (`answers`); `level` of the draws are in the interval.

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

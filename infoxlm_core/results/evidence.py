"""Store the outcome of every question of an evaluation, and compare two models on the same questions.

The outcomes are a table with a row for each question and direction, the same for every model that took the same test:

    model | task | place | language | direction | question | unshared | right

`place` names the vector and `direction` is "to_pivot" or "from_pivot"; both are empty for tasks other than retrieval.
The vectors are "served", which users get, "best", whose layer was chosen on these questions, and "centred", which is
"served" minus the mean vector of the language. Older releases wrote
"contrast" instead of "served", and only for models with a contrast layer. `question` is a digest, so that the table of
a confidential test may be published with its model. A sentence that is a question in several languages has the same
digest in all of them.

A paired bootstrap interval shows whether a gain could be due to the choice of questions. All questions are resampled
with replacement thousands of times, and both models are scored on each sample. A question that is asked in several
languages is sampled in all of them together: a hard sentence is hard in every language, so they are not independent.
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
CHUNK = 500  # samples scored at a time; affects only memory
MISSING = 9.0  # marks a question that a language lacks; gains are between -1 and 1


@dataclass(frozen=True)
class Outcomes:
    """The questions that one model answered."""

    table: pd.DataFrame
    pivot: str

    def score_questions(self, metric: str) -> pd.Series:
        """Return (language, question) -> share of directions in which the question was answered correctly.

        The mean over languages of the means over their questions is the metric. All metrics of retrieval but `best` and
        `centred` are those of the served vector.

        Raises:
            InputError: the metric is not a share of correct answers, or the table has no outcomes for it.
        """
        task, _, name = metric.partition("/")
        rows, pivot = self.table[self.table["task"] == task], self.pivot
        direction, place = rows["direction"], rows["place"].replace("contrast", "served")
        rows_of_metric = {
            "mean": place == "",
            "best": place == "best",
            "served": place == "served",
            "centred": place == "centred",
            "no_overlap": (place == "served") & rows["unshared"],
            f"xx_{pivot}": (place == "served") & (direction == "to_pivot"),
            f"{pivot}_xx": (place == "served") & (direction == "from_pivot"),
        }
        of_language = place.isin(["", "served"]) & (rows["language"] == name)
        rows = rows[rows_of_metric.get(name, of_language)]
        if rows.empty:
            raise InputError(
                f"no outcomes of {metric} by question: evaluate the model again, or compare by a share of correct "
                "answers such as retrieval/served"
            )
        return rows.groupby(["language", "question"], sort=True)["right"].mean()


def write(path: Path, tables: Mapping[str, list[pd.DataFrame]]) -> None:
    """Write the outcomes of several models as one table; `tables` maps a model's name to its tables."""
    named = [part.assign(model=name) for name, parts in tables.items() for part in parts]
    pd.concat(named, ignore_index=True)[list(COLUMNS)].to_parquet(path, index=False, compression="zstd")


@outside.allow_extra_keys
class _ScoresFile(TypedDict):
    """The fields of an evaluation's scores.json that promotion reads."""

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
        candidate: (language, question) -> score from 0 to 1, see `Outcomes.score_questions`.
        other: the same for the other model.
        resamples: number of bootstrap samples.
        level: share of the samples inside the interval.
        seed: seed of the samples.

    Raises:
        ValueError: the models answered different questions.
    """
    if not candidate.index.equals(other.index):
        raise ValueError("the models answered different questions")
    table = (candidate - other).unstack("language").fillna(MISSING)
    gains = table.to_numpy(dtype=float)  # (questions, languages)
    # Questions with equal gains are interchangeable, so a sample is the number of questions of each kind.
    kinds, counts = np.unique(gains, axis=0, return_counts=True)
    present = kinds != MISSING
    values = np.where(present, kinds, 0.0)
    rng = np.random.default_rng(seed)
    means = []
    for first in range(0, resamples, CHUNK):
        sampled_counts = rng.multinomial(len(gains), counts / len(gains), size=min(CHUNK, resamples - first))
        means.append(_mean_over_languages(sampled_counts, values, present))
    lower, upper = np.quantile(np.concatenate(means), [(1 - level) / 2, (1 + level) / 2])
    gain = _mean_over_languages(counts[None], values, present)[0]
    return Interval(float(gain), float(lower), float(upper), len(gains))


def _mean_over_languages(sampled_counts: np.ndarray, values: np.ndarray, present: np.ndarray) -> np.ndarray:
    """Return the gain of each sample, (R,), from counts (R, kinds), and values and presence (kinds, languages)."""
    weights = sampled_counts.astype(float)
    with np.errstate(invalid="ignore"):  # a sample may contain no question of a small language
        return np.nanmean((weights @ values) / (weights @ present), axis=1)

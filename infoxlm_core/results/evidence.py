"""Store which questions of an evaluation each model answered correctly. `bootstrap` compares models by these answers.

The file is a table with a row for each question and direction, the same for every model that took the same test:

    model | task | place | language | direction | question | unshared | right

`place` names the vector and `direction` is "to_pivot" or "from_pivot"; both are empty for tasks other than retrieval.
The vectors are "served", which users get, "best", whose layer was chosen on these questions, and "centred", which is
"served" minus the mean vector of the language. Older releases wrote "contrast" instead of "served", and only for models
with a contrast layer. `question` is a digest, so that the table of a confidential test may be published with its model.
A sentence that is a question in several languages has the same digest in all of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from typing_extensions import TypedDict

from infoxlm_core import user_files
from infoxlm_core.corpora import tables
from infoxlm_core.errors import InputError

FILE = "items.parquet"
PUBLIC_START = "start"
UNTRAINED = "untrained"
STARTS = (PUBLIC_START, UNTRAINED)
"""Names of the model before its training: `start` if it is an encoder that existed before, `untrained` if its weights
are random."""
COLUMNS = ("model", "task", "place", "language", "direction", "question", "unshared", "right")


@dataclass(frozen=True)
class Outcomes:
    """Which questions one model answered correctly."""

    table: pd.DataFrame
    pivot: str

    def score_questions(self, metric: str) -> pd.Series:
        """Return (language, question) -> share of directions in which the question was answered correctly.

        The metric is the mean over languages of the means over their questions. Errors are those of `select_rows`.
        """
        return score_questions(self.select_rows(metric))

    def select_rows(self, metric: str) -> pd.DataFrame:
        """Return the answers from which a metric is computed, as rows of the table.

        All retrieval metrics except `best` and `centred` are computed with the served vector.

        Raises:
            InputError: the metric is not a share of correct answers, or the table has no outcomes for it.
        """
        task, _, name = metric.partition("/")
        rows = self.table[self.table["task"] == task]
        vector = rows["place"].replace("contrast", "served")  # its name in older releases
        is_served = vector == "served"
        masks_by_metric = {
            "mean": vector == "",
            "best": vector == "best",
            "served": is_served,
            "centred": vector == "centred",
            "no_overlap": is_served & rows["unshared"],
            f"xx_{self.pivot}": is_served & (rows["direction"] == "to_pivot"),
            f"{self.pivot}_xx": is_served & (rows["direction"] == "from_pivot"),
        }
        if name in masks_by_metric:
            rows = rows[masks_by_metric[name]]
        else:  # any other metric is named after a language
            rows = rows[vector.isin(["", "served"]) & (rows["language"] == name)]
        if rows.empty:
            raise InputError(
                f"no outcomes of {metric} by question. Evaluate the model again, or compare by a share of correct "
                "answers such as retrieval/served."
            )
        return rows


def score_questions(rows: pd.DataFrame) -> pd.Series:
    """Return (language, question) -> share of directions in which the question was answered correctly."""
    return rows.groupby(["language", "question"], sort=True)["right"].mean()


def average(outcomes: Sequence[Outcomes], metric: str) -> pd.Series:
    """Return the score of each question, averaged over models that answered the same questions."""
    scores = pd.concat([model_outcomes.score_questions(metric) for model_outcomes in outcomes])
    return scores.groupby(level=["language", "question"], sort=True).mean()


def write(path: Path, table_by_model: Mapping[str, pd.DataFrame]) -> None:
    """Write the outcomes of several models as one table. `table_by_model` maps the name of a model to its outcomes."""
    labelled_tables = [table.assign(model=model) for model, table in table_by_model.items()]
    outcomes = pd.concat(labelled_tables, ignore_index=True)[list(COLUMNS)]
    outcomes.to_parquet(path, index=False, compression="zstd")


@user_files.allow_extra_keys
class _ScoresFile(TypedDict):
    """The fields of an evaluation's scores.json that promotion reads."""

    model: str
    pivot: str
    test_set: str


def read_scores(evaluation: Path) -> dict[str, Any]:
    """Return the content of scores.json. Raise InputError if it is malformed."""
    return user_files.read_json(evaluation / "scores.json", _ScoresFile, "evaluate again")


def read(path: Path, model: str) -> pd.DataFrame:
    """Return the outcomes of one model. Raise InputError if the file is malformed."""
    table = tables.read_frame(path, COLUMNS, "evaluate again")
    return table[table["model"] == model]


def find_start(path: Path) -> str | None:
    """Return the name of the model before its training, if the file has its outcomes."""
    models = set(tables.read_frame(path, COLUMNS, "evaluate again")["model"])
    return next((name for name in STARTS if name in models), None)

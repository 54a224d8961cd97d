"""Store which questions of an evaluation each model answered correctly, so that `bootstrap` can compare models.

The file is a table with one row per model, question and direction:

    model | task | place | language | direction | question | unshared | right

`place` names the kind of vector, and `direction` is "to_pivot" or "from_pivot". Both are empty for tasks other than
retrieval. The kinds are "served", the vector that users get; "best", whose layer was chosen on these questions; and
"centred", "served" minus the language's mean vector. Older releases wrote "contrast" instead of "served", and only for
models with a contrast layer. `question` is a digest, so that the table of a confidential test may be published with its
model. A sentence has the same digest in every language for which it is a question.
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
"""Names of the model before its training: `start` is an existing encoder, `untrained` has random weights."""
COLUMNS = ("model", "task", "place", "language", "direction", "question", "unshared", "right")


@dataclass(frozen=True)
class Outcomes:
    """The questions that one model answered correctly."""

    table: pd.DataFrame
    pivot: str

    def score_questions(self, metric: str) -> pd.Series:
        """Return the share of correct directions by (language, question). Raise the errors of `select_rows`.

        Averaging the shares over the questions of each language, and then over languages, gives the metric.
        """
        return score_questions(self.select_rows(metric))

    def select_rows(self, metric: str) -> pd.DataFrame:
        """Select the rows of the table from which a metric is computed.

        The `place` column names the kind of vector. All retrieval metrics except `best` and `centred` use `served`, the
        vector that users get. In other tasks, `place` is empty.

        Raises:
            InputError: the metric is not a share of correct answers, or the table has no answers for the metric.
        """
        task, _, name = metric.partition("/")
        rows = self.table[self.table["task"] == task]
        vector = rows["place"].replace("contrast", "served")  # older releases wrote "contrast"
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
        else:  # all other metrics are named after languages
            rows = rows[vector.isin(["", "served"]) & (rows["language"] == name)]
        if rows.empty:
            raise InputError(
                f"no outcomes of {metric} by question. Evaluate the model again, or compare by a share of correct "
                "answers such as retrieval/served."
            )
        return rows


def score_questions(rows: pd.DataFrame) -> pd.Series:
    """Return the share of correct directions by (language, question)."""
    return rows.groupby(["language", "question"], sort=True)["right"].mean()


def average(outcomes: Sequence[Outcomes], metric: str) -> pd.Series:
    """Average the score of each question over models that answered the same questions."""
    scores = pd.concat([model_outcomes.score_questions(metric) for model_outcomes in outcomes])
    return scores.groupby(level=["language", "question"], sort=True).mean()


def write(path: Path, table_by_model: Mapping[str, pd.DataFrame]) -> None:
    """Write the outcomes of several models as one table. `table_by_model` maps model names to tables."""
    labelled_tables = [table.assign(model=model) for model, table in table_by_model.items()]
    outcomes = pd.concat(labelled_tables, ignore_index=True)[list(COLUMNS)]
    outcomes.to_parquet(path, index=False, compression="zstd")


@user_files.allow_extra_keys
class _ScoresFile(TypedDict):
    """The fields of scores.json that promotion reads."""

    model: str
    pivot: str
    test_set: str


def read_scores(evaluation: Path) -> dict[str, Any]:
    """Read scores.json. Raise InputError if the file is malformed."""
    return user_files.read_json(evaluation / "scores.json", _ScoresFile, "evaluate again")


def read(path: Path, model: str) -> pd.DataFrame:
    """Read the outcomes of one model. Raise InputError if the file is malformed."""
    table = tables.read_frame(path, COLUMNS, "evaluate again")
    return table[table["model"] == model]


def find_start(path: Path) -> str | None:
    """Return the name of the model before its training, or None if the file has no outcomes of this model."""
    models = set(tables.read_frame(path, COLUMNS, "evaluate again")["model"])
    return next((name for name in STARTS if name in models), None)

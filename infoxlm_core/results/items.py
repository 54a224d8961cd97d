"""Which questions of a test a model answered, one by one: what a paired comparison of two models needs.

A table with a row for each question and direction, the same for every model that took the same test:

    model | task | place | language | direction | question | unshared | right

`place` is the layer and pooling that a metric of retrieval is read at: "best" or "contrast". A question is known by a
digest, so that the table may stay with a model whose test is confidential; the same sentence asked in several
languages has the same one.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import pandas as pd
from torch import Tensor

from infoxlm_core.errors import InputError

FILE = "items.parquet"
COLUMNS = ("model", "task", "place", "language", "direction", "question", "unshared", "right")


def of_retrieval(
    pairs: Mapping[str, list[tuple[str, str]]],
    hits: Mapping[str, Mapping[str, Mapping[str, Tensor]]],
    unshared: Mapping[str, Tensor],
) -> pd.DataFrame:
    """Outcomes of retrieval.

    Args:
        pairs: of each language, (pivot sentence, its translation).
        hits: place -> language -> direction -> (N,) bool.
        unshared: of each language, (N,) bool: the pair shares no token.
    """
    parts = [
        pd.DataFrame(
            {
                "task": "retrieval",
                "place": place,
                "language": language,
                "direction": direction,
                "question": [_digest(source) for source, _ in pairs[language]],
                "unshared": unshared[language].numpy(),
                "right": right.numpy(),
            }
        )
        for place, languages in hits.items()
        for language, directions in languages.items()
        for direction, right in directions.items()
    ]
    return pd.concat(parts, ignore_index=True)


def of_classification(rows: pd.DataFrame) -> pd.DataFrame:
    """Outcomes of classification, from rows with language, text, perhaps text_pair, label and what was predicted."""
    asked = rows[["text", "text_pair"] if "text_pair" in rows else ["text"]].fillna("").agg("\t".join, axis=1)
    asked = asked + "\t" + rows["label"] + "\t" + rows["language"]
    again = asked.groupby(asked).cumcount()  # the same row twice is two questions
    return pd.DataFrame(
        {
            "task": "classification",
            "place": "",
            "language": rows["language"].astype(str),
            "direction": "",
            "question": [_digest(f"{text}\t{number}") for text, number in zip(asked, again, strict=True)],
            "unshared": False,
            "right": (rows["predicted"] == rows["label"]).astype(bool),
        }
    )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def write(path: Path, tables: Mapping[str, list[pd.DataFrame]]) -> None:
    """Write the outcomes of models by name."""
    named = [part.assign(model=name) for name, parts in tables.items() for part in parts]
    pd.concat(named, ignore_index=True)[list(COLUMNS)].to_parquet(path, index=False, compression="zstd")


def read(path: Path, model: str) -> pd.DataFrame:
    """The outcomes of one model.

    Raises:
        InputError: the file holds something else.
    """
    try:
        table = pd.read_parquet(path, columns=list(COLUMNS))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read ({' '.join(str(error).split())[:200]}): evaluate again") from None
    return table[table["model"] == model]


def answers(table: pd.DataFrame, metric: str, pivot: str) -> pd.Series:
    """The share of directions in which each question counted by a metric was answered: (language, question) -> 0 to 1.

    The metric is the mean over languages of the mean over their questions.

    Raises:
        InputError: the metric is not a share of right answers, or the model has no such outcomes.
    """
    wholes: tuple[str, ...]
    task, _, name = metric.partition("/")
    rows = table[table["task"] == task]
    if task == "retrieval":
        rows = rows[rows["place"] == ("contrast" if name == "contrast" else "best")]
        rows = rows[rows["unshared"]] if name == "no_overlap" else rows
        rows = rows[rows["direction"] == "to_pivot"] if name == f"xx_{pivot}" else rows
        rows = rows[rows["direction"] == "from_pivot"] if name == f"{pivot}_xx" else rows
        wholes = ("best", "contrast", "no_overlap", f"xx_{pivot}", f"{pivot}_xx")
    else:
        wholes = ("mean",)
    if name not in wholes:
        rows = rows[rows["language"] == name]
    if rows.empty:
        raise InputError(f"{metric} has no outcomes by question: compare by a share of right answers (retrieval/best)")
    return rows.groupby(["language", "question"], sort=True)["right"].mean()

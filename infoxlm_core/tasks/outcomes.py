"""Question by question: what a model answered, as rows of the table that `results/evidence.py` describes."""

import hashlib
from collections.abc import Mapping

import pandas as pd
from torch import Tensor


def of_retrieval(
    pairs: Mapping[str, list[tuple[str, str]]],
    hits: Mapping[str, Mapping[str, Mapping[str, Tensor]]],
    unshared: Mapping[str, Tensor],
) -> pd.DataFrame:
    """Outcomes of retrieval: hits are place -> language -> direction -> (N,) bool, unshared language -> (N,) bool."""
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

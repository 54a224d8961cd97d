"""Measure a classifier in each language, on the test set that `finetune` saved with the classifier."""

from pathlib import Path

import pandas as pd

from infoxlm_core import manifests
from infoxlm_core.config import EvaluationConfig
from infoxlm_core.corpora import tables
from infoxlm_core.errors import InputError
from infoxlm_core.model import padded
from infoxlm_core.tasks.classification.run import accuracy_by_language, predict_rows
from infoxlm_core.tasks.questions import digest_question, tabulate_outcomes
from infoxlm_core.tasks.scores import Scores

REMEDY = "Give the output of finetune."


def measure(directory: Path, source: str, config: EvaluationConfig) -> Scores:
    """Classify the rows of test.parquet and measure the accuracy in each language.

    The value `majority` of the details is the accuracy of always predicting the most frequent label.

    Args:
        directory: the classifier's directory.
        source: the language with which the transfer gap compares all others.
        config: the batch size and the maximum text length.
    """
    rows = read_test_set(directory)
    # Compute the digest before the predictions are added, so that it is equal for all classifiers with this test set.
    test_set = manifests.digest(rows.to_dict("list"))
    rows["predicted"] = predict_rows(directory, rows, config.max_tokens, config.batch_size * config.max_tokens)
    accuracies = accuracy_by_language(rows["predicted"], rows["label"], rows["language"])
    return Scores.from_languages(
        "classification",
        {language: {"accuracy": accuracy} for language, accuracy in accuracies.items()},
        source,
        counts={str(language): int(count) for language, count in rows["language"].value_counts().items()},
        test_set=test_set,
        details={
            "majority": int(rows["label"].value_counts().max()) / len(rows),
            "rows": len(rows),
            "labels": list(padded.read_labels(padded.load_config(directory))),
        },
        outcomes=tabulate(rows),
    )


def read_test_set(directory: Path) -> pd.DataFrame:
    """Read a classifier's test set. Raise InputError if the set is missing or empty, or has unknown labels."""
    path = directory / "test.parquet"
    if not path.is_file():
        raise InputError(f"{path} is missing. {REMEDY}")
    table = tables.read_frame(path, None, "give the output of finetune").astype("string")
    missing_columns = {"text", "label", "language"} - set(table.columns)
    if missing_columns:
        raise InputError(f"{path} has no column {', '.join(sorted(missing_columns))}. {REMEDY}")
    if table.empty:
        raise InputError(f"{path} has no rows. Add rows with the split test to the fine-tuning data.")
    labels = padded.read_labels(padded.load_config(directory))
    unknown_labels = sorted(set(table["label"]) - set(labels))
    if unknown_labels:
        raise InputError(f"{path}: label {unknown_labels[0]!r} is not one of the classifier's ({', '.join(labels)}).")
    return table


def tabulate(rows: pd.DataFrame) -> pd.DataFrame:
    """Tabulate the outcome of each test row, for the comparison of two models."""
    text_columns = ["text", "text_pair"] if "text_pair" in rows else ["text"]
    texts = rows[text_columns].fillna("").agg("\t".join, axis=1)
    questions = texts + "\t" + rows["label"] + "\t" + rows["language"]
    # Repeated rows count as separate questions, so the digest includes the number of earlier occurrences.
    occurrences = questions.groupby(questions).cumcount()
    digests = [digest_question(question) for question in questions + "\t" + occurrences.astype(str)]
    is_correct = (rows["predicted"] == rows["label"]).astype(bool)
    return tabulate_outcomes("classification", rows["language"].astype(str), digests, is_correct)

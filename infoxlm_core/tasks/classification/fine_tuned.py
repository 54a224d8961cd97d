"""Task of an evaluation: a fine-tuned classifier on the test set that lies beside it, by language."""

from pathlib import Path
from typing import ClassVar

import pandas as pd

from infoxlm_core import manifests
from infoxlm_core.corpora import tables
from infoxlm_core.errors import InputError
from infoxlm_core.model import padded
from infoxlm_core.tasks import outcomes
from infoxlm_core.tasks.classification import run
from infoxlm_core.tasks.held_out import HeldOutConfig
from infoxlm_core.tasks.task import Scores, Task


class FineTuned(Task[HeldOutConfig]):
    """One label for each row of test.parquet, beside always giving the most frequent label."""

    name: ClassVar[str] = "classification"
    settings = HeldOutConfig
    metrics: ClassVar[tuple[str, ...]] = ("accuracy",)
    unit: ClassVar[str] = "rows"

    def measure(self, settings: HeldOutConfig, model: Path, output: Path) -> Scores:  # noqa: ARG002 - no predictions
        """Classify the rows of every language; the pivot is the source of the transfer gap."""
        rows = read_test_set(model)
        rows["predicted"] = run.predict_rows(
            model, rows, settings.max_tokens, settings.batch_size * settings.max_tokens
        )
        details = {
            "majority": int(rows["label"].value_counts().max()) / len(rows),
            "rows": len(rows),
            "labels": list(padded.labels_of(padded.read_config(model))),
        }
        accuracy = run.accuracy_by_language(rows["predicted"], rows["label"], rows["language"])
        return Scores.over(
            self.name,
            {language: {"accuracy": share} for language, share in accuracy.items()},
            settings.pivot,
            counts={str(language): int(number) for language, number in rows["language"].value_counts().items()},
            test_set=manifests.digest(rows.drop(columns="predicted").to_dict("list")),
            details=details,
            outcomes=outcomes.of_classification(rows),
        )


def read_test_set(directory: Path) -> pd.DataFrame:
    """The test set that finetune left beside a classifier; InputError if it is missing, empty, or does not fit."""
    path = directory / "test.parquet"
    if not path.is_file():
        raise InputError(f"{path} is missing: give the output of finetune")
    table = tables.read_frame(path, None, "give the output of finetune").astype("string")
    if missing := {"text", "label", "language"} - set(table.columns):
        raise InputError(f"{path} has no column {', '.join(sorted(missing))}: give the output of finetune")
    if table.empty:
        raise InputError(f"{path} has no rows: add some of split test to the data of the fine-tuning")
    labels = padded.labels_of(padded.read_config(directory))
    if unknown := sorted(set(table["label"]) - set(labels)):
        raise InputError(f"{path}: label {unknown[0]!r} is not one of the classifier's ({', '.join(labels)})")
    return table

"""Labelled text -> what fine-tuning a classifier needs: tokenised training text, its answers, and a judge."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from infoxlm_core.data.examples import Examples
from infoxlm_core.errors import CorpusTooSmall
from infoxlm_core.languages import two_letters
from infoxlm_core.model.task_models import TaskModel
from infoxlm_core.tasks.classification import ClassificationConfig
from infoxlm_core.tasks.classifying import accuracy_by_language, answer, encode_rows, known_rows
from infoxlm_core.tasks.labelled import read_labelled


class Parts(NamedTuple):
    """What fine-tuning needs.

    Attributes:
        examples: N training examples.
        targets: (N,) numbers of their labels.
        labels: names of the labels.
        judge: classifier -> accuracy of each development language, from 0 to 1; None without development rows.
        development: the languages that have some.
        test: the rows to test on, in every language.
    """

    examples: Examples
    targets: np.ndarray
    labels: tuple[str, ...]
    judge: Callable[[TaskModel], dict[str, float]] | None
    development: tuple[str, ...]
    test: pd.DataFrame


def task(config: ClassificationConfig, encoder: Path, corpus: Path | None) -> Parts:
    """Read and tokenise labelled text for an encoder.

    Raises:
        InputError: a file, column or row is not usable.
        CorpusTooSmall: no text to train on, or fewer than two labels.
    """
    table = read_labelled(config, corpus)
    languages = [two_letters(language) for language in config.train_languages]
    train = table[(table["split"] == "train") & table["language"].isin(languages)]
    labels = tuple(sorted(train["label"].unique()))
    if len(labels) < 2:
        raise CorpusTooSmall(
            f"{len(train)} training rows in {', '.join(languages)} with labels {list(labels)}: have={len(labels)} "
            "need=2 labels; set finetuning.train_languages to languages of the data"
        )
    numbers = {label: number for number, label in enumerate(labels)}
    dev, test = (known_rows(table[table["split"] == split], labels, split) for split in ("dev", "test"))
    return Parts(
        encode_rows(train, encoder, config.max_tokens),
        train["label"].map(numbers).to_numpy(np.int64),
        labels,
        _judge(dev, encode_rows(dev, encoder, config.max_tokens)) if len(dev) else None,
        tuple(sorted(dev["language"].unique())),
        test.drop(columns="split"),
    )


def _judge(dev: pd.DataFrame, asked: Examples) -> Callable[[TaskModel], dict[str, float]]:
    return lambda classifier: accuracy_by_language(answer(classifier, asked), dev["label"], dev["language"])

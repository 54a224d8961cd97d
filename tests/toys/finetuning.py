"""A small encoder and a table of labelled text, from which a classifier learns in 60 steps."""

from pathlib import Path

import pandas as pd
import pytest

from infoxlm_core.config import TokenizationConfig
from infoxlm_core.data.shards import open_shards
from infoxlm_core.model.huggingface import pretrained
from infoxlm_core.systems.infoxlm.system import build
from infoxlm_core.tasks.classification.task import ClassificationConfig
from tests.toys.corpus import tokenized, write_corpus
from tests.toys.pretraining import tiny_config
from tests.toys.text import messages


def config(data: Path, **changes) -> ClassificationConfig:
    """Return settings for the table of the fixture `data`."""
    optimization = {"steps": 60, "learning_rate": 0.01, "warmup_steps": 5, "weight_decay": 0.0}
    return ClassificationConfig.parse(
        {"data": str(data), "max_tokens": 30, "dropout": 0.0, "optimization": optimization,
         "checkpoints": {"every": 20}, "log_every": 1} | changes
    )  # fmt: skip


@pytest.fixture(scope="module")
def encoder(tmp_path_factory) -> Path:
    base = tmp_path_factory.mktemp("encoder")
    german = messages(0)
    corpus = write_corpus(
        base / "corpus", {"de": [b for _, b in german], "en": [a for a, _ in german]}, {"en-de": german}
    )
    shards = open_shards(tokenized(TokenizationConfig(vocabulary_size=96, processes=1), corpus, base / "shards"))
    pretrained.export(build(tiny_config(), shards), base / "shards/tokenizer", base / "model")
    return base / "model"


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Return a table: does a message open or delete something? In English and German; a tenth is the test set."""
    rows = [
        {"text": text, "label": english.split()[0], "language": language, "split": "train" if number % 10 else "test"}
        for number, (english, german) in enumerate(messages(0)) for language, text in (("en", english), ("de", german))
        if english.split()[0] in ("Open", "Delete")
    ]  # fmt: skip
    path = tmp_path_factory.mktemp("data") / "verbs.tsv"
    pd.DataFrame(rows).to_csv(path, sep="\t", index=False)
    return path

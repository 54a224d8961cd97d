"""Settings of classification: which files hold the labelled text, and how an encoder is fine-tuned on it."""

from typing import Literal, Self

from pydantic import model_validator

from infoxlm_core.config.base import Language, Share, Source
from infoxlm_core.config.tasks import CrossLingualConfig, Paths


class ClassificationConfig(CrossLingualConfig):
    """Fine-tune an encoder to classify sentences or sentence pairs (XNLI, PAWS-X, SIB-200, any table)."""

    task: Literal["classification"] = "classification"
    """The kind of task."""

    data: Source | Paths | None = None
    """CSV, TSV or Parquet files, or folders in the layout of XNLI, XNLI-MT, XTREME, PAWS-X or SIB-200. null: the
    labelled set of the prepared corpus."""

    text: str = "text"
    """Name of the column with the sentence. In a file without a header, it is the first column."""

    text_pair: str | None = None
    """Name of the column with the second sentence of a pair, if there is one. In a file without a header, it is the
    second column."""

    label: str = "label"
    """Name of the column with the label. In a file without a header, it is the last column."""

    language: str = "language"
    """Name of the column with the language code. It is not needed if the name of the file contains the code, such as
    `train-en.tsv`."""

    split: str = "split"
    """Name of the column that contains train, dev or test. A file without this column is training text, unless its name
    contains dev or test. If there is no test text at all, a tenth of the rows becomes the test set. All languages then
    need the same rows in the same order, so that no test row translates a training row."""

    train_languages: tuple[Language, ...] = ("en",)
    """Languages to train on. All languages are tested."""

    head_dropout: Share = 0.1
    """Dropout probability before the classifier's layers."""

    @model_validator(mode="after")
    def _columns_differ(self) -> Self:
        if self.label in (self.text, self.text_pair) or self.text == self.text_pair:
            raise ValueError(f"text, text_pair and label must be different columns, not {self.label!r:.80} twice")
        return self

"""Settings of classification: which files hold the labelled text, and how an encoder is fine-tuned on it."""

from typing import Literal, Self

from pydantic import model_validator

from infoxlm_core.config.base import Language, Share, Source
from infoxlm_core.config.tasks import CrossLingualConfig, Paths


class ClassificationConfig(CrossLingualConfig):
    """Encoder + labelled text -> classifier of sentences or sentence pairs (XNLI, PAWS-X, SIB-200, any table)."""

    task: Literal["classification"] = "classification"
    """The kind of task."""

    data: Source | Paths | None = None
    """CSV, TSV or Parquet files, or folders in the layout of XNLI, XNLI-MT, XTREME, PAWS-X or SIB-200; none: the
    labelled set of the prepared corpus."""

    text: str = "text"
    """Column of the sentence; in a file without a header the first."""

    text_pair: str | None = None
    """Column of the second sentence of a pair, if there is one; in a file without a header the second."""

    label: str = "label"
    """Column of the label; in a file without a header the last."""

    language: str = "language"
    """Column of the language code; not needed where the file's name says it, as `train-en.tsv` does."""

    split: str = "split"
    """Column that says train, dev or test; a file without it is training text, unless its name says another. If no
    file says any, a tenth of the rows becomes the test. Several languages then need the same rows in the same order, so
    that no test row translates a training row."""

    train_languages: tuple[Language, ...] = ("en",)
    """Languages to train on; every language is tested."""

    head_dropout: Share = 0.1
    """Dropout probability before the classifier's layers."""

    @model_validator(mode="after")
    def _columns_differ(self) -> Self:
        if self.label in (self.text, self.text_pair) or self.text == self.text_pair:
            raise ValueError(f"text, text_pair and label must be different columns, not {self.label!r:.80} twice")
        return self

"""Task: classify sentences or sentence pairs (XNLI, PAWS-X, SIB-200, any table)."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from pydantic import model_validator

from infoxlm_core.config.base import Language, Share, Source
from infoxlm_core.config.tasks import CrossLingualConfig, Paths
from infoxlm_core.errors import ConfigError
from infoxlm_core.model.task_head import Head
from infoxlm_core.tasks.scores import Scores
from infoxlm_core.tasks.task import Preset, Task

if TYPE_CHECKING:
    from torch import Tensor

    from infoxlm_core.config import EvaluationConfig
    from infoxlm_core.tasks.questions import Questions


class ClassificationConfig(CrossLingualConfig):
    """Fine-tune an encoder to classify sentences or sentence pairs (XNLI, PAWS-X, SIB-200, any table)."""

    task: Literal["classification"] = "classification"
    """The kind of task."""

    data: Source | Paths | None = None
    """CSV, TSV or Parquet files, or directories in the layout of XNLI, XNLI-MT, XTREME, PAWS-X or SIB-200. null: the
    prepared corpus's labelled set."""

    text: str = "text"
    """Name of the column with the sentence. Files without a header have the sentence in the first column."""

    text_pair: str | None = None
    """Name of the column with the second sentence of a pair. null: no pairs, unless the file has the header of a public
    set. Files without a header have the second sentence in the second of three or more columns."""

    label: str = "label"
    """Name of the column with the label. Files without a header have the label in the last column."""

    language: str = "language"
    """Name of the column with the language code. Not needed if the file name contains the code, such as
    `train-en.tsv`."""

    split: str = "split"
    """Name of the column that contains train, dev or test. A file without this column is training text, unless its name
    contains dev or test. If no row and no file name has a split, a tenth of the rows is drawn as the test set. All
    languages then need the same rows in the same order, so that no test row translates a training row."""

    train_languages: tuple[Language, ...] = ("en",)
    """Languages to train on. All languages are tested."""

    head_dropout: Share = 0.1
    """Dropout probability before the classifier's layers."""

    @model_validator(mode="after")
    def _columns_differ(self) -> Self:
        if self.label in (self.text, self.text_pair) or self.text == self.text_pair:
            raise ValueError(f"text, text_pair and label must be different columns, not {self.label!r:.80} twice")
        return self


def loss(logits: "Tensor", targets: "Tensor", lengths: Sequence[int]) -> tuple["Tensor", "Tensor"]:  # noqa: ARG001
    """Return the summed cross-entropy of logits (N, labels), and a mask (N,) of the correct predictions."""
    import torch.nn.functional as F

    from infoxlm_core.model.objectives import full_precision

    cross_entropy = F.cross_entropy(full_precision(logits), targets, reduction="sum")
    is_right = logits.argmax(dim=1) == targets
    return cross_entropy, is_right


HEAD = Head(
    name="classification",
    architecture="SequenceClassification",
    is_per_token=False,
    name_rules=((r"^dense\.", "classifier.dense."), (r"^output\.", "classifier.out_proj.")),
    bert_name_rules=((r"^dense\.", "roberta.pooler.dense."), (r"^output\.", "classifier.")),
    loss=loss,
)


class Classification(Task[ClassificationConfig]):
    """Predict the label of each row of labelled text."""

    name: ClassVar[str] = "classification"
    settings = ClassificationConfig
    metrics: ClassVar[tuple[str, ...]] = ("accuracy",)
    unit: ClassVar[str] = "rows"
    order = ("en", "fr", "es", "de", "el", "bg", "ru", "tr", "ar", "vi", "th", "zh", "hi", "sw", "ur")
    tables: ClassVar[tuple[str, ...]] = ("xnli",)
    presets: ClassVar[Mapping[str, Preset]] = {"xnli": Preset("xnli"), "classification": Preset()}
    head = HEAD
    data_fields: ClassVar[tuple[str, ...]] = ("data", "translated_test")
    test_only_fields: ClassVar[tuple[str, ...]] = ("mixed", "translated_test")

    def has_training_text(self, settings: ClassificationConfig, corpus_files: Collection[str]) -> bool:
        # A prepared corpus is labelled with the names of its pair corpora, and a classifier needs two labels.
        labels = {PurePosixPath(name).stem for name in corpus_files if name.startswith("pairs/")}
        return settings.data is not None or ("labelled.parquet" in corpus_files and len(labels) > 1)

    def check_plan(self, settings: ClassificationConfig, grid_points: int, where: str) -> None:  # noqa: ARG002
        if settings.data is None:
            raise ConfigError(f"{where}.settings.data: a suite has no corpus. Name files or a directory.")

    def measure_held_out(self, questions: "Questions", model: Path, config: "EvaluationConfig") -> Scores:
        from infoxlm_core.tasks.classification import held_out

        return held_out.measure(model, questions.pivot, config)

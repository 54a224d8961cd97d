"""Task: sentences, or sentence pairs, -> labels (XNLI, PAWS-X, SIB-200, any table)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from pydantic import model_validator

from infoxlm_core.config.base import Flag, Language, Share, Source
from infoxlm_core.config.tasks import Paths, RecipeConfig
from infoxlm_core.errors import ConfigError
from infoxlm_core.model.task_head import Head
from infoxlm_core.tasks.task import Preset, Scores, Task

if TYPE_CHECKING:
    from torch import Tensor

    from infoxlm_core.training.finetuning.task_learner import Training


class ClassificationConfig(RecipeConfig):
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
    file says any, a tenth of the rows is set aside as a test."""

    train_languages: tuple[Language, ...] = ("en",)
    """Languages to train on; every language is tested."""

    mixed: Flag = False
    """Also test premises of one language with hypotheses of another, every two languages."""

    head_dropout: Share = 0.1
    """Before the classifier's layers."""

    @model_validator(mode="after")
    def _columns_differ(self) -> Self:
        if self.label in (self.text, self.text_pair) or self.text == self.text_pair:
            raise ValueError(f"text, text_pair and label must be different columns, not {self.label!r:.80} twice")
        return self


def loss(logits: "Tensor", targets: "Tensor", lengths: Sequence[int]) -> tuple["Tensor", "Tensor"]:  # noqa: ARG001
    """Cross-entropy of (N, labels) logits, summed, and which of the N are right."""
    import torch.nn.functional as F

    from infoxlm_core.model.objectives import full_precision

    return F.cross_entropy(full_precision(logits), targets, reduction="sum"), logits.argmax(dim=1) == targets


HEAD = Head(
    name="classification",
    architecture="SequenceClassification",
    by_token=False,
    names=((r"^dense\.", "classifier.dense."), (r"^output\.", "classifier.out_proj.")),
    bert_names=((r"^dense\.", "roberta.pooler.dense."), (r"^output\.", "classifier.")),
    loss=loss,
)


class Classification(Task[ClassificationConfig]):
    """One label for each row of labelled text."""

    name: ClassVar[str] = "classification"
    settings = ClassificationConfig
    metrics: ClassVar[tuple[str, ...]] = ("accuracy",)
    unit: ClassVar[str] = "rows"
    order = ("en", "fr", "es", "de", "el", "bg", "ru", "tr", "ar", "vi", "th", "zh", "hi", "sw", "ur")
    tables: ClassVar[tuple[str, ...]] = ("xnli",)
    presets: ClassVar[Mapping[str, Preset]] = {"xnli": Preset("xnli"), "classification": Preset()}
    head = HEAD
    only_tested: ClassVar[tuple[str, ...]] = ("mixed",)

    def check_plan(self, settings: ClassificationConfig, grid_points: int, where: str) -> None:  # noqa: ARG002
        if settings.data is None:
            raise ConfigError(f"{where}.settings.data: a suite has no corpus of its own: name files or a folder")

    def check(self, settings: ClassificationConfig, chosen: bool) -> None:
        from infoxlm_core.tasks import classifying

        classifying.check(settings, chosen)

    def tests(self, settings: ClassificationConfig) -> list[Path]:
        from infoxlm_core.tasks import labelled, labelled_files

        places = [place for path in labelled.paths(settings, None) for place in labelled_files.find(path)]
        return [place.path for place in places if place.split in (None, "test")]

    def training(self, settings: ClassificationConfig, encoder: Path, corpus: Path | None) -> "Training":
        from infoxlm_core.tasks import classifying

        return classifying.training(settings, encoder, corpus)

    def measure(self, settings: ClassificationConfig, model: Path, output: Path) -> Scores:
        from infoxlm_core.tasks import classifying

        return classifying.measure(settings, model, output)

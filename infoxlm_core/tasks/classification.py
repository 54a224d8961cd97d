"""Task: sentences, or sentence pairs, -> labels (XNLI, PAWS-X, SIB-200, any table)."""

from pathlib import Path
from typing import ClassVar, Literal

from infoxlm_core.config.base import Language, Share
from infoxlm_core.config.tasks import Paths, RecipeConfig
from infoxlm_core.errors import ConfigError
from infoxlm_core.languages import two_letters
from infoxlm_core.tasks.task import Fetch, Scores, Task


class ClassificationConfig(RecipeConfig):
    """Encoder + labelled text -> classifier of sentences or sentence pairs (XNLI, PAWS-X, SIB-200, any table)."""

    task: Literal["classification"] = "classification"
    """The kind of task."""

    data: str | Paths | None = None
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

    mixed: bool = False
    """Also test premises of one language with hypotheses of another, every two languages."""

    head_dropout: Share = 0.1
    """Before the classifier's layers."""


class Classification(Task[ClassificationConfig]):
    """One label for each row of labelled text."""

    name: ClassVar[str] = "classification"
    settings = ClassificationConfig
    metrics: ClassVar[tuple[str, ...]] = ("accuracy",)
    unit: ClassVar[str] = "rows"
    order = ("en", "fr", "es", "de", "el", "bg", "ru", "tr", "ar", "vi", "th", "zh", "hi", "sw", "ur")
    tables: ClassVar[tuple[str, ...]] = ("xnli",)

    def data(self, settings: ClassificationConfig) -> dict[str, list[str]]:
        return {"data": [settings.data] if isinstance(settings.data, str) else list(settings.data or ())}

    def localise(self, settings: ClassificationConfig, fetch: Fetch) -> ClassificationConfig:
        data = settings.data
        if data is None:  # the labelled set of the prepared corpus
            return settings
        return settings.model_copy(update={"data": fetch(data) if isinstance(data, str) else tuple(map(fetch, data))})

    def without_data(self, settings: ClassificationConfig) -> ClassificationConfig:
        return settings.model_copy(update={"data": ""})

    def check_plan(self, settings: ClassificationConfig, grid_points: int, where: str) -> None:  # noqa: ARG002
        if settings.data is None:
            raise ConfigError(f"{where}.settings.data: a suite has no corpus of its own: name files or a folder")

    def check(self, settings: ClassificationConfig, chosen: bool) -> None:
        from infoxlm_core.tasks import classifying

        classifying.check(settings, chosen)

    def training_part(self, settings: ClassificationConfig) -> tuple[ClassificationConfig, dict[str, list[str]]]:
        return settings.model_copy(update={"mixed": False}), self.data(settings)

    def depends_on_workers(self, settings: ClassificationConfig, encoder: Path) -> bool:
        from infoxlm_core.model import pretrained

        ours = pretrained.is_ours(pretrained.read_config(encoder))
        return settings.dropout > 0 or (settings.head_dropout > 0 and not ours)

    def training_languages(self, settings: ClassificationConfig) -> list[str]:
        return list(dict.fromkeys(map(two_letters, settings.train_languages)))

    def declared_languages(self, settings: ClassificationConfig) -> list[str]:
        return [two_letters(language) for language in settings.train_languages]

    def measure(self, settings: ClassificationConfig, model: Path, output: Path) -> Scores:
        from infoxlm_core.tasks import classifying

        return Scores(**classifying.measure(settings, model, None, output))

"""Task: sentences, or sentence pairs, -> labels (XNLI, PAWS-X, SIB-200, any table)."""

from pathlib import Path
from typing import ClassVar

from infoxlm_core.config import FinetuningConfig
from infoxlm_core.errors import ConfigError
from infoxlm_core.languages import two_letters
from infoxlm_core.tasks.task import Fetch, Scores, Task


class Classification(Task[FinetuningConfig]):
    """One label for each row of labelled text."""

    name: ClassVar[str] = "classification"
    settings = FinetuningConfig
    metrics: ClassVar[tuple[str, ...]] = ("accuracy",)
    unit: ClassVar[str] = "rows"
    order = ("en", "fr", "es", "de", "el", "bg", "ru", "tr", "ar", "vi", "th", "zh", "hi", "sw", "ur")
    tables: ClassVar[tuple[str, ...]] = ("xnli",)

    def data(self, settings: FinetuningConfig) -> dict[str, list[str]]:
        return {"data": [settings.data] if isinstance(settings.data, str) else list(settings.data or ())}

    def localise(self, settings: FinetuningConfig, fetch: Fetch) -> FinetuningConfig:
        data = settings.data
        if data is None:  # the labelled set of the prepared corpus
            return settings
        return settings.model_copy(update={"data": fetch(data) if isinstance(data, str) else tuple(map(fetch, data))})

    def without_data(self, settings: FinetuningConfig) -> FinetuningConfig:
        return settings.model_copy(update={"data": ""})

    def check_plan(self, settings: FinetuningConfig, grid_points: int, where: str) -> None:  # noqa: ARG002
        if settings.data is None:
            raise ConfigError(f"{where}.settings.data: a suite has no corpus of its own: name files or a folder")

    def check(self, settings: FinetuningConfig, chosen: bool) -> None:
        from infoxlm_core.tasks import classifying

        classifying.check(settings, chosen)

    def training_part(self, settings: FinetuningConfig) -> tuple[FinetuningConfig, dict[str, list[str]]]:
        return settings.model_copy(update={"mixed": False}), self.data(settings)

    def depends_on_workers(self, settings: FinetuningConfig, encoder: Path) -> bool:
        from infoxlm_core.model import pretrained

        ours = pretrained.is_ours(pretrained.read_config(encoder))
        return settings.dropout > 0 or (settings.head_dropout > 0 and not ours)

    def training_languages(self, settings: FinetuningConfig) -> list[str]:
        return list(dict.fromkeys(map(two_letters, settings.train_languages)))

    def declared_languages(self, settings: FinetuningConfig) -> list[str]:
        return [two_letters(language) for language in settings.train_languages]

    def measure(self, settings: FinetuningConfig, model: Path, output: Path) -> Scores:
        from infoxlm_core.tasks import classifying

        return Scores(**classifying.measure(settings, model, None, output))

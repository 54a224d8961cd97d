"""Task: find the entities among the words of a sentence (WikiANN, XTREME's panx, any BIO tags)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from infoxlm_core.tasks.named_entities.head import HEAD
from infoxlm_core.tasks.named_entities.settings import NamedEntitiesConfig
from infoxlm_core.tasks.scores import Scores
from infoxlm_core.tasks.task import Preset, Task

if TYPE_CHECKING:
    from infoxlm_core.training.finetuning.task_learner import Training


class NamedEntities(Task[NamedEntitiesConfig]):
    """Tag the words of a sentence. An entity counts only if all its words and its type are right."""

    name: ClassVar[str] = "named_entities"
    settings = NamedEntitiesConfig
    metrics: ClassVar[tuple[str, ...]] = ("f1",)
    unit: ClassVar[str] = "sentences"
    order: ClassVar[Sequence[str]] = (
        "en", "af", "ar", "bg", "bn", "de", "el", "es", "et", "eu", "fa", "fi", "fr", "he", "hi", "hu", "id", "it",
        "ja", "jv", "ka", "kk", "ko", "ml", "mr", "ms", "my", "nl", "pt", "ru", "sw", "ta", "te", "th", "tl", "tr",
        "ur", "vi", "yo", "zh",
    )  # fmt: skip
    presets: ClassVar[Mapping[str, Preset]] = {"panx": Preset(), "named-entities": Preset()}
    head = HEAD

    def check(self, settings: NamedEntitiesConfig, has_grid: bool) -> None:
        from infoxlm_core.tasks.named_entities import run

        run.check(settings, has_grid)

    def list_test_files(self, settings: NamedEntitiesConfig) -> list[Path]:
        from infoxlm_core.tasks.named_entities.files import list_files

        return [file.path for file in list_files(settings) if file.split == "test"]

    def read_training(self, settings: NamedEntitiesConfig, encoder: Path, corpus: Path | None) -> "Training":  # noqa: ARG002
        from infoxlm_core.tasks.named_entities import run

        return run.read_training(settings, encoder)

    def measure(self, settings: NamedEntitiesConfig, model: Path, output: Path) -> Scores:
        from infoxlm_core.tasks.named_entities import run

        return run.measure(settings, model, output)

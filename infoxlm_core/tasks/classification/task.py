"""Task: sentences, or sentence pairs, -> labels (XNLI, PAWS-X, SIB-200, any table)."""

from collections.abc import Collection, Mapping
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, ClassVar

from infoxlm_core.errors import ConfigError
from infoxlm_core.tasks.classification.head import HEAD
from infoxlm_core.tasks.classification.settings import ClassificationConfig
from infoxlm_core.tasks.scores import Scores
from infoxlm_core.tasks.task import Preset, Task

if TYPE_CHECKING:
    from infoxlm_core.config import EvaluationConfig
    from infoxlm_core.tasks.questions import Questions
    from infoxlm_core.training.finetuning.task_learner import Training


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
    roles: ClassVar[tuple[str, ...]] = ("data", "translated_test")
    only_tested: ClassVar[tuple[str, ...]] = ("mixed", "translated_test")

    def has_training_text(self, settings: ClassificationConfig, corpus_files: Collection[str]) -> bool:
        # The labels of a prepared corpus are the names of its corpora of pairs, and a classifier needs two labels.
        labels = {PurePosixPath(name).stem for name in corpus_files if name.startswith("pairs/")}
        return settings.data is not None or ("labelled.parquet" in corpus_files and len(labels) > 1)

    def check_plan(self, settings: ClassificationConfig, grid_points: int, where: str) -> None:  # noqa: ARG002
        if settings.data is None:
            raise ConfigError(f"{where}.settings.data: a suite has no corpus. Name files or a folder.")

    def check(self, settings: ClassificationConfig, has_grid: bool) -> None:
        from infoxlm_core.tasks.classification import run

        run.check(settings, has_grid)

    def list_test_files(self, settings: ClassificationConfig) -> list[Path]:
        from infoxlm_core.tasks.classification.table import list_files, select_translations

        files = list_files(settings, None)
        if settings.translated_test:
            files += list_files(select_translations(settings), None)
        return [file.path for file in files if file.split in (None, "test")]

    def read_training(self, settings: ClassificationConfig, encoder: Path, corpus: Path | None) -> "Training":
        from infoxlm_core.tasks.classification import run

        return run.read_training(settings, encoder, corpus)

    def measure(self, settings: ClassificationConfig, model: Path, output: Path) -> Scores:
        from infoxlm_core.tasks.classification import run

        return run.measure(settings, model, output)

    def measure_held_out(self, questions: "Questions", model: Path, config: "EvaluationConfig") -> Scores:
        from infoxlm_core.tasks.classification import held_out

        return held_out.measure(model, questions.pivot, config)

"""Task: questions about paragraphs -> answers cut out of them (MLQA, XQuAD, TyDiQA, SQuAD)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from infoxlm_core.errors import ConfigError
from infoxlm_core.tasks.question_answering.head import HEAD
from infoxlm_core.tasks.question_answering.settings import TRAINED, AnsweringConfig
from infoxlm_core.tasks.scores import Scores
from infoxlm_core.tasks.task import Fetch, Preset, Task

if TYPE_CHECKING:
    from infoxlm_core.training.finetuning.task_learner import Training


class QuestionAnswering(Task[AnsweringConfig]):
    """Find where in its paragraph the answer to a question starts and ends."""

    name: ClassVar[str] = "question_answering"
    settings = AnsweringConfig
    metrics: ClassVar[tuple[str, ...]] = ("f1", "exact_match")
    order: ClassVar[Sequence[str]] = ("en", "es", "de", "ar", "hi", "vi", "zh")
    tables: ClassVar[tuple[str, ...]] = ("mlqa",)
    presets: ClassVar[Mapping[str, Preset]] = {
        "mlqa": Preset("mlqa", {"normaliser": "mlqa"}),
        **dict.fromkeys(("xquad", "tydiqa", "squad", "question-answering"), Preset()),
    }
    head = HEAD
    roles: ClassVar[tuple[str, ...]] = ("train", "dev", "test", "translated_test")
    only_tested: ClassVar[tuple[str, ...]] = ("test", "mixed", "translated_test")

    def build_test_settings(self, data: str) -> dict[str, Any]:
        return {"train": [TRAINED], "test": [data]}

    def localise(self, settings: AnsweringConfig, fetch: Fetch) -> AnsweringConfig:
        def fetch_unless_placeholder(source: str) -> str:
            return source if source == TRAINED else fetch(source)

        return super().localise(settings, fetch_unless_placeholder)

    def check_plan(self, settings: AnsweringConfig, grid_points: int, where: str) -> None:
        if grid_points > 1 and not settings.dev:
            raise ConfigError(
                f"{where}.grid: {grid_points} points, but no development sets to choose by. Give settings.dev."
            )

    def check(self, settings: AnsweringConfig, has_grid: bool) -> None:  # noqa: ARG002 - `check_plan` has checked it
        from infoxlm_core.tasks.question_answering import run

        run.check(settings)

    def list_test_files(self, settings: AnsweringConfig) -> list[Path]:
        from infoxlm_core.tasks.question_answering import files

        test_files = list(files.find_sets(settings.test, "test", settings.mixed).values())
        if settings.translated_test:
            test_files += files.find_sets(settings.translated_test, "test").values()
        return test_files

    def read_training(self, settings: AnsweringConfig, encoder: Path, corpus: Path | None) -> "Training":  # noqa: ARG002
        from infoxlm_core.tasks.question_answering import run

        return run.read_training(settings, encoder)

    def list_training_languages(self, settings: AnsweringConfig) -> list[str]:
        from infoxlm_core.tasks.question_answering import run

        return run.list_training_languages(settings)

    def measure(self, settings: AnsweringConfig, model: Path, output: Path) -> Scores:
        from infoxlm_core.tasks.question_answering import run

        return run.measure(settings, model, output)

    def describe(self, settings: AnsweringConfig, table: str) -> dict[str, str]:  # noqa: ARG002
        return {"normaliser": settings.normaliser}

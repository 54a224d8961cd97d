"""Task: questions about paragraphs -> answers cut out of them (MLQA, XQuAD, TyDiQA, SQuAD)."""

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from infoxlm_core.config import AnsweringConfig
from infoxlm_core.errors import ConfigError
from infoxlm_core.tasks.task import Fact, Fetch, Scores, Task

ROLES = ("train", "dev", "test")


class QuestionAnswering(Task[AnsweringConfig]):
    """Where in its paragraph the answer to a question starts and ends."""

    name: ClassVar[str] = "question_answering"
    settings = AnsweringConfig
    metrics: ClassVar[tuple[str, ...]] = ("f1", "exact_match")
    order: ClassVar[Sequence[str]] = ("en", "es", "de", "ar", "hi", "vi", "zh")
    tables: ClassVar[tuple[str, ...]] = ("mlqa",)

    def data(self, settings: AnsweringConfig) -> dict[str, list[str]]:
        return {role: list(getattr(settings, role)) for role in ROLES}

    def localise(self, settings: AnsweringConfig, fetch: Fetch) -> AnsweringConfig:
        return settings.model_copy(update={role: tuple(map(fetch, getattr(settings, role))) for role in ROLES})

    def without_data(self, settings: AnsweringConfig) -> AnsweringConfig:
        return settings.model_copy(update={role: () for role in ROLES})

    def check_plan(self, settings: AnsweringConfig, grid_points: int, where: str) -> None:
        if grid_points > 1 and not settings.dev:
            raise ConfigError(
                f"{where}.grid: {grid_points} places and no development sets to choose by: give settings.dev, or one "
                "place"
            )

    def check(self, settings: AnsweringConfig, chosen: bool) -> None:  # noqa: ARG002 - `check_plan` has looked at it
        from infoxlm_core.tasks import reading

        reading.check(settings)

    def training_part(self, settings: AnsweringConfig) -> tuple[AnsweringConfig, dict[str, list[str]]]:
        part = settings.model_copy(update={"test": (), "mixed": False})
        return part, {"train": list(settings.train), "dev": list(settings.dev)}

    def depends_on_workers(self, settings: AnsweringConfig, encoder: Path) -> bool:  # noqa: ARG002 - no head dropout
        return settings.dropout > 0

    def training_languages(self, settings: AnsweringConfig) -> list[str]:
        from infoxlm_core.tasks import reading

        return reading.training_languages(settings)

    def measure(self, settings: AnsweringConfig, model: Path, output: Path) -> Scores:
        from infoxlm_core.tasks import reading

        return Scores(**reading.measure(settings, model, output))

    def describe(self, settings: AnsweringConfig, table: str) -> list[Fact]:
        paper = "mlqa" if table == "mlqa" else ""
        return [Fact("normaliser", settings.normaliser, paper, settings.normaliser == paper if paper else None)]

"""Task: questions about paragraphs -> answers cut out of them (MLQA, XQuAD, TyDiQA, SQuAD)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import model_validator

from infoxlm_core.config.base import Flag, PositiveInt
from infoxlm_core.config.tasks import Paths, RecipeConfig
from infoxlm_core.errors import ConfigError
from infoxlm_core.model.task_head import Head
from infoxlm_core.tasks.task import Fact, Fetch, Preset, Scores, Task

if TYPE_CHECKING:
    from torch import Tensor

    from infoxlm_core.training.finetuning.task_learner import Training


TRAINED = "train.en.json"  # for the training text of a reader that is trained: its language counts for the gap


class AnsweringConfig(RecipeConfig):
    """Encoder + questions about paragraphs, in SQuAD's format -> a reader that marks the answer (MLQA, XQuAD)."""

    task: Literal["question_answering"] = "question_answering"
    """The kind of task."""

    train: Paths
    """Files in SQuAD's format."""

    dev: tuple[str, ...] = ()
    """Files or folders of development sets, a file a language; for the rules of selection but `last`."""

    test: Paths
    """Files or folders in the layout of MLQA, XQuAD or TyDiQA: `test-context-de-question-de.json`, `xquad.de.json`."""

    normaliser: Literal["mlqa", "squad"] = "squad"
    """How answers are compared: as MLQA does in its seven languages, or as SQuAD does (XQuAD, TyDiQA)."""

    mixed: Flag = False
    """Also questions of one language about paragraphs of another, where there are such files."""

    max_tokens: PositiveInt = 384
    """Of one window: question, part of the paragraph, special tokens."""

    question_tokens: PositiveInt = 64
    """Longer questions are cut."""

    stride: PositiveInt = 128
    """Tokens of the paragraph that two windows share."""

    answer_tokens: PositiveInt = 30
    """Longer answers are not given."""

    n_best: PositiveInt = 20
    """Starts and ends that are combined."""

    @model_validator(mode="after")
    def _windows_move(self) -> Self:
        if self.question_tokens + self.stride + 4 >= self.max_tokens:
            raise ValueError(
                f"max_tokens ({self.max_tokens}) must exceed question_tokens ({self.question_tokens}) + stride "
                f"({self.stride}) + 4 special tokens"
            )
        if self.selection.rule != "last" and not self.dev:
            raise ValueError(f"selection.rule {self.selection.rule} needs development sets: give dev")
        return self


def loss(logits: "Tensor", targets: "Tensor", lengths: Sequence[int]) -> tuple["Tensor", "Tensor"]:
    """Mean cross-entropy of start and end in (T, 2) logits, summed over N windows, and in which both are right."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    from infoxlm_core.model.objectives import span_losses

    padded = pad_sequence(logits.split(list(lengths)), batch_first=True, padding_value=-torch.inf)
    return span_losses(padded, targets).sum(), (padded.argmax(dim=1) == targets).all(dim=1)


HEAD = Head(
    name="question_answering",
    architecture="QuestionAnswering",
    by_token=True,
    names=((r"^output\.", "qa_outputs."),),
    bert_names=((r"^output\.", "qa_outputs."),),
    loss=loss,
    outputs=2,
    fields=("start_logits", "end_logits"),
)


class QuestionAnswering(Task[AnsweringConfig]):
    """Where in its paragraph the answer to a question starts and ends."""

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
    roles: ClassVar[tuple[str, ...]] = ("train", "dev", "test")
    only_tested: ClassVar[tuple[str, ...]] = ("test", "mixed")

    def for_testing(self, data: str) -> dict[str, Any]:
        return {"train": [TRAINED], "test": [data]}

    def localise(self, settings: AnsweringConfig, fetch: Fetch) -> AnsweringConfig:
        return super().localise(settings, lambda source: source if source == TRAINED else fetch(source))

    def check_plan(self, settings: AnsweringConfig, grid_points: int, where: str) -> None:
        if grid_points > 1 and not settings.dev:
            raise ConfigError(
                f"{where}.grid: {grid_points} places and no development sets to choose by: give settings.dev, or one "
                "place"
            )

    def check(self, settings: AnsweringConfig, chosen: bool) -> None:  # noqa: ARG002 - `check_plan` has looked at it
        from infoxlm_core.tasks import reading

        reading.check(settings)

    def tests(self, settings: AnsweringConfig) -> list[Path]:
        from infoxlm_core.tasks import squad

        return list(squad.cells(settings.test, "test", settings.mixed).values())

    def training(self, settings: AnsweringConfig, encoder: Path, corpus: Path | None) -> "Training":  # noqa: ARG002
        from infoxlm_core.tasks import reading

        return reading.training(settings, encoder)

    def training_languages(self, settings: AnsweringConfig) -> list[str]:
        from infoxlm_core.tasks import reading

        return reading.training_languages(settings)

    def measure(self, settings: AnsweringConfig, model: Path, output: Path) -> Scores:
        from infoxlm_core.tasks import reading

        return reading.measure(settings, model, output)

    def describe(self, settings: AnsweringConfig, table: str) -> list[Fact]:
        paper = "mlqa" if table == "mlqa" else ""
        return [Fact("normaliser", settings.normaliser, paper, settings.normaliser == paper if paper else None)]

"""Task: answer questions with a span of a paragraph (MLQA, XQuAD, TyDiQA, SQuAD)."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import model_validator

from infoxlm_core.config.base import PositiveInt
from infoxlm_core.config.tasks import CrossLingualConfig, Paths
from infoxlm_core.errors import ConfigError
from infoxlm_core.model.task_head import Head
from infoxlm_core.tasks.question_answering.answers import Normaliser
from infoxlm_core.tasks.task import Fetch, Preset, Task

if TYPE_CHECKING:
    from torch import Tensor


# Path in place of training files for readers that are only measured. The name sets English as the source language.
TRAIN_PLACEHOLDER = "train.en.json"


class AnsweringConfig(CrossLingualConfig):
    """Fine-tune an encoder to answer questions about paragraphs, in the format of SQuAD (MLQA, XQuAD, TyDiQA)."""

    task: Literal["question_answering"] = "question_answering"
    """The kind of task."""

    train: Paths
    """Files in SQuAD's format."""

    dev: tuple[str, ...] = ()
    """Files or directories of development sets, one file per language. Required unless `selection.rule` is `last`."""

    test: Paths
    """Files or directories in the layout of MLQA, XQuAD or TyDiQA, such as `test-context-de-question-de.json` or
    `xquad.de.json`."""

    normaliser: Normaliser = "squad"
    """Rules for comparing answers. mlqa: MLQA's rules for its seven languages · squad: SQuAD's rules, also for XQuAD
    and TyDiQA."""

    max_tokens: PositiveInt = 384
    """Maximum number of tokens in a window: the question, a part of the paragraph, and special tokens."""

    question_tokens: PositiveInt = 64
    """Maximum number of tokens in a question. Longer questions are truncated."""

    stride: PositiveInt = 128
    """Number of paragraph tokens that two consecutive windows share."""

    answer_tokens: PositiveInt = 30
    """Maximum number of tokens in a predicted answer."""

    n_best: PositiveInt = 20
    """Number of most probable start tokens and of end tokens in a window to combine for the best answer."""

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
    """Return the summed loss of N windows, and a mask (N,) of the windows with the right first and last token.

    A window's loss is the mean cross-entropy of the answer's first and last token.

    Args:
        logits: logits (T, 2) of N packed windows.
        targets: positions (N, 2) of the answer's first and last token.
        lengths: number of tokens in each window.
    """
    import torch
    from torch.nn.utils.rnn import pad_sequence

    from infoxlm_core.model.objectives import span_losses

    window_logits = logits.split(list(lengths))
    padded_logits = pad_sequence(window_logits, batch_first=True, padding_value=-torch.inf)  # (N, L, 2)
    is_right = (padded_logits.argmax(dim=1) == targets).all(dim=1)  # (N,)
    return span_losses(padded_logits, targets).sum(), is_right


HEAD = Head(
    name="question_answering",
    architecture="QuestionAnswering",
    is_per_token=True,
    name_rules=((r"^output\.", "qa_outputs."),),
    bert_name_rules=((r"^output\.", "qa_outputs."),),
    loss=loss,
    output_count=2,
    output_fields=("start_logits", "end_logits"),
)


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
    data_fields: ClassVar[tuple[str, ...]] = ("train", "dev", "test", "translated_test")
    test_only_fields: ClassVar[tuple[str, ...]] = ("test", "mixed", "translated_test")

    def build_test_settings(self, data: str) -> dict[str, Any]:
        return {"train": [TRAIN_PLACEHOLDER], "test": [data]}

    def localise(self, settings: AnsweringConfig, fetch: Fetch) -> AnsweringConfig:
        return super().localise(settings, lambda path: path if path == TRAIN_PLACEHOLDER else fetch(path))

    def check_plan(self, settings: AnsweringConfig, grid_points: int, where: str) -> None:
        if grid_points > 1 and not settings.dev:
            raise ConfigError(
                f"{where}.grid: {grid_points} points, but no development sets to choose by. Give settings.dev."
            )

    def list_training_languages(self, settings: AnsweringConfig) -> list[str]:
        return self.run_module.list_training_languages(settings)

    def describe(self, settings: AnsweringConfig, table: str) -> dict[str, str]:  # noqa: ARG002
        return {"normaliser": settings.normaliser}

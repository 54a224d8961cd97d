"""Settings of question answering: which files hold the questions, and how an encoder is fine-tuned on them."""

from typing import Literal, Self

from pydantic import model_validator

from infoxlm_core.config.base import PositiveInt
from infoxlm_core.config.tasks import CrossLingualConfig, Paths

TRAINED = "train.en.json"  # stands for the training text of a reader that is only measured; names the source language


class AnsweringConfig(CrossLingualConfig):
    """Fine-tune an encoder to answer questions about paragraphs, in the format of SQuAD (MLQA, XQuAD, TyDiQA)."""

    task: Literal["question_answering"] = "question_answering"
    """The kind of task."""

    train: Paths
    """Files in SQuAD's format."""

    dev: tuple[str, ...] = ()
    """Files or folders of development sets, one file per language. All values of `selection.rule` except `last` need
    them."""

    test: Paths
    """Files or folders in the layout of MLQA, XQuAD or TyDiQA: `test-context-de-question-de.json`, `xquad.de.json`."""

    normaliser: Literal["mlqa", "squad"] = "squad"
    """How answers are compared. mlqa: as MLQA does in its seven languages · squad: as SQuAD does, also for XQuAD and
    TyDiQA."""

    max_tokens: PositiveInt = 384
    """Largest number of tokens of a window, which consists of the question, a part of the paragraph, and special
    tokens."""

    question_tokens: PositiveInt = 64
    """Largest number of tokens of a question. Longer questions are truncated."""

    stride: PositiveInt = 128
    """Number of paragraph tokens that two consecutive windows share."""

    answer_tokens: PositiveInt = 30
    """Largest number of tokens of a predicted answer."""

    n_best: PositiveInt = 20
    """Number of most probable starts and ends of a window that are combined to find the best answer."""

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

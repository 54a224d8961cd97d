"""The description of a task's head, from which `task_models` builds a model.

It imports neither torch nor transformers, because a task's settings are read together with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

Names = tuple[tuple[str, str], ...]  # (regular expression of our name, Hugging Face's)


@dataclass(frozen=True)
class Head:
    """A head, its loss, and the names of its parameters in Hugging Face's classes."""

    name: str  # of the task, and of the loss in the curves
    architecture: str  # such as `SequenceClassification`, for `AutoModelForSequenceClassification`
    by_token: bool
    """Whether every token has logits, from dropout and a linear map. Otherwise each sequence has them, from position 0,
    by dropout, dense, tanh, dropout and a linear map."""
    names: Names  # our parameters -> those of Hugging Face's RoBERTa and XLM-R classes
    bert_names: Names  # our parameters -> those of its BERT classes, with `roberta.` before the encoder
    loss: Callable[[Tensor, Tensor, Sequence[int]], tuple[Tensor, Tensor]]
    """Logits, targets, lengths of the sequences -> the sum of the losses, and which targets were hit."""
    count: Callable[[Tensor], int] = len  # targets -> the number of losses that `loss` sums
    outputs: int = 0  # number of logits; 0: one for each label
    fields: tuple[str, ...] = ("logits",)  # of Hugging Face's output; each is a column of the logits

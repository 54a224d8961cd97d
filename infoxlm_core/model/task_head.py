"""What stands on an encoder for a task, described by the task; `task_models` builds it.

It imports neither torch nor transformers, since a task's settings are read together with it.
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
    """A head, its loss, and the classes of Hugging Face that have it."""

    name: str  # of the task, and of the loss in the curves
    architecture: str  # `SequenceClassification` of `AutoModelForSequenceClassification` and its like
    by_token: bool
    """Whether every token has logits: dropout and a linear map of each; else the sequence has, from position 0, through
    dropout, dense, tanh, dropout and a linear map."""
    names: Names  # our parameters -> those of Hugging Face's RoBERTa and XLM-R classes
    bert_names: Names  # likewise of its BERT classes, with `roberta.` before the encoder
    loss: Callable[[Tensor, Tensor, Sequence[int]], tuple[Tensor, Tensor]]
    """Logits, targets, lengths of the sequences -> the sum of the losses, and which targets were hit."""
    count: Callable[[Tensor], int] = len  # targets -> of how many losses `loss` is the sum
    outputs: int = 0  # logits; 0: as many as there are labels
    fields: tuple[str, ...] = ("logits",)  # of Hugging Face's output; of several each is a column of the logits

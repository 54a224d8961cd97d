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
    """A head, its loss, and the classes of Hugging Face that have it.

    Attributes:
        name: of the task, and of the loss in the curves.
        architecture: `SequenceClassification` of `AutoModelForSequenceClassification` and its like.
        by_token: whether every token has logits: dropout and a linear map of each; else the sequence has, from
            position 0, through dropout, dense, tanh, dropout and a linear map.
        names: our parameters -> those of Hugging Face's RoBERTa and XLM-R classes.
        bert_names: likewise of its BERT classes, with `roberta.` before the encoder.
        loss: (logits, targets, lengths of the sequences) -> the sum of the losses, and which targets were hit.
        count: targets -> of how many losses `loss` is the sum.
        outputs: logits; 0: as many as there are labels.
        fields: what Hugging Face's output calls the logits; of several fields each is a column.
    """

    name: str
    architecture: str
    by_token: bool
    names: Names
    bert_names: Names
    loss: Callable[[Tensor, Tensor, Sequence[int]], tuple[Tensor, Tensor]]
    count: Callable[[Tensor], int] = len
    outputs: int = 0
    fields: tuple[str, ...] = ("logits",)

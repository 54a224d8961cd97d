"""The description of a task's head, from which `task_models` builds a model.

This module imports neither torch nor transformers, because it is imported wherever the settings of a task are read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

NameRules = Sequence[tuple[str, str]]  # (regular expression of our name, replacement); the first match is used


@dataclass(frozen=True)
class Head:
    """A head, its loss, and the names of its parameters in Hugging Face's classes."""

    name: str  # name of the task, and of its loss among the metrics
    architecture: str  # such as `SequenceClassification`, for `AutoModelForSequenceClassification`
    is_per_token: bool
    """Whether the head computes logits for every token, by dropout and a linear layer. Otherwise it computes them for
    every sequence, from its first token, by dropout, dense, tanh, dropout and a linear layer."""
    name_rules: NameRules  # names of our parameters -> names in Hugging Face's RoBERTa and XLM-R classes
    bert_name_rules: NameRules  # the same for its BERT classes; encoder names begin with `roberta.` here too
    loss: Callable[[Tensor, Tensor, Sequence[int]], tuple[Tensor, Tensor]]
    """(logits, targets, sequence lengths) -> (sum of the losses, whether each prediction is right)."""
    count_losses: Callable[[Tensor], int] = len  # targets -> number of losses in the sum
    output_count: int = 0  # number of logits; 0: one per label
    output_fields: tuple[str, ...] = ("logits",)  # fields of Hugging Face's output that hold the logits

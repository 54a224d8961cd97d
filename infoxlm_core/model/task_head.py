"""The description of a task's head. `task_models` builds the head.

This module imports neither torch nor transformers, because every reader of task settings imports it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

NameRules = Sequence[tuple[str, str]]  # (regular expression for our name, replacement); the first match applies


@dataclass(frozen=True)
class Head:
    """A head, its loss, and its parameters' names in Hugging Face's classes."""

    name: str  # name of the task and of its loss metric
    architecture: str  # such as `SequenceClassification` for `AutoModelForSequenceClassification`
    is_per_token: bool
    """Whether the head computes logits for every token: dropout, linear. Otherwise, the head computes logits for every
    sequence from the first token: dropout, dense, tanh, dropout, linear."""
    name_rules: NameRules  # names of our parameters -> names in Hugging Face's RoBERTa and XLM-R classes
    bert_name_rules: NameRules  # the same for its BERT classes; the encoder's prefix is `roberta.` here, too
    loss: Callable[[Tensor, Tensor, Sequence[int]], tuple[Tensor, Tensor]]
    """(logits, targets, sequence lengths) -> (sum of the losses, mask of the correct predictions)."""
    count_losses: Callable[[Tensor], int] = len  # targets -> number of losses in the sum
    output_count: int = 0  # number of logits; 0: one per label
    output_fields: tuple[str, ...] = ("logits",)  # names of the logits in Hugging Face's output

"""The head of named entities: a label for the first token of every word. It imports torch only to compute a loss."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from infoxlm_core.model.task_head import Head

if TYPE_CHECKING:
    from torch import Tensor

NO_TARGET = -100  # target of tokens that are not the first token of a word


def loss(logits: "Tensor", targets: "Tensor", lengths: Sequence[int]) -> tuple["Tensor", "Tensor"]:
    """Return the summed cross-entropy of first tokens, and a bool (T,) that is True for right tokens.

    Args:
        logits: (T, labels) of N packed sentences.
        targets: (N, longest sentence) label numbers; NO_TARGET at other tokens than the first of a word.
        lengths: tokens of each sentence.
    """
    import torch
    import torch.nn.functional as F

    from infoxlm_core.model.objectives import full_precision

    packed = torch.cat([row[:length] for row, length in zip(targets, lengths, strict=True)])  # (T,)
    total = F.cross_entropy(full_precision(logits), packed, ignore_index=NO_TARGET, reduction="sum")
    return total, logits.argmax(dim=1) == packed


HEAD = Head(
    name="named_entities",
    architecture="TokenClassification",
    by_token=True,
    names=((r"^output\.", "classifier."),),
    bert_names=((r"^output\.", "classifier."),),
    loss=loss,
    count=lambda targets: int((targets != NO_TARGET).sum()),
)

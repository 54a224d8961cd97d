"""The tagging head: one label for the first piece of every word. It imports torch only when a loss is computed."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from infoxlm_core.model.task_head import Head

if TYPE_CHECKING:
    from torch import Tensor

NO_TARGET = -100  # of pieces that are not the first of a word


def loss(logits: "Tensor", targets: "Tensor", lengths: Sequence[int]) -> tuple["Tensor", "Tensor"]:
    """Cross-entropy of (T, labels) logits of first pieces, summed, and which pieces are right."""
    import torch
    import torch.nn.functional as F

    from infoxlm_core.model.objectives import full_precision

    wanted = torch.cat([row[:length] for row, length in zip(targets, lengths, strict=True)])  # (T,)
    total = F.cross_entropy(full_precision(logits), wanted, ignore_index=NO_TARGET, reduction="sum")
    return total, logits.argmax(dim=1) == wanted


HEAD = Head(
    name="named_entities",
    architecture="TokenClassification",
    by_token=True,
    names=((r"^output\.", "classifier."),),
    bert_names=((r"^output\.", "classifier."),),
    loss=loss,
    count=lambda targets: int((targets != NO_TARGET).sum()),
)

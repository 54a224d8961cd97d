"""The classification head: one label for a whole sequence. It imports torch only when a loss is computed."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from infoxlm_core.model.task_head import Head

if TYPE_CHECKING:
    from torch import Tensor


def loss(logits: "Tensor", targets: "Tensor", lengths: Sequence[int]) -> tuple["Tensor", "Tensor"]:  # noqa: ARG001
    """Return the summed cross-entropy of logits (N, labels), and a bool (N,) that is True for right predictions."""
    import torch.nn.functional as F

    from infoxlm_core.model.objectives import full_precision

    cross_entropy = F.cross_entropy(full_precision(logits), targets, reduction="sum")
    is_right = logits.argmax(dim=1) == targets  # (N,)
    return cross_entropy, is_right


HEAD = Head(
    name="classification",
    architecture="SequenceClassification",
    by_token=False,
    names=((r"^dense\.", "classifier.dense."), (r"^output\.", "classifier.out_proj.")),
    bert_names=((r"^dense\.", "roberta.pooler.dense."), (r"^output\.", "classifier.")),
    loss=loss,
)

"""The question answering head: every token is scored as the first and as the last token of the answer.

It imports torch only when a loss is computed.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from infoxlm_core.model.task_head import Head

if TYPE_CHECKING:
    from torch import Tensor


def loss(logits: "Tensor", targets: "Tensor", lengths: Sequence[int]) -> tuple["Tensor", "Tensor"]:
    """Return the mean cross-entropy of start and end, summed over windows, and a bool (N,), True if both are right.

    Args:
        logits: (T, 2) of N packed windows.
        targets: (N, 2) first and last token of the answer.
        lengths: tokens of each window.
    """
    import torch
    from torch.nn.utils.rnn import pad_sequence

    from infoxlm_core.model.objectives import span_losses

    padded = pad_sequence(logits.split(list(lengths)), batch_first=True, padding_value=-torch.inf)
    is_right = (padded.argmax(dim=1) == targets).all(dim=1)  # (N,)
    return span_losses(padded, targets).sum(), is_right


HEAD = Head(
    name="question_answering",
    architecture="QuestionAnswering",
    by_token=True,
    names=((r"^output\.", "qa_outputs."),),
    bert_names=((r"^output\.", "qa_outputs."),),
    loss=loss,
    outputs=2,
    fields=("start_logits", "end_logits"),
)

"""The losses of InfoXLM as functions of tensors alone, in nats and fp32, summed over their targets.

Sums, not means: a step divides once by the targets of all its micro-batches on all workers.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def full_precision(values: Tensor) -> Tensor:
    """bf16 and fp16 as fp32; fp32 and fp64 as they are."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def mlm_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Masked (or translation) language modelling: cross-entropy of the original tokens, summed.

    Args:
        logits: (N, V) at the chosen positions only.
        targets: (N,) ids of the tokens that stood there. N may be 0: the loss is then 0.

    Source: InfoXLM, equations 3 and 4.
    """
    return F.cross_entropy(full_precision(logits), targets, reduction="sum")


def xlco_logits(
    query: Tensor, key: Tensor, queue: Tensor, temperature: float, excluded: Tensor | None = None
) -> Tensor:
    """Similarities of each query to its key, first, and to all rows of the queue: (B, 1 + K).

    Args:
        query: (B, D) from the query encoder.
        key: (B, D) from the key encoder, without gradient; row i translates query i.
        queue: (K, D) keys of earlier steps, the negatives.
        temperature: divides the similarities; lower is sharper.
        excluded: (B, K) true where a queue row shares a meaning with the query: no negative. None: nowhere.

    Source: InfoXLM, equation 6; `excluded` is ours.
    """
    positive = (query * key).sum(dim=1, keepdim=True)  # (B, 1)
    negative = query @ queue.T  # (B, K)
    if excluded is not None:
        negative = negative.masked_fill(excluded, -torch.inf)
    return full_precision(torch.cat([positive, negative], dim=1)) / temperature  # (B, 1 + K)


def xlco_loss(logits: Tensor) -> Tensor:
    """Cross-lingual contrast (InfoNCE), summed over the batch: find the translation among K others.

    Args:
        logits: (B, 1 + K) of `xlco_logits`, the translation first.

    Source: InfoXLM, equation 6.
    """
    target = torch.zeros(len(logits), dtype=torch.long, device=logits.device)
    return F.cross_entropy(logits, target, reduction="sum")


def xlco_hits(logits: Tensor) -> Tensor:
    """How many queries have their translation on top of all 1 + K candidates; chance is B / (1 + K)."""
    return (logits[:, 0] > logits[:, 1:].amax(dim=1)).sum()

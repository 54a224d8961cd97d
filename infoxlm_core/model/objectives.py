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


def clm_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Causal language modelling: cross-entropy of each next token, summed.

    Args:
        logits: (N, V) at all positions but each sequence's last.
        targets: (N,) ids of the tokens that come next.

    Source: Lample and Conneau 2019, section 3.2.
    """
    return mlm_loss(logits, targets)


def nsp_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Next-sentence prediction: does the second part of a sequence follow the first? Summed over sequences.

    Args:
        logits: (B, 2).
        labels: (B,) 0: it follows, 1: it comes from elsewhere.

    Source: Devlin et al. 2019, section 3.1.
    """
    return F.cross_entropy(full_precision(logits), labels, reduction="sum")


def span_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Where an answer starts and ends: mean of both cross-entropies, of each sequence, (N,).

    Args:
        logits: (N, L, 2) of start and end at every token, -inf beyond a sequence's last.
        targets: (N, 2) token where the answer starts, token where it ends.

    Source: Devlin et al. 2019, section 4.2.
    """
    return F.cross_entropy(full_precision(logits), targets, reduction="none").mean(dim=1)


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
    query = query / temperature  # (B, D): cheaper than to divide (B, 1 + K)
    positive = (query * key).sum(dim=1, keepdim=True)  # (B, 1)
    negative = query @ queue.T  # (B, K)
    if excluded is not None:
        negative = negative.masked_fill_(excluded, -torch.inf)
    return full_precision(torch.cat([positive, negative], dim=1))  # (B, 1 + K)


def xlco_losses(logits: Tensor) -> Tensor:
    """Cross-lingual contrast (InfoNCE) of each item, (B,): find the translation among K others.

    Args:
        logits: (B, 1 + K) of `xlco_logits`, the translation first.

    Source: InfoXLM, equation 6.
    """
    target = torch.zeros(len(logits), dtype=torch.long, device=logits.device)
    return F.cross_entropy(logits, target, reduction="none")


def xlco_hits(logits: Tensor) -> Tensor:
    """How many queries have their translation on top of all 1 + K candidates; chance is B / (1 + K)."""
    return (logits[:, 0] > logits[:, 1:].amax(dim=1)).sum()

"""The losses of InfoXLM as functions of tensors alone, in nats and fp32, summed over their targets.

Sums, not means: a step divides once by the targets of all its micro-batches on all workers.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def full_precision(values: Tensor) -> Tensor:
    """bf16 and fp16 as fp32; fp32 and fp64 as they are."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of the right answers, (N, C) logits and (N,) targets, summed; of no targets (N = 0) it is 0.

    The loss of MLM and TLM at the masked positions (InfoXLM, equations 3 and 4), of CLM at all but each sequence's last
    (Lample and Conneau 2019, section 3.2), and of NSP: 0 follows, 1 comes from elsewhere (Devlin et al. 2019, 3.1).
    """
    return F.cross_entropy(full_precision(logits), targets, reduction="sum")


def span_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Where an answer starts and ends, tokens (N, 2): mean of both cross-entropies, of each sequence, (N,).

    `logits` (N, L, 2) are of start and end at every token, -inf beyond a sequence's last.
    Source: Devlin et al. 2019, section 4.2.
    """
    return F.cross_entropy(full_precision(logits), targets, reduction="none").mean(dim=1)


def xlco_logits(
    query: Tensor, key: Tensor, queue: Tensor, temperature: float, excluded: Tensor | None = None
) -> Tensor:
    """Similarities of each query (B, D) to its key (B, D), first, and to all rows of the queue (K, D): (B, 1 + K).

    Keys have no gradient. `excluded` (B, K), which is ours, is true where a row shares a sentence with the query and is
    no negative; None: nowhere. Source: InfoXLM, equation 6.
    """
    query = query / temperature  # (B, D): cheaper than to divide (B, 1 + K)
    positive = (query * key).sum(dim=1, keepdim=True)  # (B, 1)
    negative = query @ queue.T  # (B, K)
    if excluded is not None:
        negative = negative.masked_fill_(excluded, -torch.inf)
    return full_precision(torch.cat([positive, negative], dim=1))  # (B, 1 + K)


def xlco_losses(logits: Tensor) -> Tensor:
    """Cross-lingual contrast (InfoNCE) of each item, (B,), from (B, 1 + K) logits, the translation first.

    Source: InfoXLM, equation 6.
    """
    target = torch.zeros(len(logits), dtype=torch.long, device=logits.device)
    return F.cross_entropy(logits, target, reduction="none")


def xlco_hits(logits: Tensor) -> Tensor:
    """How many queries have their translation on top of all 1 + K candidates; chance is B / (1 + K)."""
    return (logits[:, 0] > logits[:, 1:].amax(dim=1)).sum()


def share_a_sentence(mine: Tensor, theirs: Tensor) -> Tensor:
    """(B, 2) sentence ids of queries, (K, 2) of keys -> (B, K), true where they have one in common: no negative."""
    shared = mine[:, :1] == theirs[None, :, 0]
    for left, right in ((0, 1), (1, 0), (1, 1)):
        shared |= mine[:, left, None] == theirs[None, :, right]
    return shared


def have_equal_sentences(mine: Tensor, theirs: Tensor) -> Tensor:
    """(B, 2) sentence ids of queries, (K, 2) of keys -> (B, K), true where both are the same set."""
    mine, theirs = mine.sort(dim=1).values, theirs.sort(dim=1).values
    return (mine[:, :1] == theirs[None, :, 0]) & (mine[:, 1:] == theirs[None, :, 1])

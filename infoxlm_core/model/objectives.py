"""The losses of InfoXLM as pure functions, in nats and fp32, and which keys of the queue are no negatives.

Losses are sums or per item, not means: a step divides once by the targets of all micro-batches on all workers.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def full_precision(values: Tensor) -> Tensor:
    """Return bf16 and fp16 values as fp32. Values in fp32 and fp64 stay unchanged."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the summed cross-entropy of (N, C) logits and (N,) targets, or 0 if N is 0.

    It is the loss of MLM and TLM at the masked positions (InfoXLM, equations 3 and 4), of CLM at all positions but the
    last (Lample and Conneau 2019, section 3.2), and of NSP (Devlin et al. 2019, section 3.1).
    """
    return F.cross_entropy(full_precision(logits), targets, reduction="sum")


def span_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the loss of each answer, (N,): the mean of the cross-entropies of its start and its end.

    Args:
        logits: (N, L, 2) of start and end at each token; -inf after a sequence's last token.
        targets: (N, 2) tokens at which the answers start and end.

    Source: Devlin et al. 2019, section 4.2.
    """
    return F.cross_entropy(full_precision(logits), targets, reduction="none").mean(dim=1)


def xlco_logits(
    query: Tensor, key: Tensor, queue: Tensor, temperature: float, excluded: Tensor | None = None
) -> Tensor:
    """Return the similarity of each query to its key, first, and to all rows of the queue: (B, 1 + K).

    Args:
        query: (B, D).
        key: (B, D) without gradient; row i translates query i.
        queue: (K, D) without gradient.
        temperature: divides the similarities.
        excluded: (B, K) true where a row is no negative of a query; None: nowhere. This is our addition.

    Source: InfoXLM, equation 6.
    """
    query = query / temperature  # (B, D): cheaper than to divide (B, 1 + K)
    positive = (query * key).sum(dim=1, keepdim=True)  # (B, 1)
    negative = query @ queue.T  # (B, K)
    if excluded is not None:
        negative = negative.masked_fill_(excluded, -torch.inf)
    return full_precision(torch.cat([positive, negative], dim=1))  # (B, 1 + K)


def xlco_losses(logits: Tensor, margin: float = 0.0) -> Tensor:
    """Return the contrastive loss (InfoNCE) of each item, (B,).

    Args:
        logits: (B, 1 + K) similarities divided by the temperature, with the translation's in the first column.
        margin: is subtracted from the translations' logits.

    Sources: InfoXLM, equation 6, and for the margin LaBSE (Feng et al. 2022), equation 2. LaBSE's margin m is on
    similarities, so that `margin` is m / temperature.
    """
    if margin:
        logits = torch.cat([logits[:, :1] - margin, logits[:, 1:]], dim=1)
    target = torch.zeros(len(logits), dtype=torch.long, device=logits.device)
    return F.cross_entropy(logits, target, reduction="none")


def xlco_hits(logits: Tensor) -> Tensor:
    """Return how many queries are nearest to their translation among 1 + K candidates. Chance is B / (1 + K)."""
    best_negative = logits[:, 1:].amax(dim=1)  # (B,)
    return (logits[:, 0] > best_negative).sum()


def share_a_sentence(query_ids: Tensor, key_ids: Tensor) -> Tensor:
    """Return whether query and key have a sentence in common, (B, K) bool.

    Args:
        query_ids: (B, 2) ids of the two sentences of each query.
        key_ids: (K, 2) ids of the two sentences of each key.
    """
    query_ids = query_ids[:, None]  # (B, 1, 2)
    key_ids = key_ids[None]  # (1, K, 2)
    shared = query_ids[..., 0] == key_ids[..., 0]  # (B, K)
    shared |= query_ids[..., 0] == key_ids[..., 1]
    shared |= query_ids[..., 1] == key_ids[..., 0]
    shared |= query_ids[..., 1] == key_ids[..., 1]
    return shared


def have_equal_sentences(query_ids: Tensor, key_ids: Tensor) -> Tensor:
    """Return whether query and key have the same set of sentences, (B, K) bool. Arguments: see `share_a_sentence`."""
    query_ids = query_ids.sort(dim=1).values[:, None]  # (B, 1, 2)
    key_ids = key_ids.sort(dim=1).values[None]  # (1, K, 2)
    has_equal_first = query_ids[..., 0] == key_ids[..., 0]  # (B, K)
    has_equal_second = query_ids[..., 1] == key_ids[..., 1]
    return has_equal_first & has_equal_second

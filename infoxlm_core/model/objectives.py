"""InfoXLM's losses as pure functions, in nats and fp32, and the detection of false negatives in the queue.

Functions return sums or one loss per item, not means, because a training step divides the sum over all its
micro-batches by their number of targets.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def full_precision(values: Tensor) -> Tensor:
    """Convert bf16 and fp16 values to fp32. Return values in fp32 and fp64 unchanged."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the summed cross-entropy of (N, C) logits and (N,) targets; 0 if N is 0.

    This function computes the losses of MLM and TLM at masked positions (InfoXLM, equations 3 and 4), of CLM at all
    positions except the last (Lample and Conneau 2019, section 3.2), and of NSP (Devlin et al. 2019, section 3.1).
    """
    return F.cross_entropy(full_precision(logits), targets, reduction="sum")


def span_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the (N,) losses of the answers in extractive question answering.

    A loss is the mean of two cross-entropies: for the answer's first token and for its last token.

    Args:
        logits: (N, L, 2) logits of start and end at each token; -inf for padding.
        targets: (N, 2) positions of each answer's first and last token.

    Source: Devlin et al. 2019, section 4.2.
    """
    return F.cross_entropy(full_precision(logits), targets, reduction="none").mean(dim=1)


def xlco_logits(
    query: Tensor, key: Tensor, queue: Tensor, temperature: float, excluded: Tensor | None = None
) -> Tensor:
    """Return (B, 1 + K) scaled similarities of each query to its translation (column 0) and to the K keys in the queue.

    Args:
        query: (B, D) queries.
        key: (B, D) keys of the queries' translations, without gradient.
        queue: (K, D) keys of earlier steps, without gradient.
        temperature: divisor of the similarities; lower is sharper.
        excluded: (B, K) mask of the false negatives to ignore; None: ignore none, as in the paper.

    Source: InfoXLM, equation 6.
    """
    query = query / temperature  # (B, D); faster than dividing (B, 1 + K) similarities
    positive = (query * key).sum(dim=1, keepdim=True)  # (B, 1)
    negative = query @ queue.T  # (B, K)
    if excluded is not None:
        negative = negative.masked_fill_(excluded, -torch.inf)
    return full_precision(torch.cat([positive, negative], dim=1))  # (B, 1 + K)


def xlco_losses(logits: Tensor, margin: float = 0.0) -> Tensor:
    """Return the (B,) contrastive losses (InfoNCE) of the queries.

    Args:
        logits: (B, 1 + K) similarities from `xlco_logits`, with the translations in column 0.
        margin: number to subtract from the translations' logits: m / temperature for LaBSE's margin m.

    Sources: InfoXLM, equation 6; LaBSE (Feng et al. 2022), equation 2, for the margin.
    """
    if margin:
        logits = torch.cat([logits[:, :1] - margin, logits[:, 1:]], dim=1)
    target = torch.zeros(len(logits), dtype=torch.long, device=logits.device)
    return F.cross_entropy(logits, target, reduction="none")


def count_xlco_hits(logits: Tensor) -> Tensor:
    """Count the queries that are closer to their translation than to any of the K negatives. Chance is B / (1 + K)."""
    best_negative = logits[:, 1:].amax(dim=1)  # (B,)
    return (logits[:, 0] > best_negative).sum()


def find_shared_sentences(query_ids: Tensor, key_ids: Tensor) -> Tensor:
    """Return a (B, K) mask of the queries and keys that share a sentence.

    Args:
        query_ids: (B, 2) ids of the two sentences in each query's mixup pair; the same id twice without mixup.
        key_ids: (K, 2) ids of the two sentences in each key's mixup pair.
    """
    query_ids = query_ids[:, None]  # (B, 1, 2)
    key_ids = key_ids[None]  # (1, K, 2)
    # One comparison at a time needs less memory than a (B, K, 2, 2) mask.
    shared = query_ids[..., 0] == key_ids[..., 0]  # (B, K)
    shared |= query_ids[..., 0] == key_ids[..., 1]
    shared |= query_ids[..., 1] == key_ids[..., 0]
    shared |= query_ids[..., 1] == key_ids[..., 1]
    return shared


def find_equal_pairs(query_ids: Tensor, key_ids: Tensor) -> Tensor:
    """Return a (B, K) mask of the queries and keys that have the same two sentences, in any order.

    Args:
        query_ids: (B, 2) ids of the two sentences in each query's mixup pair; the same id twice without mixup.
        key_ids: (K, 2) ids of the two sentences in each key's mixup pair.
    """
    query_ids = query_ids.sort(dim=1).values[:, None]  # (B, 1, 2)
    key_ids = key_ids.sort(dim=1).values[None]  # (1, K, 2)
    has_equal_first = query_ids[..., 0] == key_ids[..., 0]  # (B, K)
    has_equal_second = query_ids[..., 1] == key_ids[..., 1]
    return has_equal_first & has_equal_second

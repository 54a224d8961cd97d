"""Turn the logits of a reader into the characters of the answer.

A reader gives every token a logit to be the first token of the answer, and one to be its last. In each window the
`n_best` starts and ends are combined; the pair with the highest sum of logits over all windows of a question is its
answer. Since the sum also decides between windows, no rule needs to assign a token to one of its windows.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from infoxlm_core.tasks.question_answering.windows import Windows

CHUNK = 512  # windows whose starts and ends are combined together


def best_spans(windows: Windows, logits: Sequence[Tensor], n_best: int, answer_tokens: int) -> np.ndarray:
    """Return the answer of each question: (Q, 2) its first character and the one after its last; (0, 0) for none.

    Args:
        windows: N windows of Q questions.
        logits: (L, 2) for each window: of its tokens to be first and last of the answer.
        n_best: starts and ends to combine.
        answer_tokens: the longest answer.
    """
    totals, tokens = [], []
    for start in range(0, len(logits), CHUNK):
        chunk = slice(start, start + CHUNK)
        paragraph_logits = [
            values[offset : offset + count].float().cpu()  # (count, 2), without the tokens of the question
            for values, offset, count in zip(logits[chunk], windows.offsets[chunk], windows.counts[chunk], strict=True)
        ]
        padded = pad_sequence(paragraph_logits, batch_first=True, padding_value=-torch.inf)
        total, pair = _best_pairs(padded, n_best, answer_tokens)
        totals.append(total)
        tokens.append(pair + windows.first_tokens[chunk, None])
    scores, spans = np.concatenate(totals), np.concatenate(tokens)  # (N,), (N, 2)
    order = np.lexsort((-scores, windows.questions))
    best = order[np.unique(windows.questions[order], return_index=True)[1]]  # (Q,) the best window of each question
    starts, ends = windows.paragraphs.starts[spans[best, 0]], windows.paragraphs.ends[spans[best, 1]]
    return np.where(np.isfinite(scores[best])[:, None], np.stack([starts, ends], axis=1), 0)


def _best_pairs(logits: Tensor, n_best: int, answer_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the highest sum of each row of (B, L, 2) logits, -inf if none is allowed, and its (B, 2) tokens."""
    values, positions = logits.topk(min(n_best, logits.shape[1]), dim=1)  # (B, K, 2) each
    first, last = positions[:, :, None, 0], positions[:, None, :, 1]  # (B, K, 1), (B, 1, K)
    allowed = (first <= last) & (last < first + answer_tokens)
    sums = (values[:, :, None, 0] + values[:, None, :, 1]).masked_fill(~allowed, -torch.inf)  # (B, K, K)
    total, pair = sums.flatten(1).max(dim=1)
    rows, k = torch.arange(len(logits)), positions.shape[1]
    chosen = torch.stack([positions[rows, pair // k, 0], positions[rows, pair % k, 1]], dim=1)
    return total.numpy(), chosen.numpy()

"""Logits of a reader -> the characters of the answer.

A reader gives every token a logit to be the answer's first token, and one to be its last. Of each window the `n_best`
starts and ends are combined; the pair with the highest sum of logits over all windows of a question is its answer.
The sum decides between windows too, so no rule is needed that gives a token to the window with most context around it.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from infoxlm_core.tasks.question_answering.windows import Windows

AT_ONCE = 512  # windows whose starts and ends are combined at once


def best_spans(windows: Windows, logits: Sequence[Tensor], n_best: int, answer_tokens: int) -> np.ndarray:
    """The answer of each question: (Q, 2) its first character and the one after its last; (0, 0) if there is none.

    Logits are (L, 2) of each window: its tokens' to be first and last of the answer.
    """
    totals, tokens = [], []
    for begin in range(0, len(logits), AT_ONCE):
        some = slice(begin, begin + AT_ONCE)
        inside = [
            values[first : first + count].float().cpu()  # (count, 2): the paragraph's tokens alone
            for values, first, count in zip(logits[some], windows.firsts[some], windows.counts[some], strict=True)
        ]
        total, pair = _best_pairs(
            pad_sequence(inside, batch_first=True, padding_value=-torch.inf), n_best, answer_tokens
        )
        totals.append(total)
        tokens.append(pair + windows.begins[some, None])
    scores, places = np.concatenate(totals), np.concatenate(tokens)  # (N,), (N, 2)
    order = np.lexsort((-scores, windows.questions))
    best = order[np.unique(windows.questions[order], return_index=True)[1]]  # (Q,) the best window of each
    characters = np.stack(
        [windows.paragraphs.starts[places[best, 0]], windows.paragraphs.ends[places[best, 1]]], axis=1
    )
    return np.where(np.isfinite(scores[best])[:, None], characters, 0)


def _best_pairs(logits: Tensor, n_best: int, answer_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Highest sum, and the (B, 2) tokens that give it, of each row of (B, L, 2) logits; -inf where none is allowed."""
    values, places = logits.topk(min(n_best, logits.shape[1]), dim=1)  # (B, K, 2) each
    first, last = places[:, :, None, 0], places[:, None, :, 1]  # (B, K, 1), (B, 1, K)
    allowed = (first <= last) & (last < first + answer_tokens)
    sums = (values[:, :, None, 0] + values[:, None, :, 1]).masked_fill(~allowed, -torch.inf)  # (B, K, K)
    total, pair = sums.flatten(1).max(dim=1)
    rows, k = torch.arange(len(logits)), places.shape[1]
    chosen = torch.stack([places[rows, pair // k, 0], places[rows, pair % k, 1]], dim=1)
    return total.numpy(), chosen.numpy()

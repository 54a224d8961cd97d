"""Find the characters of the answer from the logits of a reader.

A reader gives every token two logits: to be the first token of the answer, and to be the last. The `n_best` starts and
ends of each window are combined. The answer is the pair with the highest sum of logits in all windows of the question.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from infoxlm_core.tasks.question_answering.windows import Windows

CHUNK = 512  # windows whose starts and ends are combined together


def find_best_spans(windows: Windows, logits: Sequence[Tensor], n_best: int, answer_tokens: int) -> np.ndarray:
    """Choose the answer of each question from the logits of its windows.

    Args:
        windows: N windows of Q questions.
        logits: for each window (L, 2), the logits of its tokens to be the first and the last of the answer.
        n_best: number of starts and ends of a window that are combined.
        answer_tokens: largest number of tokens of an answer.

    Returns:
        (Q, 2), the first character of each answer in the paragraph and the one after its last; (0, 0) for no answer.
    """
    scores, token_spans = _score_windows(windows, logits, n_best, answer_tokens)  # (N,), (N, 2)
    order = np.lexsort((-scores, windows.question_of))  # windows by question, the highest score first
    _, first_windows = np.unique(windows.question_of[order], return_index=True)
    best_windows = order[first_windows]  # (Q,)
    answer_starts = windows.paragraphs.starts[token_spans[best_windows, 0]]
    answer_ends = windows.paragraphs.ends[token_spans[best_windows, 1]]
    has_answer = np.isfinite(scores[best_windows])
    return np.where(has_answer[:, None], np.stack([answer_starts, answer_ends], axis=1), 0)


def _score_windows(
    windows: Windows, logits: Sequence[Tensor], n_best: int, answer_tokens: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the score of the best answer in each window, (N,), and its tokens in `windows.paragraphs`, (N, 2)."""
    scores = []
    token_spans = []
    for start in range(0, len(logits), CHUNK):
        chunk = slice(start, start + CHUNK)
        paragraph_logits = []  # without those of the question and of special tokens
        for window_logits, offset, token_count in zip(
            logits[chunk], windows.offsets[chunk], windows.token_counts[chunk], strict=True
        ):
            paragraph_logits.append(window_logits[offset : offset + token_count].float().cpu())
        padded_logits = pad_sequence(paragraph_logits, batch_first=True, padding_value=-torch.inf)  # (chunk, L, 2)
        chunk_scores, chunk_spans = _find_best_pairs(padded_logits, n_best, answer_tokens)
        scores.append(chunk_scores)
        token_spans.append(chunk_spans + windows.first_tokens[chunk, None])
    return np.concatenate(scores), np.concatenate(token_spans)


def _find_best_pairs(logits: Tensor, n_best: int, answer_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Find the start and end token with the highest sum of logits in each window.

    Args:
        logits: (B, L, 2) of the paragraph tokens of B windows.
        n_best: how many starts and ends are combined.
        answer_tokens: largest number of tokens of an answer.

    Returns:
        Sums (B,), -inf where no pair of tokens is an answer; first and last tokens (B, 2).
    """
    num_candidates = min(n_best, logits.shape[1])
    values, positions = logits.topk(num_candidates, dim=1)  # (B, K, 2) each
    first = positions[:, :, None, 0]  # (B, K, 1)
    last = positions[:, None, :, 1]  # (B, 1, K)
    is_allowed = (first <= last) & (last < first + answer_tokens)  # (B, K, K)
    sums = values[:, :, None, 0] + values[:, None, :, 1]  # (B, K, K)
    sums = sums.masked_fill(~is_allowed, -torch.inf)
    best_sums, best_pairs = sums.flatten(1).max(dim=1)  # (B,) each; pair number = K * start + end
    rows = torch.arange(len(logits))
    best_first = positions[rows, best_pairs // num_candidates, 0]
    best_last = positions[rows, best_pairs % num_candidates, 1]
    return best_sums.numpy(), torch.stack([best_first, best_last], dim=1).numpy()

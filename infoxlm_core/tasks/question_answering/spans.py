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


def find_best_spans(windows: Windows, logits: Sequence[Tensor], n_best: int, max_answer_tokens: int) -> np.ndarray:
    """Return the characters of the best answer to each question, from the logits of its windows.

    Args:
        windows: N windows of Q questions.
        logits: of each window, (L, 2): whether a token is the first and whether it is the last of the answer.
        n_best: number of starts and ends of a window that are combined.
        max_answer_tokens: largest number of tokens of an answer.

    Returns:
        (Q, 2) start and end (exclusive) of each answer in its paragraph; (0, 0) for no answer.
    """
    scores, token_spans = _score_windows(windows, logits, n_best, max_answer_tokens)  # (N,), (N, 2)
    # After sorting by question and descending score, the first window of each question is its best.
    order = np.lexsort((-scores, windows.question_indices))
    _, first_positions = np.unique(windows.question_indices[order], return_index=True)
    best_windows = order[first_positions]  # (Q,)
    first_tokens, last_tokens = token_spans[best_windows].T
    answer_starts = windows.paragraphs.starts[first_tokens]
    answer_ends = windows.paragraphs.ends[last_tokens]
    has_answer = np.isfinite(scores[best_windows])
    return np.where(has_answer[:, None], np.stack([answer_starts, answer_ends], axis=1), 0)


def _score_windows(
    windows: Windows, logits: Sequence[Tensor], n_best: int, max_answer_tokens: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the score (N,) of the best answer in each window, and its first and last token (N, 2) in `paragraphs`."""
    scores = []
    token_spans = []
    for start in range(0, len(logits), CHUNK):
        paragraph_logits = []  # without those of the question and of special tokens
        for window_index in range(start, min(start + CHUNK, len(logits))):
            first_position = windows.offsets[window_index]
            end_position = first_position + windows.token_counts[window_index]
            paragraph_logits.append(logits[window_index][first_position:end_position].float().cpu())
        padded_logits = pad_sequence(paragraph_logits, batch_first=True, padding_value=-torch.inf)  # (chunk, L, 2)
        chunk_scores, chunk_spans = _find_best_pairs(padded_logits, n_best, max_answer_tokens)
        first_tokens = windows.first_tokens[start : start + CHUNK]
        scores.append(chunk_scores)
        token_spans.append(chunk_spans + first_tokens[:, None])
    return np.concatenate(scores), np.concatenate(token_spans)


def _find_best_pairs(logits: Tensor, n_best: int, max_answer_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Find the pair of start and end token with the highest sum of logits in each window.

    Args:
        logits: (B, L, 2) of the paragraph tokens of B windows.
        n_best: number of starts and ends that are combined.
        max_answer_tokens: largest number of tokens of an answer.

    Returns:
        The sums (B,), -inf where no pair of tokens is an answer, and the first and last tokens (B, 2).
    """
    num_candidates = min(n_best, logits.shape[1])  # K
    start_logits, starts = logits[:, :, 0].topk(num_candidates, dim=1)  # (B, K) each
    end_logits, ends = logits[:, :, 1].topk(num_candidates, dim=1)  # (B, K) each
    lengths = ends[:, None, :] - starts[:, :, None] + 1  # (B, K, K)
    is_allowed = (lengths >= 1) & (lengths <= max_answer_tokens)
    sums = start_logits[:, :, None] + end_logits[:, None, :]  # (B, K, K)
    sums = sums.masked_fill(~is_allowed, -torch.inf)
    best_sums, best_pairs = sums.flatten(1).max(dim=1)  # (B,) each
    best_starts = starts.gather(1, best_pairs[:, None] // num_candidates)  # (B, 1)
    best_ends = ends.gather(1, best_pairs[:, None] % num_candidates)  # (B, 1)
    return best_sums.numpy(), torch.cat([best_starts, best_ends], dim=1).numpy()

"""Find answers as character spans, given a reader's logits.

A reader predicts two logits for every token: as the first token of the answer, and as the last. Each of a window's
`n_best` best first tokens is paired with each of the `n_best` best last tokens. The answer is the pair with the highest
sum of logits in all windows of a question.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from infoxlm_core.tasks.question_answering.windows import Windows

CHUNK = 512  # number of windows to process at a time


def find_best_spans(windows: Windows, logits: Sequence[Tensor], n_best: int, max_answer_tokens: int) -> np.ndarray:
    """Find the character span of the best answer to each question.

    Args:
        windows: N windows of Q questions.
        logits: for each window, logits (L, 2) of the answer's first and last token.
        n_best: number of first tokens and of last tokens to combine in each window.
        max_answer_tokens: maximum number of tokens in an answer.

    Returns:
        Start and end (exclusive) of each answer in its paragraph, (Q, 2); (0, 0) if there is no answer.
    """
    scores, token_spans = _score_windows(windows, logits, n_best, max_answer_tokens)  # (N,), (N, 2)
    # Sort by question and descending score, so that the best window of each question comes first.
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
    """Return the (N,) best scores of the windows, and the (N, 2) first and last tokens of their best answers.

    The tokens are indices into the concatenated tokens of `windows.paragraphs`.
    """
    scores = []
    token_spans = []
    for start in range(0, len(logits), CHUNK):
        paragraph_logits = []  # without the logits of question tokens and special tokens
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
        logits: logits (B, L, 2) of the paragraph tokens in B windows.
        n_best: number of start tokens and of end tokens to combine.
        max_answer_tokens: maximum number of tokens in an answer.

    Returns:
        The sums (B,), and the first and last tokens (B, 2). The sum is -inf if no pair is a possible answer.
    """
    num_candidates = min(n_best, logits.shape[1])  # K start tokens and K end tokens
    start_logits, starts = logits[:, :, 0].topk(num_candidates, dim=1)  # (B, K) each
    end_logits, ends = logits[:, :, 1].topk(num_candidates, dim=1)  # (B, K) each
    lengths = ends[:, None, :] - starts[:, :, None] + 1  # (B, K, K)
    is_allowed = (lengths >= 1) & (lengths <= max_answer_tokens)
    sums = start_logits[:, :, None] + end_logits[:, None, :]  # (B, K, K)
    sums = sums.masked_fill(~is_allowed, -torch.inf)
    # A pair is a flat index: the row of its start token times K, plus the column of its end token.
    best_sums, best_pairs = sums.flatten(1).max(dim=1)  # (B,) each
    best_starts = starts.gather(1, best_pairs[:, None] // num_candidates)  # (B, 1)
    best_ends = ends.gather(1, best_pairs[:, None] % num_candidates)  # (B, 1)
    return best_sums.numpy(), torch.cat([best_starts, best_ends], dim=1).numpy()

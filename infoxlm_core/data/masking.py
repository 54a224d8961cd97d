"""Which tokens a masked language model must predict, and what it sees in their place.

Of a sequence of L tokens, floor(0.15 L + u) are chosen, u uniform in [0, 1), without replacement and special tokens
included; each becomes `<mask>` with 0.8, stays with 0.1, becomes a random piece with 0.1, as the released code does.
"""

import numpy as np

from infoxlm_core.config import ObjectivesConfig
from infoxlm_core.data.vocabulary import FIRST_PIECE


def choose(lengths: np.ndarray, ratio: float, rng: np.random.Generator) -> np.ndarray:
    """Rows to predict, ascending, in flat sequences of the given lengths (N,): (targets,) int64."""
    counts = np.floor(ratio * lengths + rng.random(len(lengths))).astype(np.int64)
    sequence = np.repeat(np.arange(len(lengths)), lengths)
    order = np.argsort(sequence + rng.random(len(sequence)), kind="stable")  # shuffles within each sequence
    place = np.arange(len(sequence)) - np.repeat(lengths.cumsum() - lengths, lengths)
    return np.sort(order[place < np.repeat(counts, lengths)])


def mask(
    flat: np.ndarray, lengths: np.ndarray, vocabulary_size: int, config: ObjectivesConfig, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Mask flat sequences.

    Args:
        flat: (T,) ids of N sequences end to end.
        lengths: (N,).
        vocabulary_size: V; `<mask>` is V - 1.

    Returns:
        the (T,) ids that the model sees, and the rows (targets,) it must predict; their answers are flat[rows].
    """
    rows = choose(lengths, config.mask_ratio, rng)
    fate = rng.random(len(rows))
    pieces = rng.integers(FIRST_PIECE, vocabulary_size - 1, len(rows))  # neither special tokens nor <mask>
    seen = flat.copy()
    keep = config.mask_share + config.keep_share
    seen[rows] = np.where(fate < config.mask_share, vocabulary_size - 1, np.where(fate < keep, flat[rows], pieces))
    return seen, rows

"""Which tokens a masked language model must predict, and what it sees in their place.

Of a sequence of L tokens, floor(0.15 L + u) are chosen, u uniform in [0, 1), without replacement and special tokens
included; each becomes `<mask>` with 0.8, stays with 0.1, becomes a random piece with 0.1, as the released code does.
`ObjectivesConfig.masking` names the variants: who is chosen, and among which ids the random token is drawn.
"""

from pathlib import Path

import numpy as np
from typing_extensions import TypedDict

from infoxlm_core import outside
from infoxlm_core.config import ObjectivesConfig
from infoxlm_core.data.vocabulary import EOS, FIRST_PIECE
from infoxlm_core.errors import InputError


class _Pieces(TypedDict):
    vocab: list[tuple[str, float]]


class _Tokenizer(TypedDict):
    """What tokenizer.json of a unigram model says, as far as it is read."""

    model: _Pieces


def pick(lengths: np.ndarray, counts: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """counts[i] rows, without replacement, of the i-th of the flat sequences; all ascending.

    Rows are drawn, and drawn again where they were taken already: no position is preferred, and only as many random
    numbers are needed as rows, not as tokens. Of most rows of a sequence, those that stay out are drawn.
    """
    few, edges = np.minimum(counts, lengths - counts), np.concatenate([[0], lengths.cumsum()])
    taken, last = np.zeros(edges[-1], bool), np.empty(edges[-1], np.int64)
    sequence = np.repeat(np.arange(len(lengths)), few)
    while len(sequence):
        row = edges[sequence] + (rng.random(len(sequence)) * lengths[sequence]).astype(np.int64)
        last[row] = number = np.arange(len(row))
        failed = taken[row] | (last[row] != number)  # of several draws of one row, the last has it
        taken[row] = True
        sequence = sequence[failed]
    if (few < counts).any():
        taken ^= np.repeat(few < counts, lengths)
    return np.flatnonzero(taken)


def mask(
    flat: np.ndarray,
    lengths: np.ndarray,
    vocabulary_size: int,
    config: ObjectivesConfig,
    rng: np.random.Generator,
    starts_word: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Mask flat sequences: (T,) ids of N sequences end to end -> the (T,) ids that the model sees, and the rows
    (targets,) it must predict; their answers are flat[rows].

    `<mask>` is V - 1. `starts_word` (V,), of `word_starts`, is needed by whole-word masking alone, which draws words in
    place of tokens.
    """
    if config.whole_words:
        rows = _choose_words(flat, lengths, config, rng, starts_word)
    else:
        rows = _choose(flat, lengths, config, rng)
    first, last = {"exact": (FIRST_PIECE, 1), "released": (FIRST_PIECE, 0)}.get(config.masking, (0, 0))
    fate = rng.random(len(rows))
    pieces = rng.integers(first, vocabulary_size - last, len(rows))  # exact: neither special tokens nor <mask>
    seen = flat.copy()
    keep = config.mask_share + config.keep_share
    seen[rows] = np.where(fate < config.mask_share, vocabulary_size - 1, np.where(fate < keep, flat[rows], pieces))
    return seen, rows


def _choose(flat: np.ndarray, lengths: np.ndarray, config: ObjectivesConfig, rng: np.random.Generator) -> np.ndarray:
    """Rows to predict, ascending, by the variant that the config names."""
    if config.masking == "xlm":
        chosen = rng.random(len(flat)) < config.mask_ratio
        chosen[(lengths.cumsum() - lengths)[lengths > 0]] = False  # position 0
        return np.flatnonzero(chosen)
    if config.masking == "bert":
        sequence = np.repeat(np.arange(len(lengths)), lengths)
        plain = np.flatnonzero(flat > EOS)  # neither [CLS] nor [SEP], which are <s> and </s> here
        maskable = np.bincount(sequence[plain], minlength=len(lengths))
        wanted = np.maximum(1, np.rint(config.mask_ratio * lengths)).astype(np.int64)
        return plain[pick(maskable, np.minimum(wanted, maskable), rng)]
    return pick(lengths, np.floor(config.mask_ratio * lengths + rng.random(len(lengths))).astype(np.int64), rng)


def _choose_words(
    flat: np.ndarray,
    lengths: np.ndarray,
    config: ObjectivesConfig,
    rng: np.random.Generator,
    starts_word: np.ndarray | None,
) -> np.ndarray:
    """The same draw over words, each then with all its pieces; a special token is a word of its own."""
    if starts_word is None:
        raise InputError("whole-word masking needs the tokenizer to know where words start: tokenize again")
    special = flat <= EOS
    first = starts_word[flat] | special
    first[1:] |= special[:-1]
    first[(lengths.cumsum() - lengths)[lengths > 0]] = True
    heads = np.flatnonzero(first)
    sequence = np.repeat(np.arange(len(lengths)), lengths)
    words = np.bincount(sequence[heads], minlength=len(lengths))  # (N,) how many each sequence has
    chosen = np.zeros(len(heads), bool)
    chosen[_choose(flat[heads], words, config, rng)] = True
    return np.flatnonzero(chosen[first.cumsum() - 1])


def word_starts(tokenizer: Path, vocabulary_size: int) -> np.ndarray:
    """(V,) true for pieces that begin a word (with U+2581); InputError if the directory holds no tokenizer.json."""
    path = tokenizer / "tokenizer.json"
    remedy = "whole-word masking needs a tokenizer: tokenize again"
    vocabulary = outside.read_json(path, _Tokenizer, remedy)["model"]["vocab"]
    found = np.zeros(vocabulary_size, bool)
    starts = [piece.startswith("\u2581") for piece, _ in vocabulary[:vocabulary_size]]
    found[: len(starts)] = starts
    return found

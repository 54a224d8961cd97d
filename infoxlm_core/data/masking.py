"""Choose which tokens a masked language model predicts, and what it sees in their place.

Of a sequence of L tokens, special tokens included, floor(0.15 L + u) are chosen without replacement, u uniform in
[0, 1). Each becomes `<mask>` (80 %), stays (10 %) or becomes a random piece (10 %), as in the released code.
`ObjectivesConfig.masking` names the variants.
"""

import json
from pathlib import Path

import numpy as np

from infoxlm_core.config import ObjectivesConfig
from infoxlm_core.data.vocabulary import EOS, FIRST_PIECE
from infoxlm_core.errors import InputError


def pick(lengths: np.ndarray, counts: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Draw counts[i] rows without replacement from the i-th sequence; return them in ascending order.

    A row that was drawn before is drawn again, so every position is equally likely, and the amount of random numbers
    depends on the number of rows, not of tokens. If most rows of a sequence are needed, the other rows are drawn
    instead.
    """
    draw_counts = np.minimum(counts, lengths - counts)
    edges = np.concatenate([[0], lengths.cumsum()])
    taken = np.zeros(edges[-1], bool)
    last_draw = np.empty(edges[-1], np.int64)
    sequence = np.repeat(np.arange(len(lengths)), draw_counts)
    while len(sequence):
        row = edges[sequence] + (rng.random(len(sequence)) * lengths[sequence]).astype(np.int64)
        draw = np.arange(len(row))
        last_draw[row] = draw
        failed = taken[row] | (last_draw[row] != draw)  # of equal draws, the last one counts
        taken[row] = True
        sequence = sequence[failed]
    if (draw_counts < counts).any():
        taken ^= np.repeat(draw_counts < counts, lengths)
    return np.flatnonzero(taken)


def mask(
    flat: np.ndarray,
    lengths: np.ndarray,
    vocabulary_size: int,
    config: ObjectivesConfig,
    rng: np.random.Generator,
    starts_word: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Mask sequences.

    Args:
        flat: (T,) ids of N sequences end to end.
        lengths: (N,) tokens of each sequence.
        vocabulary_size: V; `<mask>` is V - 1.
        config: the variant and its shares.
        rng: draws the rows and their replacements.
        starts_word: (V,) result of `word_starts`, required by whole-word masking.

    Returns:
        The masked ids (T,), and the rows (targets,) to predict; their answers are flat[rows].
    """
    if config.whole_words:
        rows = _choose_words(flat, lengths, config, rng, starts_word)
    else:
        rows = _choose(flat, lengths, config, rng)
    mask_id = vocabulary_size - 1
    uniform = rng.random(len(rows))
    first_id = FIRST_PIECE if config.masking in ("exact", "released") else 0
    end_id = mask_id if config.masking == "exact" else vocabulary_size
    random_ids = rng.integers(first_id, end_id, len(rows))
    is_masked = uniform < config.mask_share
    stays = uniform < config.mask_share + config.keep_share
    seen = flat.copy()
    seen[rows] = np.where(is_masked, mask_id, np.where(stays, flat[rows], random_ids))
    return seen, rows


def _choose(flat: np.ndarray, lengths: np.ndarray, config: ObjectivesConfig, rng: np.random.Generator) -> np.ndarray:
    """Return the ascending rows to predict, by the variant of the config."""
    if config.masking == "xlm":
        chosen = rng.random(len(flat)) < config.mask_ratio
        chosen[(lengths.cumsum() - lengths)[lengths > 0]] = False  # position 0
        return np.flatnonzero(chosen)
    if config.masking == "bert":
        sequence = np.repeat(np.arange(len(lengths)), lengths)
        plain = np.flatnonzero(flat > EOS)  # neither [CLS] nor [SEP], which are <s> and </s> here
        maskable = np.bincount(sequence[plain], minlength=len(lengths))
        target_counts = np.maximum(1, np.rint(config.mask_ratio * lengths)).astype(np.int64)
        return plain[pick(maskable, np.minimum(target_counts, maskable), rng)]
    target_counts = np.floor(config.mask_ratio * lengths + rng.random(len(lengths))).astype(np.int64)
    return pick(lengths, target_counts, rng)


def _choose_words(
    flat: np.ndarray,
    lengths: np.ndarray,
    config: ObjectivesConfig,
    rng: np.random.Generator,
    starts_word: np.ndarray | None,
) -> np.ndarray:
    """Return the ascending rows of the chosen words, with all pieces of each; a special token is a word."""
    if starts_word is None:
        raise InputError("whole-word masking needs the tokenizer to know where words start: tokenize again")
    is_special = flat <= EOS
    begins_word = starts_word[flat] | is_special
    begins_word[1:] |= is_special[:-1]
    begins_word[(lengths.cumsum() - lengths)[lengths > 0]] = True
    word_rows = np.flatnonzero(begins_word)  # (words,) the first row of each word
    sequence_of_row = np.repeat(np.arange(len(lengths)), lengths)
    word_counts = np.bincount(sequence_of_row[word_rows], minlength=len(lengths))  # (N,) words of each sequence
    is_chosen = np.zeros(len(word_rows), bool)
    is_chosen[_choose(flat[word_rows], word_counts, config, rng)] = True
    word_of_row = begins_word.cumsum() - 1
    return np.flatnonzero(is_chosen[word_of_row])


def word_starts(tokenizer: Path, vocabulary_size: int) -> np.ndarray:
    """Return which ids begin a word (their pieces start with U+2581), (V,).

    Args:
        tokenizer: folder of verified shards.
        vocabulary_size: V.

    Raises:
        InputError: there is no tokenizer.json.
    """
    path = tokenizer / "tokenizer.json"
    if not path.is_file():
        raise InputError(f"{path}: no such file: whole-word masking needs a tokenizer: tokenize again")
    vocabulary = json.loads(path.read_bytes())["model"]["vocab"]
    starts_word = np.zeros(vocabulary_size, bool)
    for number, (piece, _) in enumerate(vocabulary[:vocabulary_size]):
        starts_word[number] = piece.startswith("\u2581")
    return starts_word

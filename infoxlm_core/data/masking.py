"""Choose tokens for a masked language model to predict, and replace them in the model's input.

By default, floor(0.15 L + u) tokens are drawn without replacement from a sequence of L tokens. L includes special
tokens, and u is uniform in [0, 1). A chosen token becomes `<mask>` (80 %), stays unchanged (10 %) or becomes a random
piece (10 %), as in the released code. `ObjectivesConfig.masking` lists the variants.
"""

import json
from pathlib import Path

import numpy as np

from infoxlm_core.config import ObjectivesConfig
from infoxlm_core.data.vocabulary import Vocabulary
from infoxlm_core.errors import InputError


def draw_positions(lengths: np.ndarray, counts: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Draw counts[i] tokens from the i-th sequence without replacement. Return ascending token indices.

    Draws that hit a drawn token are repeated. Repetition is faster than shuffling all tokens, because few tokens are
    chosen. If more than half of a sequence must be chosen, the remaining tokens are drawn instead, so that few draws
    are repeated.

    Args:
        lengths: token counts of N concatenated sequences (N,).
        counts: number of tokens to draw from each sequence (N,).
        rng: random generator.
    """
    draw_counts = np.minimum(counts, lengths - counts)
    offsets = np.concatenate([[0], lengths.cumsum()])  # (N + 1,)
    is_drawn = np.zeros(offsets[-1], bool)  # (T,)
    last_draw = np.empty(offsets[-1], np.int64)  # (T,) last draw that hit each token
    sequences = np.repeat(np.arange(len(lengths)), draw_counts)  # sequence of each remaining draw
    while len(sequences):
        tokens = offsets[sequences] + (rng.random(len(sequences)) * lengths[sequences]).astype(np.int64)
        draw_numbers = np.arange(len(tokens))
        last_draw[tokens] = draw_numbers
        # If several draws hit the same token, only the last draw counts.
        must_repeat = is_drawn[tokens] | (last_draw[tokens] != draw_numbers)
        is_drawn[tokens] = True
        sequences = sequences[must_repeat]
    is_complement = draw_counts < counts  # (N,) sequences whose unchosen tokens were drawn
    if is_complement.any():
        is_drawn ^= np.repeat(is_complement, lengths)
    return np.flatnonzero(is_drawn)


def mask(
    flat: np.ndarray,
    lengths: np.ndarray,
    vocabulary: Vocabulary,
    config: ObjectivesConfig,
    rng: np.random.Generator,
    starts_word: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Choose tokens to predict, and mask or replace them.

    Args:
        flat: token ids of N concatenated sequences (T,).
        lengths: token count of each sequence (N,).
        vocabulary: special ids, and the number V of all ids.
        config: masking variant, and the shares of masked and unchanged tokens.
        rng: random generator.
        starts_word: result of `find_word_starts` (V,), required for whole-word masking.

    Returns:
        Masked ids (T,), and indices (targets,) into `flat` of the tokens to predict.
    """
    if config.whole_words:
        target_indices = _choose_words(flat, lengths, vocabulary, config, rng, starts_word)
    else:
        target_indices = _choose_tokens(flat, lengths, vocabulary, config, rng)
    uniform = rng.random(len(target_indices))
    candidates = _list_replacement_ids(vocabulary, config)
    random_ids = candidates[rng.integers(0, len(candidates), len(target_indices))]
    is_masked = uniform < config.mask_share
    is_random = uniform >= config.mask_share + config.keep_share
    masked_ids = flat.copy()
    masked_ids[target_indices[is_masked]] = vocabulary.mask
    masked_ids[target_indices[is_random]] = random_ids[is_random]
    return masked_ids, target_indices


def _list_replacement_ids(vocabulary: Vocabulary, config: ObjectivesConfig) -> np.ndarray:
    """Return the possible random replacements of a token."""
    if config.masking == "exact":
        return vocabulary.ordinary_ids
    if config.masking == "released":  # the released code also draws `<mask>`
        return np.append(vocabulary.ordinary_ids, vocabulary.mask)
    return np.arange(vocabulary.size)  # XLM and BERT also draw special tokens


def _choose_tokens(
    flat: np.ndarray, lengths: np.ndarray, vocabulary: Vocabulary, config: ObjectivesConfig, rng: np.random.Generator
) -> np.ndarray:
    """Choose the tokens to predict according to `config.masking`. Return ascending indices."""
    if config.masking == "xlm":
        is_chosen = rng.random(len(flat)) < config.mask_ratio
        is_chosen[_find_first_tokens(lengths)] = False  # as in XLM's code
        return np.flatnonzero(is_chosen)
    if config.masking == "bert":
        maskable = np.flatnonzero(~vocabulary.are_delimiters(flat))  # all but [CLS] and [SEP]
        sequence_of_token = np.repeat(np.arange(len(lengths)), lengths)  # (T,)
        maskable_counts = np.bincount(sequence_of_token[maskable], minlength=len(lengths))  # (N,)
        # BERT rounds to the nearest number, but predicts at least one token of each sequence.
        target_counts = np.maximum(1, np.rint(config.mask_ratio * lengths)).astype(np.int64)
        target_counts = np.minimum(target_counts, maskable_counts)
        chosen_indices = draw_positions(maskable_counts, target_counts, rng)
        return maskable[chosen_indices]
    # Round up or down at random, so that the mean share of targets is `mask_ratio` for sequences of any length.
    target_counts = np.floor(config.mask_ratio * lengths + rng.random(len(lengths))).astype(np.int64)
    return draw_positions(lengths, target_counts, rng)


def _find_first_tokens(lengths: np.ndarray) -> np.ndarray:
    """Return the index of the first token of each non-empty sequence."""
    start_offsets = lengths.cumsum() - lengths
    return start_offsets[lengths > 0]


def _choose_words(
    flat: np.ndarray,
    lengths: np.ndarray,
    vocabulary: Vocabulary,
    config: ObjectivesConfig,
    rng: np.random.Generator,
    starts_word: np.ndarray | None,
) -> np.ndarray:
    """Choose whole words to predict. Return the ascending indices of their tokens. A delimiter counts as a word."""
    if starts_word is None:
        raise InputError("whole-word masking needs the tokenizer's word starts: tokenize again")
    is_delimiter = vocabulary.are_delimiters(flat)
    is_word_start = starts_word[flat] | is_delimiter  # (T,)
    is_word_start[1:] |= is_delimiter[:-1]  # the token after a delimiter
    is_word_start[_find_first_tokens(lengths)] = True
    word_starts = np.flatnonzero(is_word_start)  # (words,)
    sequence_of_token = np.repeat(np.arange(len(lengths)), lengths)  # (T,)
    words_per_sequence = np.bincount(sequence_of_token[word_starts], minlength=len(lengths))  # (N,)
    # Choose words like tokens: each word is represented by its first token.
    chosen_words = _choose_tokens(flat[word_starts], words_per_sequence, vocabulary, config, rng)
    is_chosen = np.zeros(len(word_starts), bool)
    is_chosen[chosen_words] = True
    word_of_token = is_word_start.cumsum() - 1  # (T,)
    return np.flatnonzero(is_chosen[word_of_token])


def find_word_starts(tokenizer: Path, vocabulary_size: int) -> np.ndarray:
    """Return a mask (V,) of the ids whose piece begins a word.

    In WordPiece, these pieces do not start with `##`. In other models, they start with a mark for the space before the
    word: U+2581, or `Ġ` in byte-level BPE (RoBERTa).

    Args:
        tokenizer: tokenizer directory in verified shards.
        vocabulary_size: number V of token ids.

    Raises:
        InputError: the directory has no tokenizer.json, or no piece of the tokenizer begins a word.
    """
    path = tokenizer / "tokenizer.json"
    if not path.is_file():
        raise InputError(f"{path}: no such file: whole-word masking needs a tokenizer: tokenize again")
    model = json.loads(path.read_bytes())["model"]
    pieces = model["vocab"]
    if isinstance(pieces, list):  # a unigram model lists pieces with their scores, in the order of ids
        pieces = {piece: token_id for token_id, (piece, _) in enumerate(pieces[:vocabulary_size])}
    continuation = model.get("continuing_subword_prefix")  # `##` in WordPiece
    starts_word = np.zeros(vocabulary_size, bool)
    for piece, token_id in pieces.items():
        if continuation:
            starts_word[token_id] = not piece.startswith(continuation)
        else:
            starts_word[token_id] = piece.startswith(("\u2581", "Ġ"))
    if not starts_word.any():  # some BPE models mark the ends of words instead
        raise InputError(f"{path}: no piece begins a word: set pretraining.objectives.whole_words to false")
    return starts_word

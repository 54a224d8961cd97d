"""Cut paragraphs into windows that a model reads together with a question.

The input of XLM-R is `<s> question </s> </s> window </s>`. A long paragraph is cut into several overlapping windows:

    paragraph   t0 t1 t2 t3 t4 t5 t6          room for 4 tokens, stride 2
    windows     t0 t1 t2 t3
                      t2 t3 t4 t5
                            t4 t5 t6

Every token keeps its character range in the paragraph, so that answers can be converted from characters to tokens and
back.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple
from unicodedata import category

import numpy as np
from transformers import PreTrainedTokenizerBase as Tokenizer

from infoxlm_core.data.examples import Examples
from infoxlm_core.errors import InputError

CHUNK = 1_000  # number of paragraphs to tokenize at a time, because the tokenizer's lists need much memory
_SPACES = np.array([code for code in range(0x3001) if chr(code).isspace()], np.uint32)


@dataclass(frozen=True)
class Paragraphs:
    """The T concatenated tokens of P paragraphs. All arrays are int64."""

    ids: np.ndarray  # (T,) token ids
    starts: np.ndarray  # (T,) each token's first character, without outer spaces
    ends: np.ndarray  # (T,) each token's last character + 1; equal to the start for a token without characters
    bounds: np.ndarray  # (P + 1,) paragraph p has the tokens bounds[p] to bounds[p + 1] (exclusive)


@dataclass(frozen=True)
class Windows:
    """N windows of Q questions, in the order of the questions."""

    examples: Examples  # one example per window: question, paragraph part and special tokens
    question_indices: np.ndarray  # (N,) question of each window
    offsets: np.ndarray  # (N,) position of the window's first paragraph token in the example
    first_tokens: np.ndarray  # (N,) index of the window's first paragraph token in `paragraphs`
    token_counts: np.ndarray  # (N,) number of paragraph tokens in the window
    paragraph_indices: np.ndarray  # (Q,) paragraph of each question
    paragraphs: Paragraphs


def cut_into_windows(
    tokenizer: Tokenizer,
    questions: Sequence[str],
    paragraphs: Sequence[str],
    paragraph_indices: Sequence[int],
    max_tokens: int,
    question_tokens: int,
    stride: int,
) -> Windows:
    """Tokenise questions and paragraphs, and cut each question's paragraph into windows.

    Args:
        tokenizer: fast tokenizer, which maps tokens to characters.
        questions: Q question texts, at least one.
        paragraphs: P paragraph texts.
        paragraph_indices: index of each question's paragraph, (Q,).
        max_tokens: maximum number of tokens in an example, including the question and special tokens.
        question_tokens: maximum number of tokens in a question; longer questions are truncated.
        stride: number of tokens shared by two consecutive windows.

    Raises:
        InputError: windows have no room for new tokens, or a paragraph has no tokens.
    """
    template = _read_pair_template(tokenizer)
    num_special = template.prefix.shape[1] + template.middle.shape[1] + template.suffix.shape[1]
    if question_tokens + stride + num_special >= max_tokens:
        raise InputError(
            f"max_tokens ({max_tokens}, limited by the encoder) must exceed question_tokens ({question_tokens}) + "
            f"stride ({stride}) + {num_special} special tokens."
        )
    encoded = tokenizer(list(questions), add_special_tokens=False, truncation=True, max_length=question_tokens)
    tokens = tokenise(tokenizer, paragraphs)
    inputs: list[np.ndarray] = []  # token ids and types (2, n) of each window
    question_indices: list[int] = []
    offsets: list[int] = []
    first_tokens: list[int] = []
    token_counts: list[int] = []
    for question_index, paragraph_index in enumerate(paragraph_indices):
        question = _add_type(encoded["input_ids"][question_index], template.question_type)
        tokens_before = np.hstack([template.prefix, question, template.middle])  # (2, n)
        offset = tokens_before.shape[1]
        room = max_tokens - offset - template.suffix.shape[1]
        paragraph_start, paragraph_end = tokens.bounds[paragraph_index : paragraph_index + 2].tolist()
        if paragraph_start == paragraph_end:
            raise InputError(
                f"question {questions[question_index]!r:.80}: its paragraph has no tokens. Remove the question."
            )
        # No window but the first starts within the last `stride` tokens, which the previous window already contains.
        last_start = max(paragraph_start + 1, paragraph_end - stride)
        for start in range(paragraph_start, last_start, room - stride):
            end = min(start + room, paragraph_end)
            paragraph_part = _add_type(tokens.ids[start:end], template.paragraph_type)
            inputs.append(np.hstack([tokens_before, paragraph_part, template.suffix]))
            question_indices.append(question_index)
            offsets.append(offset)
            first_tokens.append(start)
            token_counts.append(end - start)
    ids, types = np.hstack(inputs)
    lengths = np.array([window_inputs.shape[1] for window_inputs in inputs])
    return Windows(
        Examples(ids, types, lengths),
        np.array(question_indices, np.int64),
        np.array(offsets, np.int64),
        np.array(first_tokens, np.int64),
        np.array(token_counts, np.int64),
        paragraph_indices=np.asarray(paragraph_indices, np.int64),
        paragraphs=tokens,
    )


class _PairTemplate(NamedTuple):
    """A tokenizer's format of text pairs: ids and types (2, n) of the special tokens, and the types of both texts."""

    prefix: np.ndarray
    middle: np.ndarray
    suffix: np.ndarray
    question_type: int
    paragraph_type: int


def _read_pair_template(tokenizer: Tokenizer) -> _PairTemplate:
    """Determine a tokenizer's special tokens and token types for text pairs by encoding a pair of letters."""
    encoded = tokenizer("a", "a", return_token_type_ids=True)  # some tokenizers return types only on request
    text_of_token = encoded.sequence_ids(0)  # 0, 1, or None for special tokens
    first_start = text_of_token.index(0)
    first_end = first_start + text_of_token.count(0)
    second_start = text_of_token.index(1)
    second_end = second_start + text_of_token.count(1)
    ids_and_types = np.array([encoded["input_ids"], encoded["token_type_ids"]], np.int64)  # (2, n)
    return _PairTemplate(
        prefix=ids_and_types[:, :first_start],
        middle=ids_and_types[:, first_end:second_start],
        suffix=ids_and_types[:, second_end:],
        question_type=int(ids_and_types[1, first_start]),
        paragraph_type=int(ids_and_types[1, second_start]),
    )


def _add_type(ids: Sequence[int] | np.ndarray, token_type: int) -> np.ndarray:
    """Stack ids (n,) and a constant row with their token type to an array (2, n)."""
    return np.stack([np.asarray(ids, np.int64), np.full(len(ids), token_type)])


def tokenise(tokenizer: Tokenizer, paragraphs: Sequence[str]) -> Paragraphs:
    """Tokenise paragraphs of any length, without special tokens."""
    ids_of_paragraphs: list[np.ndarray] = []
    ranges_of_paragraphs: list[np.ndarray] = []
    for start in range(0, len(paragraphs), CHUNK):
        chunk = list(paragraphs[start : start + CHUNK])
        # `verbose=False` avoids warnings about paragraphs that exceed the model's maximum length.
        encoded = tokenizer(chunk, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        for text, ids, offsets in zip(chunk, encoded["input_ids"], encoded["offset_mapping"], strict=True):
            character_ranges = np.array(offsets, np.int64).reshape(-1, 2)
            character_ranges = _trim_spaces(text, character_ranges)
            character_ranges = _extend_over_marks(text, character_ranges)
            ids_of_paragraphs.append(np.array(ids, np.int64))
            ranges_of_paragraphs.append(character_ranges)
    ranges = np.concatenate(ranges_of_paragraphs)  # (T, 2)
    bounds = np.cumsum([0, *map(len, ids_of_paragraphs)])
    return Paragraphs(np.concatenate(ids_of_paragraphs), starts=ranges[:, 0], ends=ranges[:, 1], bounds=bounds)


def _trim_spaces(text: str, ranges: np.ndarray) -> np.ndarray:
    """Trim the tokens' character ranges (n, 2), so that no token begins or ends with a space.

    SentencePiece tokens may begin with the space before a word.
    """
    # UTF-32 has one integer per character, so that array indices are character positions.
    is_space = np.isin(np.frombuffer(text.encode("utf-32-le"), np.uint32), _SPACES)
    positions = np.arange(len(text) + 1)
    # For every position, find the next character that is not a space. The scan runs backwards through the text.
    next_positions = np.where(np.append(is_space, False), len(text), positions)
    next_positions = np.minimum.accumulate(next_positions[::-1])[::-1]
    # For every position, find the end of the previous character that is not a space. Character p - 1 ends at p, so its
    # flag is moved to p.
    previous_ends = np.where(np.insert(is_space, 0, True), 0, positions)
    previous_ends = np.maximum.accumulate(previous_ends)
    starts, ends = ranges.T
    trimmed_starts = np.minimum(next_positions[starts], ends)
    trimmed_ends = np.maximum(previous_ends[ends], trimmed_starts)
    return np.stack([trimmed_starts, trimmed_ends], axis=1)


def _extend_over_marks(text: str, ranges: np.ndarray) -> np.ndarray:
    """Extend the tokens' character ranges (n, 2) over following vowel signs and accents.

    Otherwise, no token would contain the vowel signs and accents that the tokenizer of uncased BERT drops.
    """
    next_starts = np.append(ranges[1:, 0], len(text))
    for token in np.flatnonzero(ranges[:, 1] < next_starts):
        end = ranges[token, 1]
        while end < next_starts[token] and category(text[end]).startswith("M"):  # the Unicode categories of marks
            end += 1
        ranges[token, 1] = end
    return ranges


def find_targets(windows: Windows, spans: Sequence[tuple[int, int]]) -> np.ndarray:
    """Return the positions (N, 2) of the answer's first and last token in each window, int64.

    The positions are (0, 0) if the window does not contain the whole answer.

    Args:
        windows: N windows of Q questions.
        spans: start and end (exclusive) of each answer in its paragraph, without outer spaces.
    """
    answer_first_tokens = np.empty(len(spans), np.int64)
    answer_last_tokens = np.empty(len(spans), np.int64)
    for question_index, (start, end) in enumerate(spans):
        paragraph_index = windows.paragraph_indices[question_index]
        token_range = _find_token_range(windows.paragraphs, paragraph_index, start, end)
        answer_first_tokens[question_index], answer_last_tokens[question_index] = token_range
    first = answer_first_tokens[windows.question_indices]  # (N,)
    last = answer_last_tokens[windows.question_indices]  # (N,)
    window_ends = windows.first_tokens + windows.token_counts
    # If no token overlaps the answer, `_find_token_range` returns a last token before the first.
    is_inside = (windows.first_tokens <= first) & (last < window_ends) & (first <= last)
    shifts = windows.offsets - windows.first_tokens  # token index in `paragraphs` + shift = position in the window
    positions = np.stack([first + shifts, last + shifts], axis=1)
    return np.where(is_inside[:, None], positions, 0)


def _find_token_range(paragraphs: Paragraphs, paragraph_index: int, start: int, end: int) -> tuple[int, int]:
    """Return the first and last token that overlap a paragraph's characters `start` to `end` (exclusive)."""
    first_token, end_token = paragraphs.bounds[paragraph_index : paragraph_index + 2]
    # Binary search is possible because token starts and ends never decrease within a paragraph.
    num_tokens_before = np.searchsorted(paragraphs.ends[first_token:end_token], start, side="right")
    num_tokens_up_to_end = np.searchsorted(paragraphs.starts[first_token:end_token], end, side="left")
    return first_token + num_tokens_before, first_token + num_tokens_up_to_end - 1

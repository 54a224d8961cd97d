"""Cut paragraphs into the windows that a model reads beside a question: XLM-R `<s> question </s> </s> window </s>`.

A paragraph that does not fit beside its question is read in several windows that overlap:

    paragraph   t0 t1 t2 t3 t4 t5 t6          room for 4 tokens, stride 2
    windows     t0 t1 t2 t3
                      t2 t3 t4 t5
                            t4 t5 t6

Every token has the range of its characters in the paragraph, so that answers can be converted from characters to
tokens and back.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple
from unicodedata import category

import numpy as np
from transformers import PreTrainedTokenizerBase as Tokenizer

from infoxlm_core.data.examples import Examples
from infoxlm_core.errors import InputError

CHUNK = 1_000  # paragraphs that are tokenized together, because the tokenizer's lists of pairs need much memory
_SPACES = np.array([code for code in range(0x3001) if chr(code).isspace()], np.uint32)


@dataclass(frozen=True)
class Paragraphs:
    """The tokens of P paragraphs, one after the other. All arrays are int64."""

    ids: np.ndarray  # (T,)
    starts: np.ndarray  # (T,) first character of each token, without spaces at its edges
    ends: np.ndarray  # (T,) the character after its last character; equal to the start for a token without characters
    bounds: np.ndarray  # (P + 1,) paragraph p has the tokens bounds[p] to bounds[p + 1]


@dataclass(frozen=True)
class Windows:
    """N windows of Q questions, in the order of the questions."""

    examples: Examples  # tokens of question and window, special tokens included
    question_of: np.ndarray  # (N,) question of each window
    offsets: np.ndarray  # (N,) position of its first paragraph token within the example
    first_tokens: np.ndarray  # (N,) index of the same token in `paragraphs`
    token_counts: np.ndarray  # (N,) number of its paragraph tokens
    paragraph_of: np.ndarray  # (Q,) paragraph of each question
    paragraphs: Paragraphs


def make_windows(
    tokenizer: Tokenizer,
    questions: Sequence[str],
    paragraphs: Sequence[str],
    paragraph_of: Sequence[int],
    max_tokens: int,
    question_tokens: int,
    stride: int,
) -> Windows:
    """Tokenise questions and paragraphs, each once, and cut the paragraphs into windows.

    Args:
        tokenizer: a fast tokenizer, which maps tokens to characters.
        questions: Q texts, at least one.
        paragraphs: P texts.
        paragraph_of: (Q,) the paragraph of each question.
        max_tokens: largest number of tokens of a window with its question and special tokens.
        question_tokens: largest number of tokens of a question; longer ones are truncated.
        stride: number of tokens that two consecutive windows of a paragraph share.

    Raises:
        InputError: windows would have no room for new tokens, or a paragraph has no tokens.
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
    positions: list[tuple[int, int, int, int]] = []  # question, offset, first token and token count of each window
    inputs: list[np.ndarray] = []  # (2, n) ids and types of each window
    for question, (question_ids, paragraph) in enumerate(zip(encoded["input_ids"], paragraph_of, strict=True)):
        typed_question = _add_type(question_ids, template.question_type)
        before = np.hstack([template.prefix, typed_question, template.middle])  # (2, n) ids and types
        offset = before.shape[1]
        room = max_tokens - offset - template.suffix.shape[1]
        paragraph_start, paragraph_end = tokens.bounds[paragraph : paragraph + 2].tolist()
        if paragraph_start == paragraph_end:
            raise InputError(f"question {questions[question]!r:.80}: its paragraph has no tokens. Remove the question.")
        # No window starts within the last `stride` tokens, because the previous window contains them.
        last_start = max(paragraph_start + 1, paragraph_end - stride)
        for start in range(paragraph_start, last_start, room - stride):
            token_count = min(room, paragraph_end - start)
            typed_paragraph = _add_type(tokens.ids[start : start + token_count], template.paragraph_type)
            positions.append((question, offset, start, token_count))
            inputs.append(np.hstack([before, typed_paragraph, template.suffix]))
    ids, types = np.hstack(inputs)
    lengths = np.array([window_inputs.shape[1] for window_inputs in inputs])
    question_of, offsets, first_tokens, token_counts = np.array(positions, np.int64).T.copy()
    return Windows(
        Examples(ids, types, lengths),
        question_of,
        offsets,
        first_tokens,
        token_counts,
        paragraph_of=np.asarray(paragraph_of, np.int64),
        paragraphs=tokens,
    )


class _PairTemplate(NamedTuple):
    """The special tokens around and between a pair of texts, each (2, n) ids and types, and the types of the texts."""

    prefix: np.ndarray
    middle: np.ndarray
    suffix: np.ndarray
    question_type: int
    paragraph_type: int


def _read_pair_template(tokenizer: Tokenizer) -> _PairTemplate:
    """Return what a tokenizer adds before, between and after two texts, read from a pair of one-letter texts."""
    encoded = tokenizer("a", "a", return_token_type_ids=True)  # explicit, because not every tokenizer returns types
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
    """Return ids (n,) in one row above their token type in another, (2, n)."""
    return np.stack([np.asarray(ids, np.int64), np.full(len(ids), token_type)])


def tokenise(tokenizer: Tokenizer, paragraphs: Sequence[str]) -> Paragraphs:
    """Tokenise paragraphs of any length, without special tokens."""
    ids: list[np.ndarray] = []
    ranges_of_paragraphs: list[np.ndarray] = []
    for start in range(0, len(paragraphs), CHUNK):
        chunk = list(paragraphs[start : start + CHUNK])
        encoded = tokenizer(chunk, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        for text, text_ids, offsets in zip(chunk, encoded["input_ids"], encoded["offset_mapping"], strict=True):
            ids.append(np.array(text_ids, np.int64))
            trimmed = _trim_spaces(text, np.array(offsets, np.int64).reshape(-1, 2))
            ranges_of_paragraphs.append(_extend_over_marks(text, trimmed))
    ranges = np.concatenate(ranges_of_paragraphs)  # (T, 2) characters of each token
    bounds = np.cumsum([0, *map(len, ids)])
    return Paragraphs(np.concatenate(ids), starts=ranges[:, 0], ends=ranges[:, 1], bounds=bounds)


def _trim_spaces(text: str, ranges: np.ndarray) -> np.ndarray:
    """Leave out spaces at the edges of the character ranges of n tokens, (n, 2).

    Tokens of SentencePiece may begin with the space before a word.
    """
    is_space = np.isin(np.frombuffer(text.encode("utf-32-le"), np.uint32), _SPACES)
    positions = np.arange(len(text) + 1)
    # For every position, the next character that is not a space: a minimum that runs from the end of the text.
    word_positions = np.where(np.append(is_space, False), len(text), positions)
    next_word = np.minimum.accumulate(word_positions[::-1])[::-1]
    # For every position, the end of the last character before it that is not a space.
    word_ends = np.where(np.insert(is_space, 0, True), 0, positions)
    previous_word_end = np.maximum.accumulate(word_ends)
    trimmed_starts = np.minimum(next_word[ranges[:, 0]], ranges[:, 1])
    trimmed_ends = np.maximum(previous_word_end[ranges[:, 1]], trimmed_starts)
    return np.stack([trimmed_starts, trimmed_ends], axis=1)


def _extend_over_marks(text: str, ranges: np.ndarray) -> np.ndarray:
    """Extend the character ranges (n, 2) of tokens over the vowel signs and accents that follow them.

    The tokenizer of uncased BERT drops these marks, so that no token would contain them.
    """
    next_starts = np.append(ranges[1:, 0], len(text))
    for token in np.flatnonzero(ranges[:, 1] < next_starts):
        end = ranges[token, 1]
        while end < next_starts[token] and category(text[end]).startswith("M"):  # a mark, in Unicode's categories
            end += 1
        ranges[token, 1] = end
    return ranges


def find_targets(windows: Windows, spans: Sequence[tuple[int, int]]) -> np.ndarray:
    """Return the first and last token of the answer within each window: (N, 2) int64.

    A window that does not contain the whole answer has (0, 0).

    Args:
        windows: N windows of Q questions.
        spans: for each of the Q questions the first character of its answer in the paragraph, and the one after the
            last; the answer neither begins nor ends with a space.
    """
    paragraphs = windows.paragraphs
    answer_tokens = np.empty((len(spans), 2), np.int64)
    for question, (paragraph, (start, end)) in enumerate(zip(windows.paragraph_of, spans, strict=True)):
        first_token, end_token = paragraphs.bounds[paragraph : paragraph + 2]
        token_starts = paragraphs.starts[first_token:end_token]
        token_ends = paragraphs.ends[first_token:end_token]
        # All tokens that have a character of the answer. Binary search is possible, because starts and ends never
        # decrease within a paragraph.
        answer_tokens[question, 0] = first_token + np.searchsorted(token_ends, start, side="right")
        answer_tokens[question, 1] = first_token + np.searchsorted(token_starts, end, side="left") - 1
    first, last = answer_tokens[windows.question_of].T  # (N,) each
    window_ends = windows.first_tokens + windows.token_counts
    is_inside = (first <= last) & (windows.first_tokens <= first) & (last < window_ends)
    shift = windows.offsets - windows.first_tokens
    return np.where(is_inside[:, None], np.stack([first + shift, last + shift], axis=1), 0)

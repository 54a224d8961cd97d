"""Questions and the windows of their paragraphs, as a model reads them: XLM-R `<s> question </s> </s> window </s>`.

A paragraph that does not fit beside its question is read in several windows that overlap:

    paragraph   t0 t1 t2 t3 t4 t5 t6          room for 4 tokens, stride 2
    windows     t0 t1 t2 t3
                      t2 t3 t4 t5
                            t4 t5 t6

Every token has the range of its characters in the paragraph, so that answers, which are characters, can become tokens
and tokens can become answers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from unicodedata import category

import numpy as np
from transformers import PreTrainedTokenizerBase as Tokenizer

from infoxlm_core.data.examples import Examples
from infoxlm_core.errors import InputError

CHUNK = 1_000  # paragraphs that are tokenized together, because the tokenizer's lists of pairs need much memory
_SPACES = np.array([code for code in range(0x3001) if chr(code).isspace()], np.uint32)


@dataclass(frozen=True)
class Paragraphs:
    """Tokens of P paragraphs, end to end; all int64."""

    ids: np.ndarray  # (T,)
    starts: np.ndarray  # (T,) first character of each token, without spaces at its edges
    ends: np.ndarray  # (T,) the character after its last; equal to the start of a token without characters
    bounds: np.ndarray  # (P + 1,) paragraph p has the tokens bounds[p] to bounds[p + 1]


@dataclass(frozen=True)
class Windows:
    """N windows of Q questions, in the order of the questions."""

    examples: Examples  # tokens of question and window, special tokens included
    questions: np.ndarray  # (N,) question of each window
    offsets: np.ndarray  # (N,) position of its first paragraph token within the example
    first_tokens: np.ndarray  # (N,) index of the same token in `paragraphs`
    counts: np.ndarray  # (N,) number of its paragraph tokens
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
        tokenizer: a fast one, which maps tokens to characters.
        questions: Q texts, at least one.
        paragraphs: P texts.
        paragraph_of: (Q,) the paragraph of each question.
        max_tokens: of a window with its question and special tokens.
        question_tokens: longer questions are truncated.
        stride: tokens that two windows of a paragraph share.

    Raises:
        InputError: windows would have no room for new tokens, or a paragraph has no token.
    """
    (prefix, middle, suffix), types = _special_tokens(tokenizer)
    special = prefix.shape[1] + middle.shape[1] + suffix.shape[1]
    if question_tokens + stride + special >= max_tokens:
        raise InputError(
            f"max_tokens ({max_tokens}, or what the encoder reads) must exceed question_tokens ({question_tokens}) + "
            f"stride ({stride}) + {special} special tokens."
        )
    encoded = tokenizer(list(questions), add_special_tokens=False, truncation=True, max_length=question_tokens)
    tokens = tokenise(tokenizer, paragraphs)
    rows, examples = [], []
    for number, (question, paragraph) in enumerate(zip(encoded["input_ids"], paragraph_of, strict=True)):
        before = np.hstack([prefix, _with_type(question, types[0]), middle])  # (2, n) ids and types
        room = max_tokens - before.shape[1] - suffix.shape[1]
        begin, end = tokens.bounds[paragraph : paragraph + 2].tolist()
        if begin == end:
            raise InputError(f"question {questions[number]!r:.80}: its paragraph has no token. Remove it.")
        # the first window that reaches the end is the last
        for start in range(begin, max(begin + 1, end - stride), room - stride):
            count = min(room, end - start)
            rows.append((number, before.shape[1], start, count))
            examples.append(np.hstack([before, _with_type(tokens.ids[start : start + count], types[1]), suffix]))
    window_questions, offsets, first_tokens, counts = np.array(rows, np.int64).T
    ids, segments = np.hstack(examples)
    lengths = np.array([example.shape[1] for example in examples])
    paragraph_numbers = np.asarray(paragraph_of, np.int64)
    return Windows(
        Examples(ids, segments, lengths), window_questions, offsets, first_tokens, counts, paragraph_numbers, tokens
    )


def _special_tokens(tokenizer: Tokenizer) -> tuple[list[np.ndarray], list[int]]:
    """Return the special tokens before, between and after a pair, each (2, n) ids and types; and both sides' types."""
    pair = tokenizer("a", "a", return_token_type_ids=True)  # explicit, because not every tokenizer returns types
    sides = pair.sequence_ids(0)
    first, second = sides.index(0), sides.index(1)
    both = np.array([pair["input_ids"], pair["token_type_ids"]], np.int64)
    special = [both[:, :first], both[:, first + sides.count(0) : second], both[:, second + sides.count(1) :]]
    return special, both[1, [first, second]].tolist()


def _with_type(ids: Sequence[int] | np.ndarray, kind: int) -> np.ndarray:
    """(n,) ids -> (2, n) ids and their type."""
    return np.stack([np.asarray(ids, np.int64), np.full(len(ids), kind)])


def tokenise(tokenizer: Tokenizer, paragraphs: Sequence[str]) -> Paragraphs:
    """Tokenise paragraphs of any length, without special tokens."""
    ids: list[np.ndarray] = []
    characters: list[np.ndarray] = []
    for start in range(0, len(paragraphs), CHUNK):
        chunk = list(paragraphs[start : start + CHUNK])
        encoded = tokenizer(chunk, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        for text, row, offsets in zip(chunk, encoded["input_ids"], encoded["offset_mapping"], strict=True):
            ids.append(np.array(row, np.int64))
            trimmed = _trim_spaces(text, np.array(offsets, np.int64).reshape(-1, 2))
            characters.append(_extend_over_marks(text, trimmed))
    ranges = np.concatenate(characters)
    return Paragraphs(np.concatenate(ids), ranges[:, 0], ranges[:, 1], np.cumsum([0, *map(len, ids)]))


def _trim_spaces(text: str, characters: np.ndarray) -> np.ndarray:
    """Move the (n, 2) edges of tokens inwards past spaces: SentencePiece's tokens may begin with the space before."""
    is_space = np.isin(np.frombuffer(text.encode("utf-32-le"), np.uint32), _SPACES)
    positions = np.arange(len(text) + 1)
    # for every position, the next character that is no space, and the position after the previous one
    following = np.minimum.accumulate(np.where(np.append(is_space, False), len(text), positions)[::-1])[::-1]
    preceding = np.maximum.accumulate(np.where(np.insert(is_space, 0, True), 0, positions))
    starts = np.minimum(following[characters[:, 0]], characters[:, 1])
    return np.stack([starts, np.maximum(preceding[characters[:, 1]], starts)], axis=1)


def _extend_over_marks(text: str, characters: np.ndarray) -> np.ndarray:
    """Extend tokens over the vowel signs and accents after them that a tokenizer dropped, as uncased BERT's does."""
    next_starts = np.append(characters[1:, 0], len(text))
    for token in np.flatnonzero(characters[:, 1] < next_starts):
        while characters[token, 1] < next_starts[token] and category(text[characters[token, 1]]).startswith("M"):
            characters[token, 1] += 1
    return characters


def find_targets(windows: Windows, spans: Sequence[tuple[int, int]]) -> np.ndarray:
    """Return the first and last token of the answer within each window: (N, 2) int64; (0, 0) if it is not all inside.

    `spans` are (Q,): the first character of each answer in its paragraph, and the one after its last; neither is a
    space.
    """
    paragraphs = windows.paragraphs
    tokens = np.empty((len(spans), 2), np.int64)
    for question, (paragraph, (start, end)) in enumerate(zip(windows.paragraph_of, spans, strict=True)):
        begin, stop = paragraphs.bounds[paragraph : paragraph + 2]
        # all tokens that have a character of the answer: starts and ends never decrease within a paragraph
        tokens[question, 0] = begin + np.searchsorted(paragraphs.ends[begin:stop], start, side="right")
        tokens[question, 1] = begin + np.searchsorted(paragraphs.starts[begin:stop], end, side="left") - 1
    first, last = tokens[windows.questions].T  # (N,) each
    inside = (first <= last) & (windows.first_tokens <= first) & (last < windows.first_tokens + windows.counts)
    shift = windows.offsets - windows.first_tokens
    return np.where(inside[:, None], np.stack([first + shift, last + shift], axis=1), 0)

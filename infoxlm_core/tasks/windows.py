"""Questions and the windows of their paragraphs, as a model reads them: XLM-R `<s> question </s> </s> window </s>`.

A paragraph that does not fit beside its question is read through several windows that overlap:

    paragraph   t0 t1 t2 t3 t4 t5 t6          room for 4 tokens, stride 2
    windows     t0 t1 t2 t3
                      t2 t3 t4 t5
                            t4 t5 t6

Every token knows its characters in the paragraph, so that answers, which are characters, become tokens and back.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from unicodedata import category

import numpy as np
from transformers import PreTrainedTokenizerBase as Tokenizer

from infoxlm_core.data.examples import Examples
from infoxlm_core.errors import InputError

AT_ONCE = 1_000  # paragraphs between the tokenizer's lists and our arrays: lists of pairs of numbers need much memory
_SPACES = np.array([code for code in range(0x3001) if chr(code).isspace()], np.uint32)


@dataclass(frozen=True)
class Paragraphs:
    """Tokens of P paragraphs, end to end.

    Attributes:
        ids: (T,) int64.
        starts, ends: (T,) int64, the token's first character and the one after its last, spaces at its edges left
            out; equal where it has no other.
        bounds: (P + 1,) int64, paragraph p has the tokens bounds[p] to bounds[p + 1].
    """

    ids: np.ndarray
    starts: np.ndarray
    ends: np.ndarray
    bounds: np.ndarray


@dataclass(frozen=True)
class Windows:
    """N windows of Q questions, in the order of the questions.

    Attributes:
        examples: their tokens, the question's and special ones too.
        questions: (N,) the question of each window.
        firsts: (N,) place of its first paragraph token within the example.
        begins: (N,) the same token's place in `paragraphs`.
        counts: (N,) its paragraph tokens.
        asked: (Q,) paragraph of each question.
    """

    examples: Examples
    questions: np.ndarray
    firsts: np.ndarray
    begins: np.ndarray
    counts: np.ndarray
    asked: np.ndarray
    paragraphs: Paragraphs


@dataclass(frozen=True)
class _Layout:
    """What a tokenizer puts before, between and behind a pair: ids and types; and the types of both sides."""

    specials: tuple[np.ndarray, np.ndarray, np.ndarray]
    special_types: tuple[np.ndarray, np.ndarray, np.ndarray]
    types: tuple[int, int]


def lay_out(
    tokenizer: Tokenizer,
    questions: Sequence[str],
    paragraphs: Sequence[str],
    paragraph_of: Sequence[int],
    max_tokens: int,
    question_tokens: int,
    stride: int,
) -> Windows:
    """Tokenise questions (at least one) and paragraphs, each once, and lay their windows out.

    Args:
        tokenizer: of the encoder that will read them.
        questions: the text of each.
        paragraphs: the text of each.
        paragraph_of: (Q,) paragraph of each question.
        max_tokens: of a window, question and special tokens included.
        question_tokens: longer questions are cut.
        stride: tokens that two windows of a paragraph share.

    Raises:
        InputError: the windows would not move on, or a paragraph has nothing that the tokenizer knows.
    """
    layout = _layout(tokenizer)
    special = sum(map(len, layout.specials))
    if question_tokens + stride + special >= max_tokens:
        raise InputError(
            f"max_tokens ({max_tokens}, or what the encoder reads) must exceed question_tokens ({question_tokens}) + "
            f"stride ({stride}) + {special} special tokens"
        )
    asked = tokenizer(list(questions), add_special_tokens=False, truncation=True, max_length=question_tokens)
    found = tokenise(tokenizer, paragraphs)
    rows, examples = [], []
    for number, (ids, paragraph) in enumerate(zip(asked["input_ids"], paragraph_of, strict=True)):
        question = np.array(ids, np.int64)
        room = max_tokens - special - len(question)
        begin, end = found.bounds[paragraph : paragraph + 2].tolist()
        if begin == end:
            raise InputError(f"question {questions[number]!r:.80}: its paragraph has not one token: remove it")
        # the first window that reaches the end is the last
        for start in range(begin, max(begin + 1, end - stride), room - stride):
            count = min(room, end - start)
            rows.append((number, len(layout.specials[0]) + len(question) + len(layout.specials[1]), start, count))
            examples.append((question, found.ids[start : start + count]))
    of, firsts, begins, counts = np.array(rows, np.int64).T
    return Windows(_examples(layout, examples), of, firsts, begins, counts, np.asarray(paragraph_of, np.int64), found)


def _layout(tokenizer: Tokenizer) -> _Layout:
    """Read the layout of a pair off a small one."""
    pair = tokenizer("a", "a", return_token_type_ids=True)  # else one of no known class leaves BERT's segments out
    sides = pair.sequence_ids(0)
    a, b = sides.index(0), sides.index(1)
    after_a, after_b = a + sides.count(0), b + sides.count(1)
    ids = np.array(pair["input_ids"], np.int64)
    types = np.array(pair["token_type_ids"], np.int64)
    return _Layout(
        (ids[:a], ids[after_a:b], ids[after_b:]),
        (types[:a], types[after_a:b], types[after_b:]),
        (int(types[a]), int(types[b])),
    )


def _examples(layout: _Layout, pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> Examples:
    (head, middle, tail), (head_types, middle_types, tail_types) = layout.specials, layout.special_types
    ids, types = [], []
    for question, window in pairs:
        ids += [head, question, middle, window, tail]
        types += [head_types, np.full(len(question), layout.types[0]), middle_types]
        types += [np.full(len(window), layout.types[1]), tail_types]
    special = len(head) + len(middle) + len(tail)
    lengths = [special + len(question) + len(window) for question, window in pairs]
    return Examples(np.concatenate(ids), np.concatenate(types), np.array(lengths, np.int64))


def tokenise(tokenizer: Tokenizer, paragraphs: Sequence[str]) -> Paragraphs:
    """Tokens of paragraphs, without special ones, and their characters."""
    ids: list[np.ndarray] = []
    characters: list[np.ndarray] = []
    for start in range(0, len(paragraphs), AT_ONCE):
        some = list(paragraphs[start : start + AT_ONCE])
        # nothing is cut here: whether a paragraph is longer than the model reads does not matter
        found = tokenizer(some, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        ids += [np.array(row, np.int64) for row in found["input_ids"]]
        characters += [
            _with_marks(text, _without_spaces(text, np.array(row, np.int64).reshape(-1, 2)))
            for text, row in zip(some, found["offset_mapping"], strict=True)
        ]
    flat = np.concatenate(characters)
    return Paragraphs(np.concatenate(ids), flat[:, 0], flat[:, 1], np.cumsum([0, *map(len, ids)]))


def _without_spaces(text: str, characters: np.ndarray) -> np.ndarray:
    """Move the (n, 2) edges of tokens inwards past spaces: SentencePiece's tokens may begin with the space before."""
    spaces = np.isin(np.frombuffer(text.encode("utf-32-le"), np.uint32), _SPACES)
    places = np.arange(len(text) + 1)
    following = np.minimum.accumulate(np.where(np.append(spaces, False), len(text), places)[::-1])[::-1]
    before = np.maximum.accumulate(np.where(np.insert(spaces, 0, True), 0, places))  # one after the last non-space
    starts = np.minimum(following[characters[:, 0]], characters[:, 1])
    return np.stack([starts, np.maximum(before[characters[:, 1]], starts)], axis=1)


def _with_marks(text: str, characters: np.ndarray) -> np.ndarray:
    """Give the vowel signs and accents that a tokenizer dropped (BERT's uncased ones) to the letter before."""
    following = np.append(characters[1:, 0], len(text))
    for number in np.flatnonzero(characters[:, 1] < following):
        while characters[number, 1] < following[number] and category(text[characters[number, 1]]).startswith("M"):
            characters[number, 1] += 1
    return characters


def targets(windows: Windows, spans: Sequence[tuple[int, int]]) -> np.ndarray:
    """First and last token of the answer within each window: (N, 2) int64; (0, 0) if not all of it is in there.

    Args:
        windows: of Q questions, N in all.
        spans: (Q,) first character of its answer in the paragraph, and the one after its last; neither is a space.
    """
    found = windows.paragraphs
    tokens = np.empty((len(spans), 2), np.int64)
    for number, (paragraph, (start, end)) in enumerate(zip(windows.asked, spans, strict=True)):
        begin, stop = found.bounds[paragraph : paragraph + 2]
        # all tokens that have a character of the answer: starts and ends never fall within a paragraph
        tokens[number, 0] = begin + np.searchsorted(found.ends[begin:stop], start, side="right")
        tokens[number, 1] = begin + np.searchsorted(found.starts[begin:stop], end, side="left") - 1
    first, last = tokens[windows.questions].T  # (N,) each
    inside = (first <= last) & (windows.begins <= first) & (last < windows.begins + windows.counts)
    shift = windows.firsts - windows.begins
    return np.where(inside[:, None], np.stack([first + shift, last + shift], axis=1), 0)

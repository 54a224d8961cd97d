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
    """Tokens of P paragraphs, end to end; all int64."""

    ids: np.ndarray  # (T,)
    starts: np.ndarray  # (T,) the token's first character, spaces at its edges left out
    ends: np.ndarray  # (T,) the one after its last; equal to its start where it has no other
    bounds: np.ndarray  # (P + 1,) paragraph p has the tokens bounds[p] to bounds[p + 1]


@dataclass(frozen=True)
class Windows:
    """N windows of Q questions, in the order of the questions."""

    examples: Examples  # their tokens, the question's and special ones too
    questions: np.ndarray  # (N,) the question of each window
    firsts: np.ndarray  # (N,) place of its first paragraph token within the example
    begins: np.ndarray  # (N,) the same token's place in `paragraphs`
    counts: np.ndarray  # (N,) its paragraph tokens
    asked: np.ndarray  # (Q,) paragraph of each question
    paragraphs: Paragraphs


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

    `paragraph_of` is (Q,), the paragraph of each question; `stride` tokens two windows of a paragraph share.

    Raises:
        InputError: the windows would not move on, or a paragraph has nothing that the tokenizer knows.
    """
    (head, middle, tail), kinds = _layout(tokenizer)
    special = head.shape[1] + middle.shape[1] + tail.shape[1]
    if question_tokens + stride + special >= max_tokens:
        raise InputError(
            f"max_tokens ({max_tokens}, or what the encoder reads) must exceed question_tokens ({question_tokens}) + "
            f"stride ({stride}) + {special} special tokens"
        )
    asked = tokenizer(list(questions), add_special_tokens=False, truncation=True, max_length=question_tokens)
    found = tokenise(tokenizer, paragraphs)
    rows, examples = [], []
    for number, (question, paragraph) in enumerate(zip(asked["input_ids"], paragraph_of, strict=True)):
        before = np.hstack([head, _typed(question, kinds[0]), middle])  # (2, n) ids and types
        room = max_tokens - before.shape[1] - tail.shape[1]
        begin, end = found.bounds[paragraph : paragraph + 2].tolist()
        if begin == end:
            raise InputError(f"question {questions[number]!r:.80}: its paragraph has not one token: remove it")
        # the first window that reaches the end is the last
        for start in range(begin, max(begin + 1, end - stride), room - stride):
            count = min(room, end - start)
            rows.append((number, before.shape[1], start, count))
            examples.append(np.hstack([before, _typed(found.ids[start : start + count], kinds[1]), tail]))
    of, firsts, begins, counts = np.array(rows, np.int64).T
    ids, types = np.hstack(examples)
    laid_out = Examples(ids, types, np.array([example.shape[1] for example in examples]))
    return Windows(laid_out, of, firsts, begins, counts, np.asarray(paragraph_of, np.int64), found)


def _layout(tokenizer: Tokenizer) -> tuple[list[np.ndarray], list[int]]:
    """What stands before, between and behind a pair, each (2, n) ids and types; and the types of both sides."""
    pair = tokenizer("a", "a", return_token_type_ids=True)  # else one of no known class leaves BERT's segments out
    sides = pair.sequence_ids(0)
    a, b = sides.index(0), sides.index(1)
    both = np.array([pair["input_ids"], pair["token_type_ids"]], np.int64)
    return [both[:, :a], both[:, a + sides.count(0) : b], both[:, b + sides.count(1) :]], both[1, [a, b]].tolist()


def _typed(ids: Sequence[int] | np.ndarray, kind: int) -> np.ndarray:
    """(n,) ids -> (2, n) ids and their type."""
    return np.stack([np.asarray(ids, np.int64), np.full(len(ids), kind)])


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

    Spans are (Q,): first character of the answer in its paragraph, and the one after its last; neither is a space.
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

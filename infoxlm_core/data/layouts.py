"""Sequence layouts: pieces of sentences -> sequences with their special tokens, many at once, end to end.

One walk, letters being pieces: the pairs (ab, xyz) and (c, uv) of two corpora, with mixup and mode 0, become

    query view  <s> a b </s> c </s>          key view  <s> x y z </s> u v </s>

TLM writes one pair as <s> a b </s> x y z </s>; MLM writes sentences of one language as <s> a b </s> c </s>.
"""

from dataclasses import dataclass

import numpy as np

from infoxlm_core.data.shards import gather_slices
from infoxlm_core.data.vocabulary import BOS, EOS, FIRST_POSITION


@dataclass(frozen=True)
class Sequences:
    """N sequences end to end, in numpy: flat ids (T,) and lengths (N,)."""

    flat: np.ndarray
    lengths: np.ndarray

    def __getitem__(self, part: slice) -> "Sequences":
        ends = np.concatenate([[0], self.lengths.cumsum()])
        start, stop, _ = part.indices(len(self.lengths))
        return Sequences(self.flat[ends[start] : ends[stop]], self.lengths[start:stop])


NOTHING = Sequences(np.empty(0, np.int64), np.empty(0, np.int64))


def join(parts: list[Sequences]) -> Sequences:
    """The sequences of all parts, one part after the other."""
    return Sequences(np.concatenate([p.flat for p in parts]), np.concatenate([p.lengths for p in parts]))


def choose(condition: np.ndarray, yes: Sequences, no: Sequences) -> Sequences:
    """Sequence i of `yes` where condition[i], else of `no`."""
    lengths = np.where(condition, yes.lengths, no.lengths)
    starts = np.where(condition, yes.lengths.cumsum() - yes.lengths, no.lengths.cumsum() - no.lengths)
    return Sequences(gather_slices([no.flat, yes.flat], condition.astype(np.int64), starts, lengths), lengths)


def lay_out(*segments: Sequences) -> Sequences:
    """`<s> segment </s> segment </s> …` for each i; a segment of no tokens is left out with its `</s>`."""
    spans = [np.where(s.lengths > 0, s.lengths + 1, 0) for s in segments]
    lengths = 1 + np.sum(spans, axis=0)
    flat = np.full(lengths.sum(), EOS, np.int64)
    start = lengths.cumsum() - lengths
    flat[start] = BOS
    start = start + 1
    for segment, span in zip(segments, spans, strict=True):
        within = np.arange(len(segment.flat)) - np.repeat(segment.lengths.cumsum() - segment.lengths, segment.lengths)
        flat[np.repeat(start, segment.lengths) + within] = segment.flat
        start = start + span
    return Sequences(flat, lengths)


def mix(first: tuple[Sequences, Sequences], second: tuple[Sequences, Sequences], mode: np.ndarray, cross: np.ndarray,
        joined: np.ndarray) -> tuple[Sequences, Sequences]:  # fmt: skip
    """Mixup (InfoXLM, section 3.3): pairs (c1, c2) and (d1, d2) -> query and key views.

    Args:
        first, second: the two sides of N pairs each.
        mode: (N,) in 0…7; bit 1 swaps the order on the source side, 2 on the target side, 4 exchanges the sides.
        cross: (N,) true exchanges d1 and d2 first, so that each view mixes languages.
        joined: (N,) false leaves the second pair out; only bit 4 of the mode then counts.
    """
    (c1, c2), (d1, d2) = first, second
    empty = Sequences(np.empty(0, np.int64), np.zeros_like(c1.lengths))
    d1, d2 = choose(cross, d2, d1), choose(cross, d1, d2)
    d1, d2 = choose(joined, d1, empty), choose(joined, d2, empty)
    swap_source, swap_target = (mode & 1 > 0) & joined, (mode & 2 > 0) & joined
    source = lay_out(choose(swap_source, d1, c1), choose(swap_source, c1, d1))
    target = lay_out(choose(swap_target, d2, c2), choose(swap_target, c2, d2))
    exchange = mode & 4 > 0
    return choose(exchange, target, source), choose(exchange, source, target)


def positions(lengths: np.ndarray) -> np.ndarray:
    """(N,) lengths -> (T,) positions that restart at 2 in every sequence, as XLM-R counts them."""
    return np.arange(lengths.sum()) - np.repeat(lengths.cumsum() - lengths, lengths) + FIRST_POSITION

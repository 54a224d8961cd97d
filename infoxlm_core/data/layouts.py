"""Sequence layouts: pieces of sentences -> sequences with special tokens, end to end.

With letters as pieces, mixup and mode 0, the pairs (ab, xyz) and (c, uv) of two corpora become

    query view  <s> a b </s> c </s>          key view  <s> x y z </s> u v </s>

TLM writes one pair as <s> a b </s> x y z </s>; MLM writes sentences of one language as <s> a b </s> c </s>.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from infoxlm_core.data.shards import Table, end_to_end
from infoxlm_core.data.vocabulary import BOS, EOS, FIRST_POSITION


@dataclass(frozen=True)
class Sequences:
    """N sequences end to end: flat ids (T,) and lengths (N,)."""

    flat: np.ndarray
    lengths: np.ndarray

    def __getitem__(self, part: slice) -> "Sequences":
        ends = np.concatenate([[0], self.lengths.cumsum()])
        start, stop, _ = part.indices(len(self.lengths))
        return Sequences(self.flat[ends[start] : ends[stop]], self.lengths[start:stop])

    @property
    def rows(self) -> list[np.ndarray]:
        """Views of the ids of each sequence."""
        ends = self.lengths.cumsum()
        spans = zip((ends - self.lengths).tolist(), ends.tolist(), strict=True)
        return [self.flat[start:end] for start, end in spans]


def gather(tables: list[Table], which: np.ndarray, rows: np.ndarray, limit: int) -> Sequences:
    """Read N rows, rows[i] of tables[which[i]], each truncated to `limit` tokens."""
    parts = []
    for number, row in zip(which.tolist(), rows.tolist(), strict=True):
        table = tables[number]
        start, end = table.offsets.item(row), table.offsets.item(row + 1)
        parts.append(table.tokens[start : min(end, start + limit)])
    return Sequences(end_to_end(parts), np.fromiter(map(len, parts), np.int64, len(parts)))


_BOS, _EOS = np.array([BOS]), np.array([EOS])
NOTHING = Sequences(np.empty(0, np.int64), np.empty(0, np.int64))


def join(parts: list[Sequences]) -> Sequences:
    """Concatenate sequences."""
    flat = np.concatenate([part.flat for part in parts])
    return Sequences(flat, np.concatenate([part.lengths for part in parts]))


def choose(condition: np.ndarray, yes: Sequences, no: Sequences) -> Sequences:
    """Return sequence i of `yes` where condition[i], else of `no`."""
    triples = zip(condition.tolist(), yes.rows, no.rows, strict=True)
    chosen = [yes_row if is_true else no_row for is_true, yes_row, no_row in triples]
    return Sequences(end_to_end(chosen), np.where(condition, yes.lengths, no.lengths))


def lay_out(*segments: Sequences) -> Sequences:
    """Lay out `<s> segment </s> segment </s> …` for each i; an empty segment is omitted with its `</s>`."""
    return _write(list(zip(*(s.rows for s in segments), strict=True)))


def _write(sequences: Sequence[Sequence[np.ndarray]]) -> Sequences:
    """Write `<s>` and then each segment with `</s>`, sequence by sequence; empty segments are omitted."""
    parts: list[np.ndarray] = []
    lengths = []
    for segments in sequences:
        parts.append(_BOS)
        length = 1
        for segment in segments:
            if len(segment):
                parts += (segment, _EOS)
                length += len(segment) + 1
        lengths.append(length)
    return Sequences(end_to_end(parts), np.array(lengths, np.int64))


def mix(
    first: tuple[Sequences, Sequences],
    second: tuple[Sequences, Sequences],
    mode: np.ndarray,
    cross: np.ndarray,
    joined: np.ndarray,
) -> tuple[Sequences, Sequences]:
    """Apply mixup (InfoXLM, section 3.3) to pairs (c1, c2) and (d1, d2); return query and key views.

    Args:
        first: both sides of N pairs.
        second: both sides of the N pairs to join with them.
        mode: (N,) in 0…7; bit 1 swaps the order on the source side, 2 on the target side, 4 exchanges the sides.
        cross: (N,) true first exchanges d1 and d2, so that each view mixes languages.
        joined: (N,) false omits the second pair; then only bit 4 of the mode has an effect.
    """
    queries, keys = [], []
    pairs = zip(first[0].rows, first[1].rows, second[0].rows, second[1].rows, strict=True)
    decisions = zip(mode.tolist(), cross.tolist(), joined.tolist(), strict=True)
    for (c1, c2, d1, d2), (bits, crossed, both) in zip(pairs, decisions, strict=True):
        if crossed:
            d1, d2 = d2, d1
        source, target = ([c1, d1], [c2, d2]) if both else ([c1], [c2])
        if bits & 1:
            source.reverse()
        if bits & 2:
            target.reverse()
        if bits & 4:
            source, target = target, source
        queries.append(source)
        keys.append(target)
    return _write(queries), _write(keys)


def positions(lengths: np.ndarray) -> np.ndarray:
    """Return positions (T,) that restart at 2 in every sequence, as XLM-R counts them."""
    return np.arange(lengths.sum()) - np.repeat(lengths.cumsum() - lengths, lengths) + FIRST_POSITION

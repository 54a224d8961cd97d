"""Arrange the token ids of sentences as sequences with special tokens.

With letters as tokens, TLM writes the pair (ab, xyz) as <s> a b </s> x y z </s>. MLM writes sentences of a language as
<s> a b </s> c </s>. `mixup` arranges pairs for the contrast.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from infoxlm_core.data.shards import Table, concatenate_int64
from infoxlm_core.data.vocabulary import Vocabulary


@dataclass(frozen=True)
class Sequences:
    """N sequences of token ids, stored one after another."""

    flat: np.ndarray  # (T,) the ids of all sequences
    lengths: np.ndarray  # (N,) the number of tokens of each sequence

    def __getitem__(self, selected: slice) -> "Sequences":
        offsets = np.concatenate([[0], self.lengths.cumsum()])  # (N + 1,)
        start, stop, _ = selected.indices(len(self.lengths))
        return Sequences(self.flat[offsets[start] : offsets[stop]], self.lengths[start:stop])

    @property
    def rows(self) -> list[np.ndarray]:
        """Return the ids of each sequence, as views of `flat`."""
        end_offsets = self.lengths.cumsum()
        start_offsets = end_offsets - self.lengths
        offset_pairs = zip(start_offsets.tolist(), end_offsets.tolist(), strict=True)
        return [self.flat[start:end] for start, end in offset_pairs]


def read_rows(tables: Sequence[Table], rows: np.ndarray, max_tokens: int) -> Sequences:
    """Return one row of each table, row rows[i] of tables[i], truncated to `max_tokens` tokens."""
    token_ids = []
    for table, row in zip(tables, rows.tolist(), strict=True):
        # `item` returns a Python int, which is faster than indexing an array with a single index.
        start = table.offsets.item(row)
        end = table.offsets.item(row + 1)
        token_ids.append(table.tokens[start : min(end, start + max_tokens)])
    lengths = np.array([len(ids) for ids in token_ids], np.int64)
    return Sequences(concatenate_int64(token_ids), lengths)


EMPTY = Sequences(np.empty(0, np.int64), np.empty(0, np.int64))


def join(batches: list[Sequences]) -> Sequences:
    """Concatenate several batches of sequences."""
    flat = np.concatenate([sequences.flat for sequences in batches])
    lengths = np.concatenate([sequences.lengths for sequences in batches])
    return Sequences(flat, lengths)


def choose_sequences(condition: np.ndarray, if_true: Sequences, if_false: Sequences) -> Sequences:
    """Return sequence i of `if_true` where condition[i] is true, and of `if_false` elsewhere."""
    chosen = []
    for is_true, true_row, false_row in zip(condition.tolist(), if_true.rows, if_false.rows, strict=True):
        chosen.append(true_row if is_true else false_row)
    return Sequences(concatenate_int64(chosen), np.where(condition, if_true.lengths, if_false.lengths))


def lay_out(segments: Sequence[Sequences], vocabulary: Vocabulary) -> Sequences:
    """Return the sequences `<s> segment </s> segment </s> …`, with row i of each of `segments` in sequence i.

    An empty segment is omitted together with its `</s>`.
    """
    rows_by_segment = [sequences.rows for sequences in segments]
    return add_special_tokens(list(zip(*rows_by_segment, strict=True)), vocabulary)


def add_special_tokens(segments_by_sequence: Sequence[Sequence[np.ndarray]], vocabulary: Vocabulary) -> Sequences:
    """Return a sequence `<s> segment </s> segment </s> …` for each list of segments."""
    begin = np.array([vocabulary.begin])
    end = np.array([vocabulary.end])
    token_ids: list[np.ndarray] = []
    lengths = []
    for segments in segments_by_sequence:
        token_ids.append(begin)
        length = 1
        for segment in segments:
            if len(segment):  # an empty segment has no `</s>` either
                token_ids += (segment, end)
                length += len(segment) + 1
        lengths.append(length)
    return Sequences(concatenate_int64(token_ids), np.array(lengths, np.int64))


def number_positions(lengths: np.ndarray) -> np.ndarray:
    """Return the position of each token in its sequence, (T,), counted from 0."""
    start_offsets = lengths.cumsum() - lengths
    return np.arange(lengths.sum()) - np.repeat(start_offsets, lengths)

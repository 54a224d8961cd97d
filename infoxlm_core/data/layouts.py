"""Arrange sentences' token ids as sequences with special tokens.

With letters as tokens, the TLM sequence of the pair (ab, xyz) is <s> a b </s> x y z </s>. The MLM sequence of the
sentences ab and c is <s> a b </s> c </s>. The module `mixup` arranges pairs for contrast.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from infoxlm_core.data.shards import Table, concatenate_int64
from infoxlm_core.data.vocabulary import Vocabulary


@dataclass(frozen=True)
class Sequences:
    """N concatenated sequences of token ids."""

    flat: np.ndarray  # (T,) ids of all sequences
    lengths: np.ndarray  # (N,) token count of each sequence

    def __getitem__(self, selected: slice) -> "Sequences":
        offsets = np.concatenate([[0], self.lengths.cumsum()])  # (N + 1,)
        start, stop, _ = selected.indices(len(self.lengths))
        return Sequences(self.flat[offsets[start] : offsets[stop]], self.lengths[start:stop])

    @property
    def rows(self) -> list[np.ndarray]:
        """Ids of each sequence, as views of `flat`."""
        end_offsets = self.lengths.cumsum()
        start_offsets = end_offsets - self.lengths
        offset_pairs = zip(start_offsets.tolist(), end_offsets.tolist(), strict=True)
        return [self.flat[start:end] for start, end in offset_pairs]


def read_rows(tables: Sequence[Table], rows: np.ndarray, max_tokens: int) -> Sequences:
    """Return row `rows[i]` of `tables[i]` for every i, each truncated to `max_tokens` tokens."""
    token_ids = []
    for table, row in zip(tables, rows.tolist(), strict=True):
        # `item` returns a Python int, and is faster than indexing.
        start = table.offsets.item(row)
        end = table.offsets.item(row + 1)
        token_ids.append(table.tokens[start : min(end, start + max_tokens)])
    lengths = np.array([len(ids) for ids in token_ids], np.int64)
    return Sequences(concatenate_int64(token_ids), lengths)


EMPTY = Sequences(np.empty(0, np.int64), np.empty(0, np.int64))


def join(batches: list[Sequences]) -> Sequences:
    """Concatenate batches of sequences."""
    flat = np.concatenate([sequences.flat for sequences in batches])
    lengths = np.concatenate([sequences.lengths for sequences in batches])
    return Sequences(flat, lengths)


def choose_sequences(condition: np.ndarray, if_true: Sequences, if_false: Sequences) -> Sequences:
    """Choose sequence i from `if_true` where condition[i] is true, and from `if_false` elsewhere."""
    chosen = []
    for is_true, true_row, false_row in zip(condition.tolist(), if_true.rows, if_false.rows, strict=True):
        chosen.append(true_row if is_true else false_row)
    return Sequences(concatenate_int64(chosen), np.where(condition, if_true.lengths, if_false.lengths))


def lay_out(segments: Sequence[Sequences], vocabulary: Vocabulary) -> Sequences:
    """Return sequences `<s> segment </s> segment </s> …`. Sequence i consists of row i of all `segments`.

    Empty segments are omitted together with their `</s>`.
    """
    rows_by_segment = [sequences.rows for sequences in segments]
    return add_special_tokens(list(zip(*rows_by_segment, strict=True)), vocabulary)


def add_special_tokens(segments_by_sequence: Sequence[Sequence[np.ndarray]], vocabulary: Vocabulary) -> Sequences:
    """Return a sequence `<s> segment </s> segment </s> …` for each list of segments. Empty segments are omitted."""
    begin = np.array([vocabulary.begin])
    end = np.array([vocabulary.end])
    token_ids: list[np.ndarray] = []
    lengths = []
    for segments in segments_by_sequence:
        token_ids.append(begin)
        length = 1
        for segment in segments:
            if len(segment):
                token_ids += (segment, end)
                length += len(segment) + 1
        lengths.append(length)
    return Sequences(concatenate_int64(token_ids), np.array(lengths, np.int64))


def number_positions(lengths: np.ndarray) -> np.ndarray:
    """Return each token's position (T,) within its sequence, counted from 0."""
    start_offsets = lengths.cumsum() - lengths
    return np.arange(lengths.sum()) - np.repeat(start_offsets, lengths)

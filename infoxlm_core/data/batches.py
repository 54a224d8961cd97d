"""Packed batches: what one forward pass sees.

A micro-batch holds MLM and TLM sequences, then query views, end to end; key views stand in a pack of their own.
"""

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from infoxlm_core.data.layouts import Sequences, join, positions
from infoxlm_core.data.samples import Draw


@dataclass(frozen=True)
class PackedBatch:
    """One micro-batch, on one device.

    Attributes:
        ids, positions: (T,) of all MLM, TLM and query-view sequences end to end.
        lengths: tokens of each sequence; the first `lm_sequences` are MLM and TLM, the rest query views.
        target_rows: (N,) rows to predict, MLM's first; `target_ids` their answers; `mlm_targets` how many are MLM's.
        target_counts: targets in each MLM and TLM sequence.
        key_ids, key_positions, key_lengths: the key views, one for each query view.
        meanings: (B, 2) int64 meanings joined in each view.
        place: first virtual shard and number of the micro-batch, which dropout is drawn by.
    """

    ids: Tensor
    positions: Tensor
    lengths: tuple[int, ...]
    lm_sequences: int
    target_rows: Tensor
    target_ids: Tensor
    target_counts: tuple[int, ...]
    mlm_targets: int
    key_ids: Tensor
    key_positions: Tensor
    key_lengths: tuple[int, ...]
    meanings: Tensor
    place: tuple[int, int] = (0, 0)

    @property
    def tokens(self) -> int:
        return len(self.ids) + len(self.key_ids)

    def to(self, device: torch.device | str) -> "PackedBatch":
        if torch.device(device).type == "cpu":
            return self
        parts: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        for name, part in parts.items():
            if isinstance(part, Tensor):
                parts[name] = part.pin_memory().to(device, non_blocking=True)
        return PackedBatch(**parts)


def micro_batches(draw: Draw, size: int) -> list[PackedBatch]:
    """Cut a worker's samples into packed micro-batches of at most `size` samples of each objective."""
    most = max(len(draw.mlm.lengths), len(draw.tlm.lengths), len(draw.queries.lengths))
    return [_pack(draw, slice(start, start + size)) for start in range(0, most, size)]


def _pack(draw: Draw, part: slice) -> PackedBatch:
    mlm, mlm_seen, mlm_rows = _cut(draw.mlm, draw.mlm_seen, draw.mlm_rows, part)
    tlm, tlm_seen, tlm_rows = _cut(draw.tlm, draw.tlm_seen, draw.tlm_rows, part)
    queries, keys = draw.queries[part], draw.keys[part]
    lm = join([mlm, tlm])
    rows = np.concatenate([mlm_rows, tlm_rows + len(mlm.flat)])
    lengths = np.concatenate([lm.lengths, queries.lengths])
    owner = np.searchsorted(lm.lengths.cumsum(), rows, side="right")
    return PackedBatch(
        ids=torch.from_numpy(np.concatenate([mlm_seen, tlm_seen, queries.flat])),
        positions=torch.from_numpy(positions(lengths)),
        lengths=tuple(lengths.tolist()),
        lm_sequences=len(lm.lengths),
        target_rows=torch.from_numpy(rows),
        target_ids=torch.from_numpy(lm.flat[rows]),
        target_counts=tuple(np.bincount(owner, minlength=len(lm.lengths)).tolist()),
        mlm_targets=len(mlm_rows),
        key_ids=torch.from_numpy(keys.flat),
        key_positions=torch.from_numpy(positions(keys.lengths)),
        key_lengths=tuple(keys.lengths.tolist()),
        meanings=torch.from_numpy(draw.meanings[part]),
    )


def _cut(
    sequences: Sequences, seen: np.ndarray, rows: np.ndarray, part: slice
) -> tuple[Sequences, np.ndarray, np.ndarray]:
    ends = np.concatenate([[0], sequences.lengths.cumsum()])
    start, stop, _ = part.indices(len(sequences.lengths))
    first, last = ends[start], ends[stop]
    inside = rows[np.searchsorted(rows, first) : np.searchsorted(rows, last)]
    return sequences[part], seen[first:last], inside - first

"""Packed batches: the input of one forward pass.

A micro-batch holds MLM and TLM sequences, then query views, end to end. Key views are packed separately.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from infoxlm_core.data.layouts import join, positions
from infoxlm_core.data.samples import Draw
from infoxlm_core.data.vocabulary import PAD


@dataclass(frozen=True)
class PackedBatch:
    """One micro-batch, on one device."""

    ids: Tensor  # (T,) of all MLM, TLM and query-view sequences end to end
    positions: Tensor  # (T,)
    lengths: tuple[int, ...]  # tokens of each sequence
    lm_sequences: int  # MLM and TLM sequences, which come first; the rest are query views
    target_rows: Tensor  # (N,) rows to predict, MLM's first; the last layer computes only these rows
    target_ids: Tensor  # (N,) their answers
    target_counts: tuple[int, ...]  # rows to predict in each MLM and TLM sequence
    target_groups: Tensor  # (N,) index into `Sampler.groups` of each target
    mlm_targets: int  # the number of MLM's targets
    key_ids: Tensor  # of the key views, one for each query view
    key_positions: Tensor
    key_lengths: tuple[int, ...]
    sentence_ids: Tensor  # (B, 2) int64 ids of the sentences joined in each view
    view_groups: Tensor  # (B,) groups of the views
    items: int  # contrast items: B, or B / 2 if a second half repeats them with query and key views exchanged
    rng_key: tuple[int, int, int] = (0, 0, 0)  # step, first virtual shard, number of the micro-batch: seeds dropout
    flops: float = 0.0  # of a forward and backward pass of the network
    answered: Tensor | None = None  # (N,) which rows have targets, if not all do: see `aligned`
    padding: int = 0  # padding tokens, which are not counted
    idle: bool = False  # computed only because other workers have one more batch, and not counted

    @property
    def tokens(self) -> int:
        return len(self.ids) + len(self.key_ids) - self.padding

    @property
    def counts(self) -> dict[str, float]:
        """Targets of each objective, tokens and FLOPs."""
        if self.idle:
            return {}
        return {
            "mlm": self.mlm_targets,
            "tlm": len(self.target_ids) - self.mlm_targets,
            "xlco": self.items,
            "tokens": self.tokens,
            "flops": self.flops,
        }

    def to(self, device: torch.device | str) -> "PackedBatch":
        if self.ids.device.type == torch.device(device).type:
            return self
        parts: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        for name, part in parts.items():
            if isinstance(part, Tensor):
                parts[name] = part.pin_memory().to(device, non_blocking=True)
        return PackedBatch(**parts)

    def aligned(self, multiple: int) -> "PackedBatch":
        """Return the batch padded for GPU kernels.

        One sequence of padding makes each of three token counts a multiple of `multiple`: MLM and TLM, query views, key
        views. Every sequence gets a row that the last layer computes, which FlashAttention 3 requires.
        """
        lm, views = list(self.lengths[: self.lm_sequences]), list(self.lengths[self.lm_sequences :])
        keys, cut = list(self.key_lengths), sum(lm)
        more = [-sum(part) % multiple for part in (lm, views, keys)]

        def padded(values: Tensor, count: int, filled: bool) -> list[Tensor]:
            fill = positions(np.array([count])) if filled else np.full(count, PAD)
            return [values, torch.from_numpy(fill).to(values.dtype)] if count else [values]

        def whole(values: Tensor, filled: bool) -> Tensor:
            return torch.cat(padded(values[:cut], more[0], filled) + padded(values[cut:], more[1], filled))

        lm, views, keys = (part + [count] * (count > 0) for part, count in zip((lm, views, keys), more, strict=True))
        counts = self.target_counts + (0,) * (len(lm) - self.lm_sequences)
        rows, counts, answered = give_each_a_row(self.target_rows, counts, lm)
        return replace(
            self,
            ids=whole(self.ids, False),
            positions=whole(self.positions, True),
            lengths=(*lm, *views),
            lm_sequences=len(lm),
            target_rows=rows,
            target_counts=counts,
            answered=answered,
            key_ids=torch.cat(padded(self.key_ids, more[2], False)),
            key_positions=torch.cat(padded(self.key_positions, more[2], True)),
            key_lengths=tuple(keys),
            padding=sum(more),
        )


def give_each_a_row(
    rows: Tensor, counts: Sequence[int], lengths: Sequence[int]
) -> tuple[Tensor, tuple[int, ...], Tensor | None]:
    """Add the first row of every sequence that has no row.

    Args:
        rows: (R,) ascending rows of packed sequences.
        counts: rows of each sequence.
        lengths: tokens of each sequence.

    Returns:
        The new rows, their number in each sequence, and the indices of the old rows among them; None if none was added.
    """
    missing = np.flatnonzero(np.array(counts, np.int64) == 0)
    if not len(missing):
        return rows, tuple(counts), None
    ends = np.array(lengths, np.int64).cumsum()
    all_rows = np.sort(np.concatenate([rows.numpy(), (ends - lengths)[missing]]))
    answered = torch.from_numpy(np.searchsorted(all_rows, rows.numpy()))
    return torch.from_numpy(all_rows), tuple(max(1, count) for count in counts), answered


def micro_batches(draw: Draw, size: int, symmetric: bool = False) -> list[PackedBatch]:
    """Split a worker's samples into packed micro-batches of at most `size` samples of each objective.

    With `symmetric`, each contrast item is repeated with query and key view exchanged.
    """
    most = max(len(draw.mlm.groups), len(draw.tlm.groups), len(draw.groups))
    return [_pack(draw, slice(start, start + size), symmetric) for start in range(0, most, size)]


def _pack(draw: Draw, part: slice, symmetric: bool) -> PackedBatch:
    mlm, tlm = draw.mlm[part], draw.tlm[part]
    queries, keys = draw.queries[part], draw.keys[part]
    sentence_ids, view_groups = draw.sentence_ids[part], draw.groups[part]
    items = len(view_groups)
    if symmetric:
        queries, keys = join([queries, keys]), join([keys, queries])
        sentence_ids, view_groups = np.tile(sentence_ids, (2, 1)), np.tile(view_groups, 2)
    lm = join([mlm.sequences, tlm.sequences])
    rows = np.concatenate([mlm.rows, tlm.rows + len(mlm.seen)])
    lengths = np.concatenate([lm.lengths, queries.lengths])
    owner = np.searchsorted(lm.lengths.cumsum(), rows, side="right")
    return PackedBatch(
        ids=torch.from_numpy(np.concatenate([mlm.seen, tlm.seen, queries.flat])),
        positions=torch.from_numpy(positions(lengths)),
        lengths=tuple(lengths.tolist()),
        lm_sequences=len(lm.lengths),
        target_rows=torch.from_numpy(rows),
        target_ids=torch.from_numpy(lm.flat[rows]),
        target_counts=tuple(np.bincount(owner, minlength=len(lm.lengths)).tolist()),
        target_groups=torch.from_numpy(np.concatenate([mlm.groups, tlm.groups])[owner]),
        mlm_targets=len(mlm.rows),
        key_ids=torch.from_numpy(keys.flat),
        key_positions=torch.from_numpy(positions(keys.lengths)),
        key_lengths=tuple(keys.lengths.tolist()),
        sentence_ids=torch.from_numpy(sentence_ids),
        view_groups=torch.from_numpy(view_groups),
        items=items,
    )

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
        """Return the batch on a device; the copy to a GPU does not wait."""
        if self.ids.device.type == torch.device(device).type:
            return self
        moved_tensors: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                moved_tensors[field.name] = value.pin_memory().to(device, non_blocking=True)
        return replace(self, **moved_tensors)

    def aligned(self, multiple: int) -> "PackedBatch":
        """Return the batch padded for GPU kernels.

        One sequence of padding makes each of three token counts a multiple of `multiple`: MLM and TLM, query views, key
        views. Every sequence gets a row that the last layer computes, which FlashAttention 3 requires.
        """
        lm_lengths = list(self.lengths[: self.lm_sequences])
        view_lengths = list(self.lengths[self.lm_sequences :])
        key_lengths = list(self.key_lengths)
        lm_tokens = sum(lm_lengths)
        lm_padding = -lm_tokens % multiple
        view_padding = -sum(view_lengths) % multiple
        key_padding = -sum(key_lengths) % multiple
        target_counts = self.target_counts
        if lm_padding:
            lm_lengths.append(lm_padding)
            target_counts += (0,)
        if view_padding:
            view_lengths.append(view_padding)
        if key_padding:
            key_lengths.append(key_padding)

        lm_ids, view_ids = self.ids[:lm_tokens], self.ids[lm_tokens:]
        lm_positions, view_positions = self.positions[:lm_tokens], self.positions[lm_tokens:]
        target_rows, target_counts, answered = give_each_a_row(self.target_rows, target_counts, lm_lengths)
        return replace(
            self,
            ids=torch.cat([_pad_ids(lm_ids, lm_padding), _pad_ids(view_ids, view_padding)]),
            positions=torch.cat(
                [_pad_positions(lm_positions, lm_padding), _pad_positions(view_positions, view_padding)]
            ),
            lengths=(*lm_lengths, *view_lengths),
            lm_sequences=len(lm_lengths),
            target_rows=target_rows,
            target_counts=target_counts,
            answered=answered,
            key_ids=_pad_ids(self.key_ids, key_padding),
            key_positions=_pad_positions(self.key_positions, key_padding),
            key_lengths=tuple(key_lengths),
            padding=lm_padding + view_padding + key_padding,
        )


def _pad_ids(ids: Tensor, count: int) -> Tensor:
    """Append a sequence of `count` padding tokens to ids (T,)."""
    return torch.cat([ids, ids.new_full((count,), PAD)])


def _pad_positions(sequence_positions: Tensor, count: int) -> Tensor:
    """Append the positions of a sequence of `count` tokens to positions (T,)."""
    return torch.cat([sequence_positions, torch.from_numpy(positions(np.array([count])))])


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
    without_row = np.flatnonzero(np.array(counts, np.int64) == 0)
    if not len(without_row):
        return rows, tuple(counts), None
    first_rows = np.array(lengths, np.int64).cumsum() - lengths
    all_rows = np.sort(np.concatenate([rows.numpy(), first_rows[without_row]]))
    answered = torch.from_numpy(np.searchsorted(all_rows, rows.numpy()))
    return torch.from_numpy(all_rows), tuple(max(1, count) for count in counts), answered


def micro_batches(draw: Draw, size: int, symmetric: bool = False) -> list[PackedBatch]:
    """Split a worker's samples into packed micro-batches of at most `size` samples of each objective.

    With `symmetric`, each contrast item is repeated with query and key view exchanged.
    """
    sample_count = max(len(draw.mlm.groups), len(draw.tlm.groups), len(draw.groups))  # an objective may be off
    return [_pack(draw, slice(start, start + size), symmetric) for start in range(0, sample_count, size)]


def _pack(draw: Draw, part: slice, symmetric: bool) -> PackedBatch:
    """Return a part of the samples of each objective as one packed batch."""
    mlm, tlm = draw.mlm[part], draw.tlm[part]
    queries, keys = draw.queries[part], draw.keys[part]
    sentence_ids, view_groups = draw.sentence_ids[part], draw.groups[part]
    items = len(view_groups)
    if symmetric:
        queries, keys = join([queries, keys]), join([keys, queries])
        sentence_ids, view_groups = np.tile(sentence_ids, (2, 1)), np.tile(view_groups, 2)
    lm = join([mlm.sequences, tlm.sequences])
    lengths = np.concatenate([lm.lengths, queries.lengths])
    rows = np.concatenate([mlm.rows, tlm.rows + len(mlm.seen)])  # (N,) TLM's tokens follow MLM's
    sequence_of_row = np.searchsorted(lm.lengths.cumsum(), rows, side="right")
    sequence_groups = np.concatenate([mlm.groups, tlm.groups])
    return PackedBatch(
        ids=torch.from_numpy(np.concatenate([mlm.seen, tlm.seen, queries.flat])),
        positions=torch.from_numpy(positions(lengths)),
        lengths=tuple(lengths.tolist()),
        lm_sequences=len(lm.lengths),
        target_rows=torch.from_numpy(rows),
        target_ids=torch.from_numpy(lm.flat[rows]),
        target_counts=tuple(np.bincount(sequence_of_row, minlength=len(lm.lengths)).tolist()),
        target_groups=torch.from_numpy(sequence_groups[sequence_of_row]),
        mlm_targets=len(mlm.rows),
        key_ids=torch.from_numpy(keys.flat),
        key_positions=torch.from_numpy(positions(keys.lengths)),
        key_lengths=tuple(keys.lengths.tolist()),
        sentence_ids=torch.from_numpy(sentence_ids),
        view_groups=torch.from_numpy(view_groups),
        items=items,
    )

"""Packed batches, the input of one forward pass.

A batch is packed: its sequences follow each other without padding, MLM and TLM sequences first, then query views. Key
views are packed separately, because another encoder reads them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from infoxlm_core.data.layouts import join, number_positions
from infoxlm_core.data.samples import Draw, Masked, Views


@dataclass(frozen=True)
class PackedBatch:
    """One micro-batch, on one device."""

    ids: Tensor  # (T,) of all MLM, TLM and query-view sequences
    positions: Tensor  # (T,)
    lengths: tuple[int, ...]  # tokens of each sequence
    lm_sequences: int  # MLM and TLM sequences, which come first; the rest are query views
    target_rows: Tensor  # (N,) indices of the tokens to predict, MLM's first; the last layer computes only these rows
    target_ids: Tensor  # (N,) the tokens to predict
    target_counts: tuple[int, ...]  # tokens to predict in each MLM and TLM sequence
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
    rows_with_target: Tensor | None = None  # (N,) indices of the rows that have a target; None: all rows have one
    padding: int = 0  # padding tokens, which are not counted
    idle: bool = False  # computed only because other workers have another batch; losses and counts are ignored

    @property
    def tokens(self) -> int:
        return len(self.ids) + len(self.key_ids) - self.padding

    @property
    def counts(self) -> dict[str, float]:
        """Return the numbers of targets of each objective, of tokens and of FLOPs."""
        return {
            "mlm": self.mlm_targets,
            "tlm": len(self.target_ids) - self.mlm_targets,
            "xlco": self.items,
            "tokens": self.tokens,
            "flops": self.flops,
        }

    def to(self, device: torch.device | str) -> "PackedBatch":
        """Return the batch with its tensors on a device."""
        if self.ids.device.type == torch.device(device).type:
            return self
        moved_tensors: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                moved_tensors[field.name] = value.pin_memory().to(device, non_blocking=True)
        return replace(self, **moved_tensors)

    def aligned(self, multiple: int, pad_id: int) -> "PackedBatch":
        """Return the batch padded for GPU kernels.

        A sequence of padding tokens, whose id is `pad_id`, is appended to the MLM and TLM sequences, to the query views
        and to the key views, so that the number of tokens of each is a multiple of `multiple`. Every MLM and TLM
        sequence gets a row that the last layer computes, which FlashAttention 3 requires.
        """
        lm_lengths = self.lengths[: self.lm_sequences]
        view_lengths = self.lengths[self.lm_sequences :]
        lm_tokens = sum(lm_lengths)
        lm_padding = -lm_tokens % multiple
        view_padding = -sum(view_lengths) % multiple
        key_padding = -sum(self.key_lengths) % multiple

        lm_ids, lm_positions, lm_lengths = _append_padding(
            self.ids[:lm_tokens], self.positions[:lm_tokens], lm_lengths, lm_padding, pad_id
        )
        view_ids, view_positions, view_lengths = _append_padding(
            self.ids[lm_tokens:], self.positions[lm_tokens:], view_lengths, view_padding, pad_id
        )
        key_ids, key_positions, key_lengths = _append_padding(
            self.key_ids, self.key_positions, self.key_lengths, key_padding, pad_id
        )
        target_counts = (*self.target_counts, 0) if lm_padding else self.target_counts
        target_rows, target_counts, rows_with_target = add_missing_rows(self.target_rows, target_counts, lm_lengths)
        return replace(
            self,
            ids=torch.cat([lm_ids, view_ids]),
            positions=torch.cat([lm_positions, view_positions]),
            lengths=(*lm_lengths, *view_lengths),
            lm_sequences=len(lm_lengths),
            target_rows=target_rows,
            target_counts=target_counts,
            rows_with_target=rows_with_target,
            key_ids=key_ids,
            key_positions=key_positions,
            key_lengths=key_lengths,
            padding=lm_padding + view_padding + key_padding,
        )


def _append_padding(
    ids: Tensor, token_positions: Tensor, lengths: tuple[int, ...], count: int, pad_id: int
) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """Append a sequence of `count` padding tokens to packed sequences. Do nothing if `count` is 0."""
    if not count:
        return ids, token_positions, lengths
    padding_ids = torch.full((count,), pad_id, dtype=ids.dtype)
    padding_positions = torch.from_numpy(number_positions(np.array([count]))).to(token_positions.dtype)
    return (
        torch.cat([ids, padding_ids]),
        torch.cat([token_positions, padding_positions]),
        (*lengths, count),
    )


def add_missing_rows(
    rows: Tensor, counts: Sequence[int], lengths: Sequence[int]
) -> tuple[Tensor, tuple[int, ...], Tensor | None]:
    """Add the first row of every sequence that has no row.

    Args:
        rows: (R,) ascending indices of tokens of packed sequences.
        counts: the number of rows in each sequence.
        lengths: tokens of each sequence.

    Returns:
        All rows, the number of rows in each sequence, and the indices of the given rows among all rows (None if no
        row was added).
    """
    sequences_without_row = np.flatnonzero(np.array(counts, np.int64) == 0)
    if not len(sequences_without_row):
        return rows, tuple(counts), None
    start_offsets = np.array(lengths, np.int64).cumsum() - lengths
    added_rows = start_offsets[sequences_without_row]
    all_rows = np.sort(np.concatenate([rows.numpy(), added_rows]))
    given_row_indices = np.searchsorted(all_rows, rows.numpy())
    new_counts = tuple(max(1, count) for count in counts)
    return torch.from_numpy(all_rows), new_counts, torch.from_numpy(given_row_indices)


def micro_batches(draw: Draw, size: int, symmetric: bool = False) -> list[PackedBatch]:
    """Split a worker's samples into packed micro-batches of at most `size` samples of each objective.

    With `symmetric`, each contrast item is repeated with query and key view exchanged.
    """
    most_samples = max(len(draw.mlm.groups), len(draw.tlm.groups), len(draw.xlco.groups))
    batches = []
    for start in range(0, most_samples, size):
        selected = slice(start, start + size)
        views = draw.xlco[selected]
        batches.append(_pack(draw.mlm[selected], draw.tlm[selected], views, symmetric))
    return batches


def _pack(mlm: Masked, tlm: Masked, views: Views, symmetric: bool) -> PackedBatch:
    """Pack the samples of one micro-batch."""
    items = len(views.groups)
    if symmetric:
        views = views.with_exchanged_copy()
    lm = join([mlm.sequences, tlm.sequences])
    target_rows = np.concatenate([mlm.target_indices, tlm.target_indices + len(mlm.masked_ids)])  # (N,)
    sequence_of_target = np.searchsorted(lm.lengths.cumsum(), target_rows, side="right")  # (N,)
    lengths = np.concatenate([lm.lengths, views.queries.lengths])
    return PackedBatch(
        ids=torch.from_numpy(np.concatenate([mlm.masked_ids, tlm.masked_ids, views.queries.flat])),
        positions=torch.from_numpy(number_positions(lengths)),
        lengths=tuple(lengths.tolist()),
        lm_sequences=len(lm.lengths),
        target_rows=torch.from_numpy(target_rows),
        target_ids=torch.from_numpy(lm.flat[target_rows]),
        target_counts=tuple(np.bincount(sequence_of_target, minlength=len(lm.lengths)).tolist()),
        target_groups=torch.from_numpy(np.concatenate([mlm.groups, tlm.groups])[sequence_of_target]),
        mlm_targets=len(mlm.target_indices),
        key_ids=torch.from_numpy(views.keys.flat),
        key_positions=torch.from_numpy(number_positions(views.keys.lengths)),
        key_lengths=tuple(views.keys.lengths.tolist()),
        sentence_ids=torch.from_numpy(views.sentence_ids),
        view_groups=torch.from_numpy(views.groups),
        items=items,
    )

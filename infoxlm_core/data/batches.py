"""Packed batches, each the input of one forward pass.

A packed batch concatenates sequences without padding: first MLM and TLM sequences, then query views. Key views are
packed separately, because they are the input of the key encoder.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from infoxlm_core.data.layouts import join, number_positions
from infoxlm_core.data.samples import ContrastViews, DrawnSamples, MaskedSequences


@dataclass(frozen=True)
class PackedBatch:
    """A micro-batch on one device."""

    ids: Tensor  # (T,) MLM and TLM sequences, then query views
    positions: Tensor  # (T,)
    lengths: tuple[int, ...]  # token count of each sequence
    lm_sequences: int  # number of MLM and TLM sequences
    target_rows: Tensor  # (N,) indices of the tokens to predict, MLM first; the last layer computes only these rows
    target_ids: Tensor  # (N,) tokens to predict
    target_counts: tuple[int, ...]  # targets in each MLM and TLM sequence
    target_group_ids: Tensor  # (N,) each target's index into `Sampler.group_names`
    mlm_targets: int  # number of MLM targets
    key_ids: Tensor  # key views, one for each query view
    key_positions: Tensor
    key_lengths: tuple[int, ...]
    sentence_ids: Tensor  # (B, 2) ids of the sentences joined in each view
    view_group_ids: Tensor  # (B,) each view's index into `Sampler.group_names`
    contrast_count: int  # number of contrast samples: B, or B / 2 if views are also exchanged
    rng_key: tuple[int, int, int] = (0, 0, 0)  # seeds dropout: step, first virtual shard, micro-batch number
    flops: float = 0.0  # FLOPs of a forward and backward pass
    rows_with_target: Tensor | None = None  # (N,) indices into `target_rows` of the targets; None: all rows
    padding_tokens: int = 0
    is_dummy: bool = False  # losses are ignored; the batch exists because all workers must call a sharded network

    @property
    def tokens(self) -> int:
        """Number of tokens in all sequences and key views, without padding."""
        return len(self.ids) + len(self.key_ids) - self.padding_tokens

    @property
    def counts(self) -> dict[str, float]:
        """Target counts of the objectives, and the numbers of tokens and FLOPs."""
        return {
            "mlm": self.mlm_targets,
            "tlm": len(self.target_ids) - self.mlm_targets,
            "xlco": self.contrast_count,
            "tokens": self.tokens,
            "flops": self.flops,
        }

    def to(self, device: torch.device | str) -> "PackedBatch":
        """Move the batch's tensors to a device."""
        if self.ids.device.type == torch.device(device).type:
            return self
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        # Pin the memory, because a copy from pageable memory would block.
        moved: dict[str, Any] = {name: t.pin_memory().to(device, non_blocking=True) for name, t in tensors.items()}
        return replace(self, **moved)

    def pad_for_gpu(self, multiple: int, pad_id: int) -> "PackedBatch":
        """Pad the batch, because GPU kernels are fastest at certain numbers of tokens.

        The MLM and TLM sequences, the query views and the key views each receive a padding sequence, so that their
        token counts are multiples of `multiple`.
        """
        lm_tokens = sum(self.lengths[: self.lm_sequences])
        lm = _PackedSequences(self.ids[:lm_tokens], self.positions[:lm_tokens], self.lengths[: self.lm_sequences])
        queries = _PackedSequences(self.ids[lm_tokens:], self.positions[lm_tokens:], self.lengths[self.lm_sequences :])
        keys = _PackedSequences(self.key_ids, self.key_positions, self.key_lengths)

        padded_lm = lm.pad(multiple, pad_id)
        padded_queries = queries.pad(multiple, pad_id)
        padded_keys = keys.pad(multiple, pad_id)
        added_sequences = len(padded_lm.lengths) - len(lm.lengths)  # 0 or 1
        target_counts = (*self.target_counts, *[0] * added_sequences)  # padding has no targets
        targets = add_missing_rows(self.target_rows, target_counts, padded_lm.lengths)
        padded_ids = torch.cat([padded_lm.ids, padded_queries.ids])
        return replace(
            self,
            ids=padded_ids,
            positions=torch.cat([padded_lm.positions, padded_queries.positions]),
            lengths=padded_lm.lengths + padded_queries.lengths,
            lm_sequences=len(padded_lm.lengths),
            target_rows=targets.rows,
            target_counts=targets.counts,
            rows_with_target=targets.rows_with_target,
            key_ids=padded_keys.ids,
            key_positions=padded_keys.positions,
            key_lengths=padded_keys.lengths,
            padding_tokens=len(padded_ids) - len(self.ids) + len(padded_keys.ids) - len(self.key_ids),
        )


@dataclass(frozen=True)
class _PackedSequences:
    """Concatenated sequences with T tokens in total."""

    ids: Tensor  # (T,)
    positions: Tensor  # (T,) position of each token within its sequence
    lengths: tuple[int, ...]  # token count of each sequence

    def pad(self, multiple: int, pad_id: int) -> "_PackedSequences":
        """Append a padding sequence, so that the token count is a multiple of `multiple`."""
        padding_length = -len(self.ids) % multiple
        if not padding_length:
            return self
        padding_ids = torch.full((padding_length,), pad_id, dtype=self.ids.dtype)
        padding_positions = torch.arange(padding_length, dtype=self.positions.dtype)
        return _PackedSequences(
            torch.cat([self.ids, padding_ids]),
            torch.cat([self.positions, padding_positions]),
            (*self.lengths, padding_length),
        )


@dataclass(frozen=True)
class TargetRows:
    """Tokens for which the last layer is computed: all targets, and additional rows that GPU kernels need."""

    rows: Tensor  # (R,) ascending indices of tokens
    counts: tuple[int, ...]  # row count of each sequence
    rows_with_target: Tensor | None  # (N,) indices into `rows` of the targets; None: all rows


def add_missing_rows(target_rows: Tensor, target_counts: Sequence[int], sequence_lengths: Sequence[int]) -> TargetRows:
    """Add the first token of each sequence without targets, because FlashAttention 3 needs a row in every sequence.

    Args:
        target_rows: ascending indices of the tokens to predict (N,).
        target_counts: target count of each sequence.
        sequence_lengths: token count of each sequence.
    """
    sequences_without_target = np.flatnonzero(np.array(target_counts, np.int64) == 0)
    if not len(sequences_without_target):
        return TargetRows(target_rows, tuple(target_counts), rows_with_target=None)
    start_offsets = np.array(sequence_lengths, np.int64).cumsum() - sequence_lengths
    added_rows = start_offsets[sequences_without_target]
    all_rows = np.sort(np.concatenate([target_rows.numpy(), added_rows]))
    return TargetRows(
        rows=torch.from_numpy(all_rows),
        counts=tuple(max(1, count) for count in target_counts),
        rows_with_target=torch.from_numpy(np.searchsorted(all_rows, target_rows.numpy())),
    )


def pack_micro_batches(samples: DrawnSamples, batch_size: int, symmetric: bool = False) -> list[PackedBatch]:
    """Split a worker's samples into packed micro-batches with at most `batch_size` samples per objective.

    With `symmetric`, each contrast sample is repeated with query and key views exchanged.
    """
    most_samples = max(len(samples.mlm.group_ids), len(samples.tlm.group_ids), len(samples.xlco.group_ids))
    batches = []
    for start in range(0, most_samples, batch_size):
        selected = slice(start, start + batch_size)
        batches.append(_pack(samples.mlm[selected], samples.tlm[selected], samples.xlco[selected], symmetric))
    return batches


def _pack(mlm: MaskedSequences, tlm: MaskedSequences, views: ContrastViews, symmetric: bool) -> PackedBatch:
    """Pack MLM, TLM and contrast samples into a micro-batch."""
    contrast_count = len(views.group_ids)  # exchanged copies do not count as samples
    if symmetric:
        views = views.with_exchanged_copy()
    lm_sequences = join([mlm.sequences, tlm.sequences])
    lm_group_ids = np.concatenate([mlm.group_ids, tlm.group_ids])
    target_rows = np.concatenate([mlm.target_indices, tlm.target_indices + len(mlm.masked_ids)])  # (N,)
    sequence_of_target = np.searchsorted(lm_sequences.lengths.cumsum(), target_rows, side="right")  # (N,)
    target_counts = np.bincount(sequence_of_target, minlength=len(lm_sequences.lengths))
    lengths = np.concatenate([lm_sequences.lengths, views.queries.lengths])
    return PackedBatch(
        ids=torch.from_numpy(np.concatenate([mlm.masked_ids, tlm.masked_ids, views.queries.flat])),
        positions=torch.from_numpy(number_positions(lengths)),
        lengths=tuple(lengths.tolist()),
        lm_sequences=len(lm_sequences.lengths),
        target_rows=torch.from_numpy(target_rows),
        target_ids=torch.from_numpy(lm_sequences.flat[target_rows]),
        target_counts=tuple(target_counts.tolist()),
        target_group_ids=torch.from_numpy(lm_group_ids[sequence_of_target]),
        mlm_targets=len(mlm.target_indices),
        key_ids=torch.from_numpy(views.keys.flat),
        key_positions=torch.from_numpy(number_positions(views.keys.lengths)),
        key_lengths=tuple(views.keys.lengths.tolist()),
        sentence_ids=torch.from_numpy(views.sentence_ids),
        view_group_ids=torch.from_numpy(views.group_ids),
        contrast_count=contrast_count,
    )

"""The samples of XLM and BERT for one virtual shard and step, and their packed micro-batches."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from infoxlm_core.data.batches import add_missing_rows
from infoxlm_core.data.layouts import Sequences, gather
from infoxlm_core.data.samples import StepSampler
from infoxlm_core.data.sampling import TableSampler
from infoxlm_core.data.shards import Shards, Table, concatenate_int64
from infoxlm_core.data.vocabulary import EOS
from infoxlm_core.model import devices


@dataclass(frozen=True)
class Samples:
    """The packed samples of one virtual shard at a step, as NumPy arrays."""

    objective: str  # the objective of the targets: mlm, tlm or clm
    inputs: Sequences  # token ids, some of them masked
    positions: np.ndarray  # (T,)
    types: np.ndarray  # (T,)
    target_rows: np.ndarray  # (N,) rows to predict, ascending
    target_ids: np.ndarray  # (N,) token ids to predict at these rows
    labels: Mapping[str, np.ndarray] = field(default_factory=dict)  # sentence objective -> (sequences,) labels


@dataclass(frozen=True)
class TextBatch:
    """One micro-batch of `Samples` as tensors."""

    objective: str
    ids: Tensor  # (T,) token ids, some of them masked
    positions: Tensor  # (T,)
    types: Tensor  # (T,)
    lengths: tuple[int, ...]  # tokens of each sequence
    target_rows: Tensor  # (N,) rows to predict, ascending; on GPUs also a row of each sequence without target
    target_counts: tuple[int, ...]  # number of these rows in each sequence
    target_ids: Tensor  # (N,) token ids to predict
    labels: Mapping[str, Tensor]  # sentence objective -> (sequences,) labels
    rng_key: tuple[int, int, int] = (0, 0, 0)  # step, virtual shard, number of the micro-batch: seed of dropout
    flops: float = 0.0  # necessary FLOPs, see `count_step_flops`
    rows_with_target: Tensor | None = None  # (N,) indices of the rows that have a target; None: all rows have one

    @property
    def counts(self) -> dict[str, float]:
        """Return the numbers of targets of each objective, of tokens and of FLOPs."""
        sentence_counts = {name: len(labels) for name, labels in self.labels.items()}
        return {
            self.objective: len(self.target_ids),
            "tokens": len(self.ids),
            "flops": self.flops,
        } | sentence_counts

    def to(self, device: torch.device) -> "TextBatch":
        """Copy the batch to a device. On a GPU every sequence gets a row, which FlashAttention 3 requires."""
        batch = self
        if device.type == "cuda":
            rows, counts, rows_with_target = add_missing_rows(self.target_rows, self.target_counts, self.lengths)
            batch = replace(self, target_rows=rows, target_counts=counts, rows_with_target=rows_with_target)
        copies: dict[str, Any] = {}
        for name, value in vars(batch).items():
            if isinstance(value, Tensor):
                copies[name] = devices.send(value, device)
        labels = {name: devices.send(values, device) for name, values in self.labels.items()}
        return replace(batch, **copies, labels=labels)


def micro_batches(samples: Samples, size: int, step: int, shard: int) -> list[TextBatch]:
    """Split a virtual shard's samples into packed micro-batches of at most `size` sequences."""
    batches = []
    sequence_count = len(samples.inputs.lengths)
    for number, start in enumerate(range(0, sequence_count, size)):
        end = min(start + size, sequence_count)
        batches.append(_pack(samples, start, end, rng_key=(step, shard, number)))
    return batches


def _pack(samples: Samples, start: int, end: int, rng_key: tuple[int, int, int]) -> TextBatch:
    """Return the micro-batch of the sequences from number `start` to before `end`."""
    lengths = samples.inputs.lengths[start:end]
    first_token = int(samples.inputs.lengths[:start].sum())
    end_token = first_token + int(lengths.sum())
    tokens = slice(first_token, end_token)
    first_target, end_target = np.searchsorted(samples.target_rows, [first_token, end_token])
    targets = slice(first_target, end_target)
    target_rows = samples.target_rows[targets] - first_token
    sequence_of_target = np.searchsorted(lengths.cumsum(), target_rows, side="right")
    return TextBatch(
        objective=samples.objective,
        ids=torch.from_numpy(samples.inputs.flat[tokens]),
        positions=torch.from_numpy(samples.positions[tokens]),
        types=torch.from_numpy(samples.types[tokens]),
        lengths=tuple(lengths.tolist()),
        target_rows=torch.from_numpy(target_rows),
        target_counts=tuple(np.bincount(sequence_of_target, minlength=len(lengths)).tolist()),
        target_ids=torch.from_numpy(samples.target_ids[targets]),
        labels={name: torch.from_numpy(labels[start:end]) for name, labels in samples.labels.items()},
        rng_key=rng_key,
    )


class TextSampler(StepSampler):
    """Draws training samples. What it draws depends only on seed, step and virtual shard."""

    def draw(self, step: int, shard: int) -> Samples:
        """Return the samples of a virtual shard at a step."""
        raise NotImplementedError

    def kind_of(self, step: int) -> str:  # noqa: ARG002
        """Return the kind of a step. See `Learner.kind_of`."""
        return ""


@dataclass(frozen=True)
class ShortRows:
    """The rows of a corpus whose sides are all at most as long as a limit."""

    sides: tuple[Table, ...]  # the sentences of one language, or the source and the target of pairs
    numbers: np.ndarray  # (rows,) ascending row numbers

    @classmethod
    def select(cls, sides: tuple[Table, ...], max_tokens: int) -> "ShortRows":
        """Select the rows whose sides all have at most `max_tokens` tokens."""
        lengths = np.stack([np.diff(side.offsets) for side in sides])  # (sides, all rows)
        return cls(sides, np.flatnonzero(lengths.max(axis=0) <= max_tokens))

    def __len__(self) -> int:
        return len(self.numbers)


def draw_rows(corpora: Sequence[ShortRows], count: int, max_tokens: int, rng: np.random.Generator) -> list[Sequences]:
    """Draw rows uniformly from all corpora together.

    Args:
        corpora: of one language or of one language pair.
        count: number of rows to draw.
        max_tokens: the limit with which the rows were selected.
        rng: draws corpora and rows.

    Returns:
        The sentences of each side, as they are stored.
    """
    sampler = TableSampler([[len(corpus) for corpus in corpora]], alpha=1.0)
    drawn_corpora, drawn_indices = sampler.draw(count, rng)  # (count,) each
    row_numbers = []
    for corpus_number, index in zip(drawn_corpora, drawn_indices, strict=True):
        row_numbers.append(corpora[corpus_number].numbers[index])
    sequences_by_side = []
    for tables_of_side in zip(*(corpus.sides for corpus in corpora), strict=True):
        sequences_by_side.append(gather(list(tables_of_side), drawn_corpora, np.array(row_numbers), max_tokens))
    return sequences_by_side


def list_languages(shards: Shards) -> list[str]:
    """Return all languages of texts and pairs in alphabetical order. The index of a language is its number."""
    languages = set(shards.mono)
    for pair in shards.pairs:
        languages.update(pair.split("-"))
    return sorted(languages)


def pack_segments(segments: Sequence[np.ndarray]) -> Sequences:
    """Put segments of token ids end to end."""
    return Sequences(concatenate_int64(segments), np.array([len(segment) for segment in segments], np.int64))


def wrap(segments: Sequences) -> Sequences:
    """Return `</s> segment </s>` for each segment, such as one side of an XLM pair."""
    end = np.array([EOS])
    return pack_segments([np.concatenate([end, segment, end]) for segment in segments.rows])

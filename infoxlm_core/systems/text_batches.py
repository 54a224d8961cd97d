"""Samples and packed micro-batches of XLM and BERT."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from infoxlm_core.data.batches import add_missing_rows
from infoxlm_core.data.layouts import Sequences, read_rows
from infoxlm_core.data.samples import StepSampler
from infoxlm_core.data.sampling import TableSampler
from infoxlm_core.data.shards import Shards, Table, concatenate_int64
from infoxlm_core.data.vocabulary import EOS
from infoxlm_core.model import devices


@dataclass(frozen=True)
class Samples:
    """A virtual shard's packed samples for one step, as NumPy arrays."""

    objective: str  # token-level objective: mlm, tlm or clm
    inputs: Sequences  # token ids, some of them masked
    positions: np.ndarray  # (T,)
    types: np.ndarray  # (T,)
    target_rows: np.ndarray  # (N,) rows with a prediction, ascending
    target_ids: np.ndarray  # (N,) token ids to predict at `target_rows`
    labels: Mapping[str, np.ndarray] = field(default_factory=dict)  # sentence objective -> (sequences,) labels


@dataclass(frozen=True)
class TextBatch:
    """A micro-batch of `Samples`, as tensors."""

    objective: str
    ids: Tensor  # (T,) token ids, some of them masked
    positions: Tensor  # (T,)
    types: Tensor  # (T,)
    lengths: tuple[int, ...]  # tokens of each sequence
    target_rows: Tensor  # (N,) rows with a prediction, ascending; on GPUs, plus a row of each sequence without targets
    target_counts: tuple[int, ...]  # number of target rows in each sequence
    target_ids: Tensor  # (N,) token ids to predict
    labels: Mapping[str, Tensor]  # sentence objective -> (sequences,) labels
    rng_key: tuple[int, int, int] = (0, 0, 0)  # dropout seed: step, virtual shard, micro-batch number
    flops: float = 0.0  # necessary FLOPs, see `count_step_flops`
    rows_with_target: Tensor | None = None  # (N,) indices into `target_rows` of rows with a target; None: all rows

    @property
    def counts(self) -> dict[str, float]:
        """Return each objective's target count, the token count and the FLOPs."""
        counts = {self.objective: len(self.target_ids), "tokens": len(self.ids), "flops": self.flops}
        return counts | {name: len(labels) for name, labels in self.labels.items()}

    def to(self, device: torch.device) -> "TextBatch":
        """Return a copy of the batch on a device."""
        batch = self
        if device.type == "cuda":  # FlashAttention 3 requires a target row in every sequence
            targets = add_missing_rows(self.target_rows, self.target_counts, self.lengths)
            batch = replace(
                self, target_rows=targets.rows, target_counts=targets.counts, rows_with_target=targets.rows_with_target
            )
        tensors: dict[str, Any] = {}
        for name, value in vars(batch).items():
            if isinstance(value, Tensor):
                tensors[name] = devices.send(value, device)
        labels = {name: devices.send(values, device) for name, values in self.labels.items()}
        return replace(batch, **tensors, labels=labels)


def micro_batches(samples: Samples, size: int, step: int, shard: int) -> list[TextBatch]:
    """Split a virtual shard's samples into micro-batches of at most `size` sequences."""
    batches = []
    sequence_count = len(samples.inputs.lengths)
    for number, first_sequence in enumerate(range(0, sequence_count, size)):
        sequences = slice(first_sequence, first_sequence + size)
        batches.append(_pack(samples, sequences, rng_key=(step, shard, number)))
    return batches


def _pack(samples: Samples, sequences: slice, rng_key: tuple[int, int, int]) -> TextBatch:
    """Pack a range of sequences into a micro-batch, with their tokens, targets and labels."""
    lengths = samples.inputs.lengths[sequences]
    token_start = int(samples.inputs.lengths[: sequences.start].sum())
    token_end = token_start + int(lengths.sum())
    tokens = slice(token_start, token_end)
    target_start, target_end = np.searchsorted(samples.target_rows, [token_start, token_end])
    targets = slice(target_start, target_end)
    target_rows = samples.target_rows[targets] - token_start  # rows within the micro-batch
    sequence_of_target = np.searchsorted(lengths.cumsum(), target_rows, side="right")
    target_counts = np.bincount(sequence_of_target, minlength=len(lengths))
    return TextBatch(
        objective=samples.objective,
        ids=torch.from_numpy(samples.inputs.flat[tokens]),
        positions=torch.from_numpy(samples.positions[tokens]),
        types=torch.from_numpy(samples.types[tokens]),
        lengths=tuple(lengths.tolist()),
        target_rows=torch.from_numpy(target_rows),
        target_counts=tuple(target_counts.tolist()),
        target_ids=torch.from_numpy(samples.target_ids[targets]),
        labels={name: torch.from_numpy(labels[sequences]) for name, labels in samples.labels.items()},
        rng_key=rng_key,
    )


class TextSampler(StepSampler):
    """Draws training samples that depend only on the seed, the step and the virtual shard."""

    def draw(self, step: int, shard: int) -> Samples:
        """Draw a virtual shard's samples for a step."""
        raise NotImplementedError

    def kind_of(self, step: int) -> str:  # noqa: ARG002
        """Return the kind of a step; see `Learner.kind_of`."""
        return ""


@dataclass(frozen=True)
class ShortRows:
    """The rows of a corpus without long sentences."""

    sides: tuple[Table, ...]  # one table for text, a source and a target table for pairs
    row_numbers: np.ndarray  # (selected rows,) ascending

    @classmethod
    def select(cls, sides: tuple[Table, ...], max_tokens: int) -> "ShortRows":
        """Select the rows whose sentences all have at most `max_tokens` tokens."""
        lengths = np.stack([np.diff(side.offsets) for side in sides])  # (sides, all rows)
        return cls(sides, np.flatnonzero(lengths.max(axis=0) <= max_tokens))

    def __len__(self) -> int:
        return len(self.row_numbers)


def draw_rows(corpora: Sequence[ShortRows], count: int, max_tokens: int, rng: np.random.Generator) -> list[Sequences]:
    """Draw rows of one language or language pair, uniformly at random.

    Args:
        corpora: the corpora of the language or language pair.
        count: number of rows to draw.
        max_tokens: the sentence length limit with which the rows were selected.
        rng: the random generator.

    Returns:
        One element per side: the sentences for text, the sources and the targets for pairs.
    """
    # With a single language, the sampler draws each corpus in proportion to its size, and alpha has no effect.
    sampler = TableSampler([[len(corpus) for corpus in corpora]], alpha=1.0)
    corpus_numbers, indices = sampler.draw(count, rng)  # both (count,)
    row_numbers = []
    for corpus_number, index in zip(corpus_numbers, indices, strict=True):
        row_numbers.append(corpora[corpus_number].row_numbers[index])
    sequences_by_side = []
    for side in range(len(corpora[0].sides)):
        drawn_tables = [corpora[corpus_number].sides[side] for corpus_number in corpus_numbers]
        sequences_by_side.append(read_rows(drawn_tables, np.array(row_numbers), max_tokens))
    return sequences_by_side


def list_languages(shards: Shards) -> list[str]:
    """Return the shards' languages in alphabetical order. A language's index is its number."""
    languages = set(shards.mono)
    for pair in shards.pairs:
        languages.update(pair.split("-"))
    return sorted(languages)


def pack_segments(segments: Sequence[np.ndarray]) -> Sequences:
    """Concatenate arrays of token ids into packed sequences."""
    lengths = np.array([len(segment) for segment in segments], np.int64)
    return Sequences(concatenate_int64(segments), lengths)


def wrap(segments: Sequences) -> Sequences:
    """Add `</s>` before and after each segment, as in XLM."""
    eos = np.array([EOS])
    return pack_segments([np.concatenate([eos, segment, eos]) for segment in segments.rows])

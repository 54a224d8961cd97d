"""The samples of XLM and BERT for one virtual shard and step, and their packed micro-batches."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from infoxlm_core.data.batches import give_each_a_row
from infoxlm_core.data.layouts import Sequences, positions
from infoxlm_core.data.samples import StepSampler
from infoxlm_core.data.shards import Shards, end_to_end
from infoxlm_core.data.vocabulary import EOS, FIRST_POSITION
from infoxlm_core.model import devices


@dataclass(frozen=True)
class Samples:
    """The packed samples of one virtual shard at a step, in NumPy."""

    objective: str  # of the predictions at `rows`: mlm, tlm or clm
    seen: Sequences  # token ids with masks
    positions: np.ndarray  # (T,)
    types: np.ndarray  # (T,)
    rows: np.ndarray  # (N,) positions to predict, ascending
    answers: np.ndarray  # (N,) token ids at the rows
    labels: Mapping[str, np.ndarray] = field(default_factory=dict)  # objective -> (sequences,) labels


@dataclass(frozen=True)
class TextBatch:
    """One micro-batch of `Samples` as tensors."""

    objective: str
    ids: Tensor
    positions: Tensor
    types: Tensor
    lengths: tuple[int, ...]
    rows: Tensor
    row_counts: tuple[int, ...]  # rows in each sequence
    answers: Tensor
    labels: Mapping[str, Tensor]
    rng_key: tuple[int, int, int] = (0, 0, 0)  # step, virtual shard, number of the micro-batch: seed of dropout
    flops: float = 0.0  # necessary FLOPs, see `must_do_flops`
    answered: Tensor | None = None  # (N,) rows that have an answer; None: all

    @property
    def counts(self) -> dict[str, float]:
        """Targets of each objective, tokens and FLOPs."""
        return {
            self.objective: len(self.answers),
            **{name: len(labels) for name, labels in self.labels.items()},
            "tokens": len(self.ids),
            "flops": self.flops,
        }

    def to(self, device: torch.device) -> "TextBatch":
        batch = self
        if device.type == "cuda":
            rows, counts, answered = give_each_a_row(self.rows, self.row_counts, self.lengths)
            batch = replace(self, rows=rows, row_counts=counts, answered=answered)
        moved: dict[str, Any] = {}
        for name, value in vars(batch).items():
            if isinstance(value, Tensor):
                moved[name] = devices.send(value, device)
        labels = {name: devices.send(values, device) for name, values in self.labels.items()}
        return replace(batch, **moved, labels=labels)


def micro_batches(samples: Samples, size: int, step: int, shard: int) -> list[TextBatch]:
    """Cut a virtual shard's samples into packed micro-batches of at most `size` sequences."""
    lengths = samples.seen.lengths
    return [_pack(samples, slice(i, i + size), (step, shard, i // size)) for i in range(0, len(lengths), size)]


def _pack(samples: Samples, part: slice, rng_key: tuple[int, int, int]) -> TextBatch:
    ends = np.concatenate([[0], samples.seen.lengths.cumsum()])
    start, stop, _ = part.indices(len(samples.seen.lengths))
    first, last = ends[start], ends[stop]
    mine = slice(*np.searchsorted(samples.rows, [first, last]))
    owner = np.searchsorted(ends, samples.rows[mine], side="right") - 1 - start
    return TextBatch(
        objective=samples.objective,
        ids=torch.from_numpy(samples.seen.flat[first:last]),
        positions=torch.from_numpy(samples.positions[first:last]),
        types=torch.from_numpy(samples.types[first:last]),
        lengths=tuple(samples.seen.lengths[part].tolist()),
        rows=torch.from_numpy(samples.rows[mine] - first),
        row_counts=tuple(np.bincount(owner, minlength=stop - start).tolist()),
        answers=torch.from_numpy(samples.answers[mine]),
        labels={name: torch.from_numpy(labels[part]) for name, labels in samples.labels.items()},
        rng_key=rng_key,
    )


class TextSampler(StepSampler):
    """Draws the samples of a virtual shard at a step: a pure function of (seed, step, shard)."""

    def draw(self, step: int, shard: int) -> Samples:
        raise NotImplementedError

    def kind_of(self, step: int) -> str:  # noqa: ARG002
        """Return the kind of a step; see `Learner.kind_of`."""
        return ""


def languages_of(shards: Shards) -> list[str]:
    """Return all languages of texts and pairs in alphabetical order; the index of a language is its number."""
    return sorted({*shards.mono, *(side for name in shards.pairs for side in name.split("-"))})


def wrap(segments: Sequences) -> Sequences:
    """Return `</s> segment </s>` for each segment, such as one side of an XLM pair."""
    end = np.array([EOS])
    return Sequences(end_to_end([part for row in segments.rows for part in (end, row, end)]), segments.lengths + 2)


def from_zero(lengths: np.ndarray) -> np.ndarray:
    """Return positions (T,) that restart at 0 in every sequence, from lengths (N,)."""
    return positions(lengths) - FIRST_POSITION

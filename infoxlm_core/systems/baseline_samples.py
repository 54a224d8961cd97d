"""Samples of the systems InfoXLM came from: XLM's streams and pairs, and what all baselines hand to the model.

Letters are pieces; a stream is one corpus as `</s> a b </s> c </s> …`, cut into windows of equal length, and a pair is

    ids         </s>  a   b  </s> </s>  x   y   z  </s>
    positions     0   1   2    3    0   1   2   3    4       they restart for the other language
    types        de  de  de   de   fr  fr  fr  fr   fr       numbers of languages

XLM takes one objective and one language (pair) a step. Sources: Lample and Conneau 2019; SPEC, section 2.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from infoxlm_core.config import PretrainingConfig
from infoxlm_core.data import masking
from infoxlm_core.data.layouts import Sequences, positions
from infoxlm_core.data.sampling import Law, generator, probabilities
from infoxlm_core.data.shards import Pairs, Shards, Table, end_to_end, gather
from infoxlm_core.data.vocabulary import EOS, FIRST_POSITION
from infoxlm_core.errors import CorpusTooSmall


@dataclass(frozen=True)
class Samples:
    """What one virtual shard sees at a step, in numpy, end to end.

    Attributes:
        objective: mlm, tlm or clm.
        seen: the ids the model sees; `positions` and `types` (T,) go with them.
        rows, answers: (N,) ascending rows to predict and what must be said there.
        labels: (sequences,) 0: the second part follows the first, 1: it does not; or none, (0,).
    """

    objective: str
    seen: Sequences
    positions: np.ndarray
    types: np.ndarray
    rows: np.ndarray
    answers: np.ndarray
    labels: np.ndarray


@dataclass(frozen=True)
class TextBatch:
    """One micro-batch of `Samples` as tensors; `row_counts` says how many rows lie in each sequence.

    `place`: step, virtual shard and number of the micro-batch, which dropout is drawn by. `flops`: what it must cost,
    for the network that it was made for.
    """

    objective: str
    ids: Tensor
    positions: Tensor
    types: Tensor
    lengths: tuple[int, ...]
    rows: Tensor
    row_counts: tuple[int, ...]
    answers: Tensor
    labels: Tensor
    place: tuple[int, int, int] = (0, 0, 0)
    flops: float = 0.0

    @property
    def counts(self) -> dict[str, float]:
        """Targets of each objective, tokens and FLOPs."""
        return {
            self.objective: len(self.answers),
            "nsp": len(self.labels),
            "tokens": len(self.ids),
            "flops": self.flops,
        }

    def to(self, device: torch.device | str) -> "TextBatch":
        parts = vars(self).items()
        moved: dict[str, Any] = {name: part.to(device) for name, part in parts if isinstance(part, Tensor)}
        return replace(self, **moved)


def micro_batches(samples: Samples, size: int, step: int, shard: int) -> list[TextBatch]:
    """Cut a virtual shard's samples into packed micro-batches of at most `size` sequences."""
    lengths = samples.seen.lengths
    return [_pack(samples, slice(i, i + size), (step, shard, i // size)) for i in range(0, len(lengths), size)]


def _pack(samples: Samples, part: slice, place: tuple[int, int, int]) -> TextBatch:
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
        labels=torch.from_numpy(samples.labels[part]),
        place=place,
    )


def languages_of(shards: Shards) -> list[str]:
    """All languages in the shards, those of pairs too, in alphabetical order: a language's number is its place."""
    return sorted({*shards.mono, *(side for name in shards.pairs for side in name.split("-"))})


def wrap(segments: Sequences) -> Sequences:
    """`</s> segment </s>` for each i: one side of an XLM pair, or of its machine translation."""
    end = np.array([EOS])
    return Sequences(end_to_end([part for row in segments.rows for part in (end, row, end)]), segments.lengths + 2)


def lay_out_pairs(
    first: Sequences, second: Sequences, languages: tuple[int, int]
) -> tuple[Sequences, np.ndarray, np.ndarray]:
    """XLM pairs `</s> x </s> </s> y </s>`, with their positions (T,) and languages (T,)."""
    x, y = wrap(first), wrap(second)
    lengths = np.stack([x.lengths, y.lengths], axis=1)  # (N, 2)
    flat = end_to_end([side for pair in zip(x.rows, y.rows, strict=True) for side in pair])
    types = np.repeat(np.tile(languages, len(lengths)), lengths.ravel())
    return Sequences(flat, lengths.sum(axis=1)), from_zero(lengths.ravel()), types


def from_zero(lengths: np.ndarray) -> np.ndarray:
    """(N,) lengths -> (T,) positions that restart at 0 in every sequence, as XLM and BERT count them."""
    return positions(lengths) - FIRST_POSITION


def windows(table: Table, size: int) -> int:
    """How many windows of `size` tokens a corpus gives; one `</s>` before its first sentence counts."""
    return -(-(len(table.tokens) + 1) // size) if len(table.tokens) else 0


def read_windows(table: Table, rows: np.ndarray, size: int) -> np.ndarray:
    """(N, size) windows rows[i] of the stream `</s> … </s> s1 </s> s2 </s> …`, front-filled so that all are full."""
    fill = windows(table, size) * size - len(table.tokens)
    read = rows[:, None] * size + np.arange(size) - fill  # (N, size) places in the table
    return np.where(read < 0, EOS, table.tokens[read.clip(0)].astype(np.int64))


class XLMSampler:
    """Draws XLM's samples: objectives take turns by the step, and a step has one language (pair).

    Languages are drawn with p proportional to (sentences)^alpha, pairs likewise, both directions equally often.

    Raises:
        CorpusTooSmall: an objective has no text at all.
    """

    def __init__(self, shards: Shards, config: PretrainingConfig, starts_word: np.ndarray | None = None) -> None:
        self.config, self.vocabulary_size, self.starts_word = config, shards.vocabulary_size, starts_word
        batches, weights = config.batches, config.objectives
        self.per_shard = batches.global_batch_size // batches.virtual_shards
        self.objectives = [name for name in ("mlm", "tlm", "clm") if getattr(weights, name)]
        self.numbers = {language: number for number, language in enumerate(languages_of(shards))}
        self.streams = {name: tables for name, tables in shards.mono.items() if any(len(t.tokens) for t in tables)}
        self.pairs = {name: [(pairs, self._short(pairs)) for pairs in found] for name, found in shards.pairs.items()}
        self.pairs = {name: found for name, found in self.pairs.items() if any(len(rows) for _, rows in found)}
        if not self.streams and (weights.mlm or weights.clm):
            raise CorpusTooSmall("MLM and CLM have no monolingual text: have=0 need=1 sentence; add text")
        if not self.pairs and weights.tlm:
            raise CorpusTooSmall(
                f"TLM has no pair with sides of at most {batches.side_tokens} tokens: have=0 need=1; add pairs or set "
                "objectives.tlm to 0"
            )
        sentences = {name: sum(map(len, tables)) for name, tables in self.streams.items()}
        pairs = {name: sum(len(rows) for _, rows in found) for name, found in self.pairs.items()}
        self.laws = {"mlm": sentences, "tlm": pairs, "clm": sentences}

    def _short(self, pairs: Pairs) -> np.ndarray:
        """Rows whose sides are both within the limit; XLM drops the others."""
        lengths = np.maximum(np.diff(pairs.source.offsets), np.diff(pairs.target.offsets))
        return np.flatnonzero(lengths <= self.config.batches.side_tokens)

    def draw(self, step: int, shard: int) -> Samples:
        """The samples of a virtual shard at a step."""
        objective, key = self.objectives[step % len(self.objectives)], (self.config.seed, step)
        choice = generator(*key, "language").random(2)
        sizes = self.laws[objective]
        law = probabilities(np.array(list(sizes.values())), self.config.batches.alpha).cumsum()
        name = list(sizes)[int(np.searchsorted(law, choice[0] * law[-1], side="right"))]
        rng, mask_rng = generator(*key, shard, objective), generator(*key, shard, objective, "mask")
        if objective == "tlm":
            sequences, places, types = self._pair(name, bool(choice[1] < 0.5), rng)
        else:
            sequences = self._stream(name, rng)
            places, types = from_zero(sequences.lengths), np.full(len(sequences.flat), self.numbers[name])
        if objective == "clm":
            seen, rows = sequences.flat, np.flatnonzero(places < self.config.batches.block_tokens - 1)
            answers = sequences.flat[rows + 1]
        else:
            settings = self.config.objectives
            seen, rows = masking.mask(
                sequences.flat, sequences.lengths, self.vocabulary_size, settings, mask_rng, self.starts_word
            )
            answers = sequences.flat[rows]
        return Samples(
            objective, Sequences(seen, sequences.lengths), places, types, rows, answers, np.empty(0, np.int64)
        )

    def _stream(self, language: str, rng: np.random.Generator) -> Sequences:
        tables, size = self.streams[language], self.config.batches.block_tokens
        which, rows = Law([[windows(table, size) for table in tables]], 1.0).draw(self.per_shard, rng)
        found = np.empty((self.per_shard, size), np.int64)
        for number in np.unique(which):
            found[which == number] = read_windows(tables[number], rows[which == number], size)
        return Sequences(found.ravel(), np.full(self.per_shard, size))

    def _pair(self, name: str, swap: bool, rng: np.random.Generator) -> tuple[Sequences, np.ndarray, np.ndarray]:
        found, limit = self.pairs[name], self.config.batches.side_tokens
        which, places = Law([[len(rows) for _, rows in found]], 1.0).draw(self.per_shard, rng)
        rows = np.array([found[number][1][place] for number, place in zip(which, places, strict=True)])
        sides = [
            Sequences(*gather([pairs.source for pairs, _ in found], which, rows, limit)),
            Sequences(*gather([pairs.target for pairs, _ in found], which, rows, limit)),
        ]
        numbers = [self.numbers[side] for side in name.split("-")]
        first, second = (1, 0) if swap else (0, 1)
        return lay_out_pairs(sides[first], sides[second], (numbers[first], numbers[second]))

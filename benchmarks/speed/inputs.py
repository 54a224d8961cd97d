"""What the variants are fed: sequences of random ids with the lengths of sentences, or full blocks; and weights.

Weights get N(0, 0.05²) on top of their start: in a fresh model whole branches are zero, and equality proves nothing.
"""

import numpy as np
import torch
from torch import Tensor, nn

from infoxlm_core.config import ObjectivesConfig, PretrainingConfig
from infoxlm_core.data import masking
from infoxlm_core.data.batches import PackedBatch, micro_batches
from infoxlm_core.data.layouts import NOTHING, Sequences
from infoxlm_core.data.samples import Draw, Masked
from infoxlm_core.data.vocabulary import BOS, EOS, FIRST_PIECE, PAD

VOCABULARIES = {"32k": 32_000, "250k": 250_002}
SHAPES = ("ragged", "full")
SEED = 1
NOISE = 0.05


def config(size: dict, **changes) -> PretrainingConfig:
    """The small encoder of all benchmarks on a CPU, without dropout; `size` overrides its fields."""
    model = {"layers": 6, "hidden": 384, "ffn": 1536, "heads": 6, "max_tokens": 512, "dropout": 0.0} | size
    values = {"model": model, "contrast": {"layer": max(1, model["layers"] * 2 // 3)}, "seed": SEED}
    return PretrainingConfig.parse(values | changes)


def lengths(shape: str, rng: np.random.Generator, sequences: int | None = None, sentences: int = 1) -> np.ndarray:
    """ragged: 16 sequences, sentences of exp(N(3.45, 0.7²)) tokens clipped to 6 … 128; full: 8 blocks of 128."""
    if shape == "full":
        return np.full(sequences or 8, 128)
    drawn = np.exp(rng.normal(3.45, 0.7, (sentences, sequences or 16)))
    return np.clip(drawn, 6, 128).astype(np.int64).sum(axis=0)


def sequences(counts: np.ndarray, vocabulary: int, rng: np.random.Generator) -> Sequences:
    """Random pieces between `<s>` and `</s>`."""
    flat = rng.integers(FIRST_PIECE, vocabulary - 1, counts.sum())
    ends = counts.cumsum()
    flat[ends - counts], flat[ends - 1] = BOS, EOS
    return Sequences(flat, counts)


def batch(shape: str, vocabulary: int, number: int, objectives: tuple[str, ...] = ("mlm",),
          count: int | None = None, joined: int = 2) -> PackedBatch:  # fmt: skip
    """Micro-batch `number` of a shape: a sentence for MLM, two for TLM.

    Args:
        count: sequences of each objective, if not those of `lengths`.
        joined: sentences of a contrast view, two with mixup.
    """
    rng = np.random.default_rng([SEED, number, SHAPES.index(shape)])
    sentences = {"mlm": 1, "tlm": 2, "query": joined, "key": joined}
    wanted = [name for name in sentences if name in objectives or (name in ("query", "key") and "xlco" in objectives)]
    return pack({name: lengths(shape, rng, count, sentences[name]) for name in wanted}, vocabulary, rng)


def pack(counts: dict[str, np.ndarray], vocabulary: int, rng: np.random.Generator) -> PackedBatch:
    """One micro-batch of random pieces; `counts` are the lengths of its `mlm`, `tlm`, `query` and `key` sequences."""

    def some(name: str) -> Sequences:
        return sequences(counts[name], vocabulary, rng) if name in counts else NOTHING

    def masked(name: str, group: int) -> Masked:
        whole = some(name)
        seen, rows = masking.mask(whole.flat, whole.lengths, vocabulary, ObjectivesConfig(), rng)
        return Masked(whole, seen, rows, np.full(len(whole.lengths), group))

    queries, keys = some("query"), some("key")
    views = len(queries.lengths)
    sentence_ids, groups = rng.integers(0, 2**62, (views, 2)), np.full(views, 2)
    draw = Draw(masked("mlm", 0), masked("tlm", 1), queries, keys, sentence_ids, groups)
    (found,) = micro_batches(draw, max(map(len, counts.values())))
    return found


def describe(batches: list[PackedBatch]) -> dict[str, float]:
    """Means over batches: real tokens, what share padding would add, targets."""
    parts = [counts for b in batches for counts in split(b).values() if counts]
    padded = sum(len(counts) * max(counts) for counts in parts)
    return {
        "tokens": sum(b.tokens for b in batches) / len(batches),
        "padding": 1 - sum(map(sum, parts)) / padded,
        "targets": sum(len(b.target_rows) for b in batches) / len(batches),
    }


def split(batch: PackedBatch) -> dict[str, tuple[int, ...]]:
    """Lengths of what a padding implementation runs apart: masked sequences, query views, key views."""
    return {
        "lm": batch.lengths[: batch.lm_sequences],
        "query": batch.lengths[batch.lm_sequences :],
        "key": batch.key_lengths,
    }


def pad(flat: Tensor, counts: tuple[int, ...], value: int = PAD) -> Tensor:
    """(T,) values of N sequences -> (N, longest), what is missing filled."""
    return nn.utils.rnn.pad_sequence(flat.split(list(counts)), batch_first=True, padding_value=value)


def padded_targets(batch: PackedBatch) -> Tensor:
    """(N, longest) answers where a token must be predicted, -100 elsewhere."""
    counts = split(batch)["lm"]
    labels = torch.full((sum(counts),), -100)
    labels[batch.target_rows] = batch.target_ids
    return pad(labels, counts, -100)


@torch.no_grad()
def perturb(module: nn.Module, seed: int) -> None:
    """Add N(0, 0.05²) to every parameter."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.add_(torch.empty(parameter.shape).normal_(0.0, NOISE, generator=generator).to(parameter.device))

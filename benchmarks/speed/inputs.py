"""Inputs of all variants: sequences of random ids, as long as sentences or as full blocks; and noise on weights.

Weights get N(0, 0.05²) added, because in a fresh model whole branches are zero and equality would prove nothing.
"""

import numpy as np
import torch
from torch import Tensor, nn

from infoxlm_core.config import ObjectivesConfig, PretrainingConfig
from infoxlm_core.data import masking
from infoxlm_core.data.batches import PackedBatch, pack_micro_batches
from infoxlm_core.data.layouts import EMPTY, Sequences
from infoxlm_core.data.samples import ContrastViews, DrawnSamples, MaskedSequences
from infoxlm_core.data.vocabulary import BOS, EOS, FIRST_PIECE, PAD, Vocabulary

VOCABULARIES = {"32k": 32_000, "250k": 250_002}
SHAPES = ("ragged", "full")
SEED = 1
NOISE = 0.05


def config(size: dict, **changes) -> PretrainingConfig:
    """Return the config of the small encoder of all CPU benchmarks, without dropout. `size` overrides its fields."""
    model = {"layers": 6, "hidden": 384, "ffn": 1536, "heads": 6, "max_tokens": 512, "dropout": 0.0} | size
    values = {"model": model, "contrast": {"layer": max(1, model["layers"] * 2 // 3)}, "seed": SEED}
    return PretrainingConfig.parse(values | changes)


def lengths(shape: str, rng: np.random.Generator, sequences: int | None = None, sentences: int = 1) -> np.ndarray:
    """Draw lengths: 16 sequences of exp(N(3.45, 0.7²)) tokens from 6 to 128 (`ragged`), or 8 blocks of 128 (`full`)."""
    if shape == "full":
        return np.full(sequences or 8, 128)
    sentence_lengths = np.exp(rng.normal(3.45, 0.7, (sentences, sequences or 16)))
    return np.clip(sentence_lengths, 6, 128).astype(np.int64).sum(axis=0)


def sequences(counts: np.ndarray, vocabulary: int, rng: np.random.Generator) -> Sequences:
    """Return random pieces between `<s>` and `</s>`."""
    flat = rng.integers(FIRST_PIECE, vocabulary - 1, counts.sum())
    end_offsets = counts.cumsum()
    flat[end_offsets - counts] = BOS
    flat[end_offsets - 1] = EOS
    return Sequences(flat, counts)


def batch(shape: str, vocabulary: int, number: int, objectives: tuple[str, ...] = ("mlm",),
          count: int | None = None, joined: int = 2) -> PackedBatch:  # fmt: skip
    """Return micro-batch `number` of a shape: a sentence for MLM, two for TLM.

    Args:
        count: sequences of each objective, instead of the default of `lengths`.
        joined: sentences of a contrast view; two with mixup.
    """
    rng = np.random.default_rng([SEED, number, SHAPES.index(shape)])
    sentences = {"mlm": 1, "tlm": 2, "query": joined, "key": joined}
    if "xlco" in objectives:
        objectives = (*objectives, "query", "key")
    names = [name for name in sentences if name in objectives]
    return pack({name: lengths(shape, rng, count, sentences[name]) for name in names}, vocabulary, rng)


def pack(counts: dict[str, np.ndarray], vocabulary: int, rng: np.random.Generator) -> PackedBatch:
    """Return a micro-batch of random pieces. `counts` has the lengths of `mlm`, `tlm`, `query` and `key` sequences."""

    def draw_sequences(name: str) -> Sequences:
        return sequences(counts[name], vocabulary, rng) if name in counts else EMPTY

    def draw_masked(name: str, group: int) -> MaskedSequences:
        original = draw_sequences(name)
        layout = Vocabulary.xlm_r(vocabulary)
        masked_ids, rows = masking.mask(original.flat, original.lengths, layout, ObjectivesConfig(), rng)
        return MaskedSequences(original, masked_ids, rows, np.full(len(original.lengths), group))

    queries = draw_sequences("query")
    keys = draw_sequences("key")
    views = len(queries.lengths)
    sentence_ids = rng.integers(0, 2**62, (views, 2))
    contrast_views = ContrastViews(queries, keys, sentence_ids, group_ids=np.full(views, 2))
    samples = DrawnSamples(draw_masked("mlm", 0), draw_masked("tlm", 1), contrast_views)
    largest = max(len(lengths) for lengths in counts.values())  # so that everything fits into one micro-batch
    (batch,) = pack_micro_batches(samples, largest)
    return batch


def describe(batches: list[PackedBatch]) -> dict[str, float]:
    """Return means over batches: real tokens, the share of padding that padding would add, targets."""
    tokens = 0
    padded_tokens = 0
    for batch in batches:
        for counts in split(batch).values():
            if counts:
                tokens += sum(counts)
                padded_tokens += len(counts) * max(counts)
    return {
        "tokens": sum(batch.tokens for batch in batches) / len(batches),
        "padding": 1 - tokens / padded_tokens,
        "targets": sum(len(batch.target_rows) for batch in batches) / len(batches),
    }


def split(batch: PackedBatch) -> dict[str, tuple[int, ...]]:
    """Return the lengths of the groups that padded models run one by one: masked sequences, query views, key views."""
    return {
        "lm": batch.lengths[: batch.lm_sequences],
        "query": batch.lengths[batch.lm_sequences :],
        "key": batch.key_lengths,
    }


def pad(flat: Tensor, counts: tuple[int, ...], value: int = PAD) -> Tensor:
    """Pad the (T,) values of N sequences to (N, longest)."""
    return nn.utils.rnn.pad_sequence(flat.split(list(counts)), batch_first=True, padding_value=value)


def padded_targets(batch: PackedBatch) -> Tensor:
    """Return (N, longest) targets: the id where a token must be predicted, -100 elsewhere."""
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

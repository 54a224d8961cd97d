"""Inputs of all variants: random sequences with the length of sentences or of full blocks, and noise on weights.

The noise N(0, 0.05²) is added because whole branches of a fresh model are zero and equality would prove nothing.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from infoxlm_core.config import ObjectivesConfig, PretrainingConfig
from infoxlm_core.data import masking
from infoxlm_core.data.batches import PackedBatch, pack_micro_batches
from infoxlm_core.data.layouts import Sequences
from infoxlm_core.data.samples import ContrastViews, DrawnSamples, MaskedSequences
from infoxlm_core.data.vocabulary import BOS, EOS, FIRST_PIECE, PAD, Vocabulary

VOCABULARIES = {"32k": 32_000, "250k": 250_002}
SHAPES = ("ragged", "full")
SEED = 1
NOISE = 0.05


def make_config(size: dict[str, int], **changes: Any) -> PretrainingConfig:
    """Make the config of the CPU benchmarks' small encoder, without dropout. `size` overrides the encoder's sizes."""
    model = {"layers": 6, "hidden": 384, "ffn": 1536, "heads": 6, "max_tokens": 512, "dropout": 0.0} | size
    values = {"model": model, "contrast": {"layer": max(1, model["layers"] * 2 // 3)}, "seed": SEED}
    return PretrainingConfig.parse(values | changes)


def draw_lengths(shape: str, rng: np.random.Generator, count: int | None = None, sentences: int = 1) -> np.ndarray:
    """Return the lengths of `count` sequences: 128 tokens for the shape `full`, random for `ragged`.

    A `ragged` sequence consists of `sentences` sentences of exp(N(3.45, 0.7²)) tokens each, clipped to 6 … 128.
    """
    if shape == "full":
        return np.full(count or 8, 128)
    sentence_lengths = np.exp(rng.normal(3.45, 0.7, (sentences, count or 16)))
    return np.clip(sentence_lengths, 6, 128).astype(np.int64).sum(axis=0)


def make_batch(shape: str, vocabulary: int, seed: int, objectives: tuple[str, ...] = ("mlm",),
               count: int | None = None) -> PackedBatch:  # fmt: skip
    """Make a micro-batch of random tokens for the objectives `mlm`, `tlm` and `xlco`.

    `count` is the number of sequences per objective; by default that of `draw_lengths`.
    """
    rng = np.random.default_rng([SEED, seed, SHAPES.index(shape)])
    sentences = {"mlm": 1, "tlm": 2, "query": 2, "key": 2}  # contrast views have two sentences, as with mixup
    if "xlco" in objectives:
        objectives = (*objectives, "query", "key")
    lengths = {name: draw_lengths(shape, rng, count, n) for name, n in sentences.items() if name in objectives}
    return pack_random_batch(lengths, vocabulary, rng)


def pack_random_batch(lengths: dict[str, np.ndarray], vocabulary: int, rng: np.random.Generator) -> PackedBatch:
    """Make a micro-batch of random tokens. The keys of `lengths` are among `mlm`, `tlm`, `query` and `key`."""
    none = np.array([], dtype=np.int64)
    queries = draw_sequences(lengths.get("query", none), vocabulary, rng)
    keys = draw_sequences(lengths.get("key", none), vocabulary, rng)
    sentence_ids = rng.integers(0, 2**62, (len(queries.lengths), 2))  # all different: no false negatives
    # Groups 0, 1 and 2 are MLM, TLM and contrast, as in the shards of `ours.write_two_pairs`.
    views = ContrastViews(queries, keys, sentence_ids, group_ids=np.full(len(queries.lengths), 2))
    mlm = draw_masked(lengths.get("mlm", none), vocabulary, rng, group=0)
    tlm = draw_masked(lengths.get("tlm", none), vocabulary, rng, group=1)
    largest_count = max(map(len, lengths.values()))  # all sequences fit into one micro-batch
    (batch,) = pack_micro_batches(DrawnSamples(mlm, tlm, views), largest_count)
    return batch


def draw_sequences(lengths: np.ndarray, vocabulary: int, rng: np.random.Generator) -> Sequences:
    """Draw sequences of random tokens between `<s>` and `</s>`."""
    tokens = rng.integers(FIRST_PIECE, vocabulary - 1, lengths.sum())
    end_offsets = lengths.cumsum()
    tokens[end_offsets - lengths] = BOS
    tokens[end_offsets - 1] = EOS
    return Sequences(tokens, lengths)


def draw_masked(lengths: np.ndarray, vocabulary: int, rng: np.random.Generator, group: int) -> MaskedSequences:
    """Draw sequences of random tokens and mask them as in pre-training. `group` is the index of their metric group."""
    original = draw_sequences(lengths, vocabulary, rng)
    layout = Vocabulary.xlm_r(vocabulary)
    masked_ids, target_indices = masking.mask(original.flat, original.lengths, layout, ObjectivesConfig(), rng)
    return MaskedSequences(original, masked_ids, target_indices, np.full(len(original.lengths), group))


def describe_batches(batches: list[PackedBatch]) -> dict[str, float]:
    """Return the mean numbers of tokens and targets in packed batches, and the share of padding after padding."""
    tokens = 0
    padded_tokens = 0
    for batch in batches:
        for lengths in split(batch).values():
            if lengths:
                tokens += sum(lengths)
                padded_tokens += len(lengths) * max(lengths)
    return {
        "tokens": sum(batch.tokens for batch in batches) / len(batches),
        "padding": 1 - tokens / padded_tokens,
        "targets": sum(len(batch.target_rows) for batch in batches) / len(batches),
    }


def split(batch: PackedBatch) -> dict[str, tuple[int, ...]]:
    """Split the lengths into the groups that padded models run one by one: masked sequences, query and key views."""
    return {
        "lm": batch.lengths[: batch.lm_sequences],
        "query": batch.lengths[batch.lm_sequences :],
        "key": batch.key_lengths,
    }


def pad(flat: Tensor, counts: tuple[int, ...], value: int = PAD) -> Tensor:
    """Pad the values of N sequences from shape (T,) to (N, longest)."""
    return nn.utils.rnn.pad_sequence(flat.split(list(counts)), batch_first=True, padding_value=value)


def padded_targets(batch: PackedBatch) -> Tensor:
    """Return the padded targets (N, longest): a token id where a token must be predicted, -100 elsewhere."""
    counts = split(batch)["lm"]
    labels = torch.full((sum(counts),), -100)
    labels[batch.target_rows] = batch.target_ids
    return pad(labels, counts, -100)


@torch.no_grad()
def add_noise(module: nn.Module, seed: int) -> None:
    """Add N(0, 0.05²) to every parameter."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.add_(torch.empty(parameter.shape).normal_(0.0, NOISE, generator=generator).to(parameter.device))

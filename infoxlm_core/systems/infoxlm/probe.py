"""Retrieval among a few held-out pairs during training, which shows whether the model learns to align languages."""

import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from statistics import fmean

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from infoxlm_core.config import PretrainingConfig
from infoxlm_core.data.layouts import Sequences, gather, lay_out, number_positions
from infoxlm_core.data.shards import Pairs, Shards, Table
from infoxlm_core.data.vocabulary import Vocabulary
from infoxlm_core.model import devices
from infoxlm_core.model.encoder import Encoder, evaluating, pool
from infoxlm_core.model.heads import InfoXLM
from infoxlm_core.tasks.retrieval.nearest import find_nearest
from infoxlm_core.training import distributed, sharding
from infoxlm_core.training.learner import autocast

BATCH_SEQUENCES = 64  # sequences of one forward pass


class Probe:
    """Retrieval among the first held-out pairs of each language pair.

    Args:
        shards: the shards of the training, with its held-out pairs.
        count: number of pairs of each language pair.
        max_tokens: number of tokens to which each side is truncated.
    """

    def __init__(self, shards: Shards, count: int, max_tokens: int) -> None:
        self.pairs = {}
        for name, tables in shards.held_out.items():
            if any(len(table) for table in tables):
                pairs = [table.read_pairs() for table in tables]
                self.pairs[name] = _read_first_pairs(pairs, count, max_tokens, shards.vocabulary)

    @torch.no_grad()
    def score(
        self, encoder: Encoder, layer: int, pooling: str, device: torch.device, precision: str = "auto"
    ) -> dict[str, float]:
        """Return the share of sentences whose nearest neighbour by cosine is their translation, in both directions."""
        scores = {}
        for name, (source_side, target_side) in self.pairs.items():
            with evaluating(encoder):
                source = _encode(encoder, source_side, layer, pooling, device, precision)
                target = _encode(encoder, target_side, layer, pooling, device, precision)
            scores[f"probe/retrieval/{name}"] = fmean([_accuracy(source, target), _accuracy(target, source)])
        return {"probe/retrieval": fmean(scores.values()), **scores}


def observe(probe: Probe, model: InfoXLM, config: PretrainingConfig, step: int) -> dict[str, float]:
    """Return the scores of the probe every `probe.every` steps, and no scores after other steps."""
    if step % config.probe.every:
        return {}
    score = partial(_score, probe, model, config)
    if sharding.is_sharded(model):  # all workers must gather the shards
        return score()
    return distributed.on_first(score) or {}


def _score(probe: Probe, model: InfoXLM, config: PretrainingConfig) -> dict[str, float]:
    with sharding.gathered(model):
        return probe.score(
            model.encoder, model.contrast_layer, config.contrast.pooling, distributed.device(), config.model.precision
        )


def _accuracy(queries: Tensor, candidates: Tensor) -> float:
    """Return the share of queries whose nearest candidate is the one of the same row."""
    correct_rows = torch.arange(len(queries), device=queries.device)
    return (find_nearest(queries, candidates) == correct_rows).double().mean().item()


def _read_first_pairs(
    tables: Sequence[Pairs], count: int, max_tokens: int, vocabulary: Vocabulary
) -> tuple[Sequences, Sequences]:
    """Return both sides of the first `count` distinct pairs, with special tokens."""
    chosen_pairs = list(itertools.islice(_find_distinct_pairs(tables, max_tokens), count))
    table_numbers, rows = np.array(chosen_pairs).T
    source = gather([table.source for table in tables], table_numbers, rows, max_tokens)
    target = gather([table.target for table in tables], table_numbers, rows, max_tokens)
    return lay_out([source], vocabulary), lay_out([target], vocabulary)


def _find_distinct_pairs(tables: Sequence[Pairs], max_tokens: int) -> Iterator[tuple[int, int]]:
    """Yield the table number and row of each pair that shares no sentence with an earlier one.

    If a sentence occurred twice, a query would have two right answers.
    """
    source_sentences: set[bytes] = set()
    target_sentences: set[bytes] = set()
    for number, table in enumerate(tables):
        for row in range(len(table)):
            source = _read_bytes(table.source, row, max_tokens)
            target = _read_bytes(table.target, row, max_tokens)
            if source not in source_sentences and target not in target_sentences:
                source_sentences.add(source)
                target_sentences.add(target)
                yield number, row


def _read_bytes(table: Table, row: int, max_tokens: int) -> bytes:
    start = table.offsets.item(row)
    end = min(table.offsets.item(row + 1), start + max_tokens)
    return table.tokens[start:end].tobytes()


def _encode(
    encoder: Encoder, side: Sequences, layer: int, pooling: str, device: torch.device, precision: str
) -> Tensor:
    """Return unit vectors (N, d) of N sentences.

    They are computed in the precision of the training, which is faster than fp32, because the other workers wait.
    """
    vectors = []
    for start in range(0, len(side.lengths), BATCH_SEQUENCES):
        batch = side[start : start + BATCH_SEQUENCES]
        lengths = batch.lengths.tolist()
        ids = devices.send(torch.from_numpy(batch.flat), device)  # (T,) tokens of all sentences end to end
        position_ids = devices.send(torch.from_numpy(number_positions(batch.lengths)), device)  # (T,)
        with autocast(device, precision):
            hidden = encoder(ids, position_ids, lengths, last=layer)  # (T, d)
        vectors.append(pool(hidden, lengths, pooling).float())  # (sentences of the batch, d)
    return F.normalize(torch.cat(vectors), dim=1)

"""Retrieval among a few held-out pairs during training, which shows whether the model learns to align languages."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from infoxlm_core.config import PretrainingConfig
from infoxlm_core.data.layouts import Sequences, lay_out, number_positions, read_rows
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
        shards: the token shards of the training, with held-out pairs.
        count: number of pairs of each language pair.
        max_tokens: number of tokens to which each sentence is truncated.
    """

    def __init__(self, shards: Shards, count: int, max_tokens: int) -> None:
        self.pairs = {}  # language pair, such as en-de -> its source and target sentences
        for name, tables in shards.held_out.items():
            if any(len(table) for table in tables):
                pairs = [table.read_pairs() for table in tables]
                self.pairs[name] = _read_first_pairs(pairs, count, max_tokens, shards.vocabulary)

    @torch.no_grad()
    def score(
        self, encoder: Encoder, layer: int, pooling: str, device: torch.device, precision: str = "auto"
    ) -> dict[str, float]:
        """Return the retrieval accuracy of each language pair, averaged over both directions, and its mean.

        Args:
            encoder: the encoder to evaluate.
            layer: number of layers to compute; the sentence vectors are pooled from the last of them.
            pooling: how the vectors of the tokens become a sentence vector: mean or cls.
            device: the encoder's device.
            precision: precision of matrix products, as in `model.precision`.
        """
        scores = {}
        for name, (source_sentences, target_sentences) in self.pairs.items():
            with evaluating(encoder):
                sources = _encode(encoder, source_sentences, layer, pooling, device, precision)
                targets = _encode(encoder, target_sentences, layer, pooling, device, precision)
            accuracies = [_compute_accuracy(sources, targets), _compute_accuracy(targets, sources)]
            scores[f"probe/retrieval/{name}"] = fmean(accuracies)
        return {"probe/retrieval": fmean(scores.values()), **scores}


@dataclass(frozen=True)
class ProbeObserver:
    """Scores the probe at regular steps of a training run."""

    probe: Probe
    model: InfoXLM
    config: PretrainingConfig

    def observe(self, step: int) -> dict[str, float]:
        """Return the scores of the probe every `probe.every` steps, and no scores after other steps."""
        if step % self.config.probe.every:
            return {}
        if sharding.is_sharded(self.model):  # all workers must take part in gathering the shards
            return self._score()
        return distributed.on_first(self._score) or {}

    def _score(self) -> dict[str, float]:
        """Return the scores of the model's current weights."""
        with sharding.gathered(self.model):
            return self.probe.score(
                self.model.encoder,
                self.model.contrast_layer,
                self.config.contrast.pooling,
                distributed.device(),
                self.config.model.precision,
            )


def _compute_accuracy(queries: Tensor, candidates: Tensor) -> float:
    """Return the share of queries whose nearest candidate by cosine is the candidate of the same row."""
    correct_rows = torch.arange(len(queries), device=queries.device)
    return (find_nearest(queries, candidates) == correct_rows).double().mean().item()


def _read_first_pairs(
    tables: Sequence[Pairs], count: int, max_tokens: int, vocabulary: Vocabulary
) -> tuple[Sequences, Sequences]:
    """Return the source and target sentences of the first `count` distinct pairs, with special tokens."""
    distinct_pairs = _find_distinct_pairs(tables, count, max_tokens)
    rows = np.array([row for _, row in distinct_pairs])
    sources = read_rows([tables[number].source for number, _ in distinct_pairs], rows, max_tokens)
    targets = read_rows([tables[number].target for number, _ in distinct_pairs], rows, max_tokens)
    return lay_out([sources], vocabulary), lay_out([targets], vocabulary)


def _find_distinct_pairs(tables: Sequence[Pairs], count: int, max_tokens: int) -> list[tuple[int, int]]:
    """Return the table number and row of the first `count` pairs that share no sentence with an earlier one.

    If a sentence occurred twice, a query would have two right answers.
    """
    distinct_pairs: list[tuple[int, int]] = []
    known_sources: set[bytes] = set()
    known_targets: set[bytes] = set()
    for table_number, table in enumerate(tables):
        for row in range(len(table)):
            if len(distinct_pairs) == count:
                return distinct_pairs
            source = _read_token_bytes(table.source, row, max_tokens)
            target = _read_token_bytes(table.target, row, max_tokens)
            if source not in known_sources and target not in known_targets:
                known_sources.add(source)
                known_targets.add(target)
                distinct_pairs.append((table_number, row))
    return distinct_pairs


def _read_token_bytes(table: Table, row: int, max_tokens: int) -> bytes:
    """Return the first tokens of a sentence as bytes, which are faster to compare than arrays."""
    start = table.offsets.item(row)
    end = min(table.offsets.item(row + 1), start + max_tokens)
    return table.tokens[start:end].tobytes()


def _encode(
    encoder: Encoder, sentences: Sequences, layer: int, pooling: str, device: torch.device, precision: str
) -> Tensor:
    """Return the normalized vectors (N, d) of N sentences.

    The encoder runs in the precision of the training, not in fp32, because the other workers wait for the result.
    """
    vectors = []
    for start in range(0, len(sentences.lengths), BATCH_SEQUENCES):
        batch = sentences[start : start + BATCH_SEQUENCES]
        lengths = batch.lengths.tolist()
        ids = devices.send(torch.from_numpy(batch.flat), device)  # (T,) tokens of all sentences end to end
        position_ids = devices.send(torch.from_numpy(number_positions(batch.lengths)), device)  # (T,)
        with autocast(device, precision):
            hidden = encoder(ids, position_ids, lengths, last_layer=layer)  # (T, d)
        vectors.append(pool(hidden, lengths, pooling).float())  # (sentences of the batch, d)
    return F.normalize(torch.cat(vectors), dim=1)

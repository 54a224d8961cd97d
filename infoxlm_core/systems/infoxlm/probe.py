"""Probe retrieval on a few held-out pairs during training, to show whether the model learns to align languages."""

import itertools
from collections.abc import Iterator, Sequence
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

BATCH_SEQUENCES = 64  # sequences per forward pass


class Probe:
    """Retrieval among the first held-out pairs of each language pair.

    Args:
        shards: token shards with held-out pairs.
        count: number of pairs per language pair.
        max_tokens: length to which sentences are truncated.
    """

    def __init__(self, shards: Shards, count: int, max_tokens: int) -> None:
        self.pairs = {}  # language pair, such as en-de -> source and target sentences
        for name, tables in shards.held_out.items():
            if any(len(table) for table in tables):
                pairs = [table.read_pairs() for table in tables]
                self.pairs[name] = _read_first_pairs(pairs, count, max_tokens, shards.vocabulary)

    @torch.no_grad()
    def score(
        self, encoder: Encoder, layer: int, pooling: str, device: torch.device, precision: str = "auto"
    ) -> dict[str, float]:
        """Return each language pair's retrieval accuracy, averaged over both directions, and the mean of all pairs.

        Args:
            encoder: the encoder to evaluate.
            layer: the layer whose output is pooled to sentence vectors.
            pooling: pooling method, mean or cls.
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
        """Score the probe every `probe.every` steps. Return no scores after other steps."""
        if step % self.config.probe.every:
            return {}
        if sharding.is_sharded(self.model):  # all workers must help to gather the shards
            return self._score()
        return distributed.on_first(self._score) or {}

    def _score(self) -> dict[str, float]:
        """Score the model's current weights."""
        with sharding.gathered(self.model):
            return self.probe.score(
                self.model.encoder,
                self.model.contrast_layer,
                self.config.contrast.pooling,
                distributed.device(),
                self.config.model.precision,
            )


def _compute_accuracy(queries: Tensor, candidates: Tensor) -> float:
    """Return the share of queries whose nearest candidate by cosine similarity is in the same row."""
    correct_rows = torch.arange(len(queries), device=queries.device)
    return (find_nearest(queries, candidates) == correct_rows).double().mean().item()


def _read_first_pairs(
    tables: Sequence[Pairs], count: int, max_tokens: int, vocabulary: Vocabulary
) -> tuple[Sequences, Sequences]:
    """Read the source and target sentences of the first `count` distinct pairs, and add special tokens."""
    distinct_pairs = list(itertools.islice(_find_distinct_pairs(tables, max_tokens), count))
    rows = np.array([row for _, row in distinct_pairs])
    sources = read_rows([tables[number].source for number, _ in distinct_pairs], rows, max_tokens)
    targets = read_rows([tables[number].target for number, _ in distinct_pairs], rows, max_tokens)
    return lay_out([sources], vocabulary), lay_out([targets], vocabulary)


def _find_distinct_pairs(tables: Sequence[Pairs], max_tokens: int) -> Iterator[tuple[int, int]]:
    """Yield the table number and row of each pair that shares no sentence with an earlier pair.

    A repeated sentence would give a query two right answers.
    """
    known_sources: set[bytes] = set()
    known_targets: set[bytes] = set()
    for table_number, table in enumerate(tables):
        for row in range(len(table)):
            source = _read_token_bytes(table.source, row, max_tokens)
            target = _read_token_bytes(table.target, row, max_tokens)
            if source not in known_sources and target not in known_targets:
                known_sources.add(source)
                known_targets.add(target)
                yield table_number, row


def _read_token_bytes(table: Table, row: int, max_tokens: int) -> bytes:
    """Return a sentence's first `max_tokens` tokens as bytes, because sets can contain bytes but not arrays."""
    start = table.offsets.item(row)
    end = min(table.offsets.item(row + 1), start + max_tokens)
    return table.tokens[start:end].tobytes()


def _encode(
    encoder: Encoder, sentences: Sequences, layer: int, pooling: str, device: torch.device, precision: str
) -> Tensor:
    """Encode N sentences as normalized vectors (N, d).

    The encoder runs in training precision rather than fp32, because the other workers wait for the result.
    """
    vectors = []
    for start in range(0, len(sentences.lengths), BATCH_SEQUENCES):
        batch = sentences[start : start + BATCH_SEQUENCES]
        lengths = batch.lengths.tolist()
        ids = devices.send(torch.from_numpy(batch.flat), device)  # (T,)
        position_ids = devices.send(torch.from_numpy(number_positions(batch.lengths)), device)  # (T,)
        with autocast(device, precision):
            hidden = encoder(ids, position_ids, lengths, last_layer=layer)  # (T, d)
        vectors.append(pool(hidden, lengths, pooling).float())  # (batch size, d)
    return F.normalize(torch.cat(vectors), dim=1)

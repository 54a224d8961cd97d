"""Objectives on the sentence vectors of translation pairs: XLCO, and the base class for others."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from infoxlm_core.config import PretrainingConfig
from infoxlm_core.data.batches import PackedBatch
from infoxlm_core.errors import ConfigError
from infoxlm_core.model.heads import InfoXLM
from infoxlm_core.model.momentum import KeyEncoder, Queue, momentum_at
from infoxlm_core.model.objectives import (
    have_equal_sentences,
    share_a_sentence,
    xlco_hits,
    xlco_logits,
    xlco_losses,
)
from infoxlm_core.training import distributed, sharding
from infoxlm_core.training.learner import autocast

STATISTICS_ROWS = 4096  # negatives whose logits give the logged mean and spread: all of them would take longer


class SentenceObjective(ABC):
    """A loss on the queries of a micro-batch, with the state that it needs. `objectives.NAME` is its weight."""

    name: ClassVar[str]

    def __init__(self, config: PretrainingConfig, model: InfoXLM) -> None:
        self.config = config
        self.model = model

    @abstractmethod
    def count(self, batch: PackedBatch) -> int:
        """Return the number of targets in a micro-batch. The loss is divided by their number in the global batch."""

    @abstractmethod
    def loss(self, batch: PackedBatch, queries: Tensor, by_group: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss summed over the targets, with gradient, and sums without gradient for `statistics`.

        Args:
            batch: on this worker's device.
            queries: (B, d) in fp32.
            by_group: (2, groups) losses and counts, to which those of `batch.view_groups` are added.
        """

    def statistics(self, sums: Mapping[str, Any], count: float) -> dict[str, float]:  # noqa: ARG002
        """Return points of the curves, from the sums and the count of all workers."""
        return {}

    def after_step(self, step: int, good: bool) -> None:  # noqa: B027 - most objectives remember nothing
        """See `Learner.after_step`."""

    def state(self) -> dict[str, Tensor]:
        """See `Learner.state`."""
        return {}


class XLCO(SentenceObjective):
    """Cross-lingual contrast against a queue of keys that a momentum encoder computes (InfoXLM, section 3.3)."""

    name = "xlco"

    def __init__(self, config: PretrainingConfig, model: InfoXLM) -> None:
        super().__init__(config, model)
        self.shares = distributed.shares(config.batches.virtual_shards)
        share_sizes = {len(share) for share in self.shares}
        if config.contrast.enqueue == "micro_batch" and len(share_sizes) > 1:
            raise ConfigError(
                f"with contrast.enqueue: micro_batch {len(self.shares)} workers must divide batches.virtual_shards "
                f"({config.batches.virtual_shards}): take another number of workers, or enqueue: step"
            )
        self.device = distributed.device()
        self.key_encoder = KeyEncoder(model).to(self.device)
        self.queue = Queue(config.contrast.queue_size, model.encoder.size.hidden, self.device)
        self.new_keys: list[tuple[Tensor, Tensor]] = []  # keys and sentence ids of this step's micro-batches

    def shard(self) -> None:
        """Shard the key encoder, after the model was sharded."""
        sharding.shard(self.key_encoder, self.key_encoder.encoder.layers)
        self.key_encoder.pair_with(self.model)
        self.key_encoder.encoder.compile_in_place()

    def count(self, batch: PackedBatch) -> int:
        return batch.items

    def loss(self, batch: PackedBatch, queries: Tensor, by_group: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        contrast = self.config.contrast
        if contrast.enqueue == "micro_batch" and self.new_keys:
            self.enqueue(batch.rng_key[0])
        keys = self.make_keys(batch)
        negatives = self.queue.rows
        negative_ids = self.queue.sentence_ids
        if contrast.in_batch_negatives:
            negatives = torch.cat([negatives, keys])
            negative_ids = torch.cat([negative_ids, batch.sentence_ids])
        excluded = self.exclude(batch.sentence_ids, negative_ids)
        logits = xlco_logits(queries, keys, negatives, contrast.temperature, excluded)
        losses = xlco_losses(logits, contrast.margin / contrast.temperature)
        weight = batch.items / len(losses)  # 1, or 1/2 where each item is contrasted from both sides
        with torch.no_grad():
            add_by_group(by_group, batch.view_groups, losses.detach(), weight)
            sums = {"xlco": losses.sum() * weight} | _sum_statistics(logits, weight)
            sums["key_check"] = keys.sum() * 0.0  # not finite if any key is not
        return losses.sum() * weight, sums

    def exclude(self, query_ids: Tensor, key_ids: Tensor) -> Tensor | None:
        """Return which keys are no negatives of each query: (B, K) bool, or None if all keys are negatives.

        Args:
            query_ids: (B, 2) sentence ids of the queries.
            key_ids: (K, 2) sentence ids of the keys. With in-batch negatives, the last B keys are those of the queries.
        """
        contrast = self.config.contrast
        batch_size = len(query_ids)
        if contrast.false_negatives == "overlap":
            excluded = share_a_sentence(query_ids, key_ids)
        elif contrast.false_negatives == "exact":
            excluded = have_equal_sentences(query_ids, key_ids)
        elif contrast.in_batch_negatives:
            excluded = torch.zeros(batch_size, len(key_ids), dtype=torch.bool, device=query_ids.device)
        else:
            return None
        if contrast.in_batch_negatives:
            queries = torch.arange(batch_size, device=query_ids.device)
            first_column = len(self.queue.rows)  # of the keys of this micro-batch
            excluded[queries, first_column + queries] = True
            if contrast.symmetric:  # the query's own sentence is a key of the other half
                mirrored_queries = (queries + batch_size // 2) % batch_size
                excluded[queries, first_column + mirrored_queries] = True
        return excluded

    def make_keys(self, batch: PackedBatch) -> Tensor:
        """Return the keys (B, d) of a micro-batch, and add them to those that `enqueue` will push."""
        with autocast(self.device, self.config.model.precision):
            keys = self.key_encoder(batch.key_ids, batch.key_positions, batch.key_lengths)
        keys = keys[: len(batch.sentence_ids)]  # without the key of the padding sequence
        # With `symmetric`, the second half of the batch has the same items in the other direction: push them once.
        self.new_keys.append((keys[: batch.items], batch.sentence_ids[: batch.items]))
        return keys

    def enqueue(self, step: int, limit: int | None = None) -> None:
        """Push the new keys of all workers into the queue, in the order of the global batch, and at most `limit`."""
        keys = torch.cat([keys for keys, _ in self.new_keys])
        sentence_ids = torch.cat([ids for _, ids in self.new_keys])
        samples_per_shard = self.config.batches.global_batch_size // self.config.batches.virtual_shards
        counts: Sequence[int] = [len(share) * samples_per_shard for share in self.shares]
        if len(set(counts)) == 1:  # all workers have equally many keys, even if these are of one micro-batch only
            counts = ()
        keys = distributed.gather_rows(keys, counts)
        sentence_ids = distributed.gather_rows(sentence_ids, counts)
        self.queue.push(keys[:limit], sentence_ids[:limit], step)
        self.new_keys.clear()

    def after_step(self, step: int, good: bool) -> None:
        """Update the key encoder and enqueue the keys of the step, unless it was bad or came before contrast began."""
        contrast = self.config.contrast
        if good and step > contrast.start_step:
            momentum = momentum_at(contrast, step - 1, self.config.optimization.steps)
            self.key_encoder.update(momentum)
            self.enqueue(step)
        self.new_keys.clear()
        if step == contrast.start_step:
            self.key_encoder.update(0.0)  # contrast begins with a copy of the query encoder

    def statistics(self, sums: Mapping[str, Any], count: float) -> dict[str, float]:
        negative_mean = sums["negative"] / count
        negative_variance = sums["negative_square"] / count - negative_mean**2
        return {
            "queue/age": self.queue.mean_age,
            "xlco/accuracy": sums["hits"] / count,
            "xlco/positive_logit": sums["positive"] / count,
            "xlco/negative_logit": negative_mean,
            "xlco/negative_spread": max(0.0, negative_variance) ** 0.5,
        }

    def state(self) -> dict[str, Tensor]:
        weights: dict[str, Tensor] = {
            f"key_encoder/{name}": weight for name, weight in self.key_encoder.named_parameters()
        }
        return weights | {f"queue/{name}": tensor for name, tensor in self.queue.state().items()}


def _sum_statistics(logits: Tensor, weight: float) -> dict[str, Tensor]:
    """Return sums over the queries from which `XLCO.statistics` computes the accuracy and the spread of the logits.

    Args:
        logits: (B, 1 + K) of the positive, then of the negatives; -inf where a negative is excluded.
        weight: factor of each query.
    """
    stride = math.ceil((logits.shape[1] - 1) / STATISTICS_ROWS)
    negative_logits = logits[:, 1::stride]  # (B, sampled negatives)
    negative_logits = negative_logits.masked_fill(negative_logits.isinf(), torch.nan)  # excluded ones
    return {
        "hits": xlco_hits(logits) * weight,
        "positive": logits[:, 0].sum() * weight,
        "negative": negative_logits.nanmean(dim=1).nan_to_num().sum() * weight,
        "negative_square": negative_logits.square().nanmean(dim=1).nan_to_num().sum() * weight,
    }


SENTENCE_OBJECTIVES: tuple[type[SentenceObjective], ...] = (XLCO,)


def add_by_group(by_group: Tensor, groups: Tensor, losses: Tensor, weight: float = 1.0) -> None:
    """Add losses and their number to the sums of their groups.

    Args:
        by_group: (2, groups) sum of losses and number of losses in each group; changed in place.
        groups: (N,) group of each loss.
        losses: (N,).
        weight: factor of each loss and of its count.
    """
    loss_sums, loss_counts = by_group
    loss_sums.index_add_(0, groups, losses.to(loss_sums.dtype) * weight)
    loss_counts.index_add_(0, groups, torch.ones_like(losses).to(loss_counts.dtype) * weight)

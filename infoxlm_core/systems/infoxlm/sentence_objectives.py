"""Objectives on the sentence vectors of translation pairs: XLCO and its base class."""

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
from infoxlm_core.model.momentum import KeyEncoder, Queue, compute_momentum
from infoxlm_core.model.objectives import (
    count_xlco_hits,
    find_equal_pairs,
    find_shared_sentences,
    xlco_logits,
    xlco_losses,
)
from infoxlm_core.training import distributed, sharding
from infoxlm_core.training.learner import autocast

STATISTICS_NEGATIVES = 4096  # queue sample size for the logged mean and spread; the whole queue would be slower


class SentenceObjective(ABC):
    """A loss on a micro-batch's queries, with its state. The setting `objectives.NAME` is the loss weight."""

    name: ClassVar[str]

    def __init__(self, config: PretrainingConfig, model: InfoXLM) -> None:
        self.config = config
        self.model = model

    @abstractmethod
    def count(self, batch: PackedBatch) -> int:
        """Count a micro-batch's targets. The loss is divided by the number of targets in the global batch."""

    @abstractmethod
    def loss(self, batch: PackedBatch, queries: Tensor, group_totals: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss summed over the targets, and sums without gradient for `statistics`.

        Args:
            batch: the micro-batch on this worker's device.
            queries: fp32 sentence vectors (B, d).
            group_totals: loss sums and loss counts of all groups (2, groups); updated in place.
        """

    def statistics(self, sums: Mapping[str, Any], count: float) -> dict[str, float]:  # noqa: ARG002
        """Compute a step's metrics from the sums and target counts of all workers."""
        return {}

    def after_step(self, step: int, good: bool) -> None:  # noqa: B027 - optional: an objective may have no state
        """See `Learner.after_step`."""

    def state(self) -> dict[str, Tensor]:
        """See `Learner.state`."""
        return {}


class XLCO(SentenceObjective):
    """Cross-lingual contrast against a queue of keys from a momentum encoder (InfoXLM, section 3.3)."""

    name = "xlco"

    def __init__(self, config: PretrainingConfig, model: InfoXLM) -> None:
        super().__init__(config, model)
        self.shares = distributed.shares(config.batches.virtual_shards)
        share_sizes = {len(share) for share in self.shares}
        if config.contrast.enqueue == "micro_batch" and len(share_sizes) > 1:
            raise ConfigError(
                f"with contrast.enqueue: micro_batch, the number of workers ({len(self.shares)}) must divide "
                f"batches.virtual_shards ({config.batches.virtual_shards}): change one of them, or set enqueue: step"
            )
        self.device = distributed.device()
        self.key_encoder = KeyEncoder(model).to(self.device)
        self.queue = Queue(config.contrast.queue_size, model.encoder.size.hidden, self.device)
        self.new_keys: list[tuple[Tensor, Tensor]] = []  # keys and sentence ids not yet in the queue

    def shard(self) -> None:
        """Shard the key encoder. Call this after sharding the model."""
        sharding.shard(self.key_encoder, self.key_encoder.encoder.layers)
        self.key_encoder.pair_with(self.model)
        self.key_encoder.encoder.compile_layers()

    def count(self, batch: PackedBatch) -> int:
        return batch.contrast_count

    def loss(self, batch: PackedBatch, queries: Tensor, group_totals: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the contrastive loss summed over the queries (B, d), and the sums for `statistics`."""
        contrast = self.config.contrast
        if contrast.enqueue == "micro_batch" and self.new_keys:  # keys of the previous micro-batch
            step, _, _ = batch.rng_key  # counted from 0, unlike the steps of the queue's rows
            self.enqueue(step + 1)
        keys = self.compute_keys(batch)
        self.collect_keys(batch, keys)
        negatives = self.queue.rows
        negative_ids = self.queue.sentence_ids
        if contrast.in_batch_negatives:
            negatives = torch.cat([negatives, keys])
            negative_ids = torch.cat([negative_ids, batch.sentence_ids])
        is_excluded = self.find_excluded_keys(batch.sentence_ids, negative_ids)
        logits = xlco_logits(queries, keys, negatives, contrast.temperature, is_excluded)
        losses = xlco_losses(logits, contrast.margin / contrast.temperature)
        query_weight = batch.contrast_count / len(losses)  # 1/2 if pairs are contrasted in both directions, else 1
        loss = losses.sum() * query_weight
        with torch.no_grad():
            add_to_groups(group_totals, batch.view_group_ids, losses.detach(), query_weight)
            sums = {"xlco": losses.sum() * query_weight} | _sum_statistics(logits, query_weight)
            sums["key_check"] = keys.sum() * 0.0  # NaN if a key is not finite, so that the step counts as bad
        return loss, sums

    def find_excluded_keys(self, query_ids: Tensor, key_ids: Tensor) -> Tensor | None:
        """Return a mask (B, K) of the keys that are not negatives of a query. Return None if no key is excluded.

        Args:
            query_ids: sentence ids of the queries (B, 2).
            key_ids: sentence ids of the keys (K, 2). With in-batch negatives, the last B keys are the micro-batch's.
        """
        contrast = self.config.contrast
        batch_size = len(query_ids)
        if contrast.false_negatives == "overlap":
            is_excluded = find_shared_sentences(query_ids, key_ids)
        elif contrast.false_negatives == "exact":
            is_excluded = find_equal_pairs(query_ids, key_ids)
        elif contrast.in_batch_negatives:
            is_excluded = torch.zeros(batch_size, len(key_ids), dtype=torch.bool, device=query_ids.device)
        else:
            return None
        if contrast.in_batch_negatives:
            rows = torch.arange(batch_size, device=query_ids.device)
            batch_keys = len(self.queue.rows) + rows  # (B,) the micro-batch's keys follow the queue
            is_excluded[rows, batch_keys] = True  # each query's own key is its positive
            if contrast.symmetric:
                # The second half of the batch repeats the pairs of the first half with query and key exchanged.
                exchanged_keys = batch_keys.roll(batch_size // 2)
                is_excluded[rows, exchanged_keys] = True
        return is_excluded

    def compute_keys(self, batch: PackedBatch) -> Tensor:
        """Compute a micro-batch's keys (B, d)."""
        with autocast(self.device, self.config.model.precision):
            keys = self.key_encoder(batch.key_ids, batch.key_positions, batch.key_lengths)
        return keys[: len(batch.sentence_ids)]  # without the key of the padding sequence

    def collect_keys(self, batch: PackedBatch, keys: Tensor) -> None:
        """Store a micro-batch's keys (B, d) until `enqueue` pushes them into the queue. Ignore a dummy batch."""
        if batch.is_dummy:
            return
        # With `symmetric`, the second half of the batch repeats the pairs of the first half, so only the first counts.
        self.new_keys.append((keys[: batch.contrast_count], batch.sentence_ids[: batch.contrast_count]))

    def enqueue(self, step: int, limit: int | None = None) -> None:
        """Gather the collected keys of all workers in global-batch order, and push the first `limit` into the queue."""
        keys = torch.cat([keys for keys, _ in self.new_keys])
        sentence_ids = torch.cat([ids for _, ids in self.new_keys])
        samples_per_shard = self.config.batches.global_batch_size // self.config.batches.virtual_shards
        key_counts: Sequence[int] = [len(share) * samples_per_shard for share in self.shares]  # keys per step
        if len(set(key_counts)) == 1:
            # Workers with equal shares need no counts, which would be wrong if they enqueue after each micro-batch.
            key_counts = ()
        keys = distributed.gather_rows(keys, key_counts)
        sentence_ids = distributed.gather_rows(sentence_ids, key_counts)
        self.queue.push(keys[:limit], sentence_ids[:limit], step)
        self.new_keys.clear()

    def after_step(self, step: int, good: bool) -> None:
        """After a good step, update the key encoder and enqueue the step's keys, once contrast has begun."""
        contrast = self.config.contrast
        if good and step > contrast.start_step:  # `step` counts the steps taken
            momentum = compute_momentum(contrast, step - 1, self.config.optimization.steps)  # numbers steps from 0
            self.key_encoder.update(momentum)
            self.enqueue(step)
        self.new_keys.clear()  # drops the keys of a bad step
        if step == contrast.start_step:
            self.key_encoder.update(0.0)  # contrast begins with a copy of the query encoder

    def statistics(self, sums: Mapping[str, Any], count: float) -> dict[str, float]:
        """Return the contrast accuracy, logit statistics, and the mean age of queue keys in steps."""
        negative_mean = sums["negative"] / count
        negative_variance = sums["negative_square"] / count - negative_mean**2
        return {
            "queue/age": self.queue.mean_age,
            "xlco/accuracy": sums["hits"] / count,
            "xlco/positive_logit": sums["positive"] / count,
            "xlco/negative_logit": negative_mean,
            "xlco/negative_spread": max(0.0, negative_variance) ** 0.5,  # rounding may make the variance negative
        }

    def state(self) -> dict[str, Tensor]:
        weights: dict[str, Tensor] = {
            f"key_encoder/{name}": weight for name, weight in self.key_encoder.named_parameters()
        }
        return weights | {f"queue/{name}": tensor for name, tensor in self.queue.state_dict().items()}


def _sum_statistics(logits: Tensor, query_weight: float) -> dict[str, Tensor]:
    """Sum a micro-batch's hits and logits for `XLCO.statistics`.

    Args:
        logits: logits of the positive and the K negatives (B, 1 + K); -inf for excluded negatives.
        query_weight: weight of each query in the sums.
    """
    negative_count = logits.shape[1] - 1
    stride = math.ceil(negative_count / STATISTICS_NEGATIVES)
    negative_logits = logits[:, 1::stride]  # (B, sampled negatives)
    negative_logits = negative_logits.masked_fill(negative_logits.isinf(), torch.nan)  # excludes them from nanmean
    negative_means = negative_logits.nanmean(dim=1).nan_to_num()  # (B,)
    negative_square_means = negative_logits.square().nanmean(dim=1).nan_to_num()  # (B,)
    return {
        "hits": count_xlco_hits(logits) * query_weight,
        "positive": logits[:, 0].sum() * query_weight,
        "negative": negative_means.sum() * query_weight,
        "negative_square": negative_square_means.sum() * query_weight,
    }


SENTENCE_OBJECTIVES: tuple[type[SentenceObjective], ...] = (XLCO,)


def add_to_groups(group_totals: Tensor, groups: Tensor, losses: Tensor, weight: float = 1.0) -> None:
    """Add each loss to its group's sum, and increment the group's count.

    Args:
        group_totals: loss sums and loss counts of all groups (2, groups); updated in place.
        groups: group index of each loss (N,).
        losses: losses without gradient (N,).
        weight: factor for each loss and for its count.
    """
    loss_sums, loss_counts = group_totals
    loss_sums.index_add_(0, groups, losses.to(loss_sums.dtype) * weight)
    loss_counts.index_add_(0, groups, torch.ones_like(losses).to(loss_counts.dtype) * weight)

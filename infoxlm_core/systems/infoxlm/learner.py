"""InfoXLM's step: MLM, TLM and sentence objectives in one forward pass, as a learner of the training loop."""

import logging
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from infoxlm_core.config import PretrainingConfig
from infoxlm_core.data.batches import PackedBatch, micro_batches
from infoxlm_core.data.samples import Sampler
from infoxlm_core.data.shards import Shards
from infoxlm_core.model.flops import count_step_flops
from infoxlm_core.model.heads import InfoXLM
from infoxlm_core.systems.infoxlm.sentence_objectives import SENTENCE_OBJECTIVES, XLCO, add_by_group
from infoxlm_core.training import distributed, sharding
from infoxlm_core.training.learner import (
    Learner,
    LossWeights,
    autocast,
    half_precision,
    prepare_encoder,
    seed_dropout,
)

logger = logging.getLogger(__name__)
GPU_TILE = 128  # rows of a tile of matrix products on GPUs


class InfoXLMLearner(Learner):
    """Trains the query encoder on the enabled objectives. The objective XLCO has the key encoder and the queue."""

    module: InfoXLM

    def __init__(self, config: PretrainingConfig, model: InfoXLM, shards: Shards) -> None:
        self.config = config
        self.module = model
        self.sampler = Sampler(shards, config)
        self.device = distributed.device()
        self.shares = distributed.shares(config.batches.virtual_shards)
        self.weights = LossWeights(config.objectives.weights(), config.objectives.weighting)
        compiler = prepare_encoder(model.encoder, config.model, self.device)
        if model.head is not None:
            model.head.compiler = compiler
        enabled = [objective for objective in SENTENCE_OBJECTIVES if objective.name in self.weights.by_name]
        self.objectives = [objective(config, model) for objective in enabled]
        if config.model.sharded:
            sharding.shard(model, model.encoder.layers, half_precision(self.device, config.model.precision))
            model.encoder.compile_in_place()
            if self.has_contrast:
                self.xlco.shard()

    @property
    def has_contrast(self) -> bool:
        return XLCO.name in self.weights.by_name

    @property
    def xlco(self) -> XLCO:
        return next(objective for objective in self.objectives if isinstance(objective, XLCO))

    def batches(self, step: int, skipped: int = 0) -> Sequence[PackedBatch]:
        my_shards = self.shares[distributed.rank()]
        # Dropout is drawn for each micro-batch, so a micro-batch must not depend on the number of workers.
        is_split_by_shard = self.config.model.dropout > 0
        shard_ranges = [my_shards]
        if is_split_by_shard:
            shard_ranges = [range(shard, shard + 1) for shard in my_shards]
        batches: list[PackedBatch] = []
        for shard_range in shard_ranges:
            batches += self._draw_batches(step, step + skipped, shard_range)
        batches = self._add_idle_batches(batches, is_split_by_shard)
        if self.device.type == "cpu":
            return batches
        # On a GPU, matrix products are fastest if the number of tokens is a multiple of their tile.
        tile = min(GPU_TILE, self.module.encoder.size.max_tokens)
        return [batch.aligned(tile, self.sampler.vocabulary.pad) for batch in batches]

    def _draw_batches(self, step: int, draw_number: int, shards: range) -> list[PackedBatch]:
        """Draw the micro-batches of some virtual shards. `draw_number` is the step plus the number of skipped draws."""
        contrast = self.config.contrast
        only = "lm" if step < contrast.start_step else ""
        draw = self.sampler.draw(draw_number, shards, only)
        batches = []
        for number, batch in enumerate(micro_batches(draw, self.config.batches.micro_batch_size, contrast.symmetric)):
            batches.append(replace(batch, rng_key=(step, shards.start, number), flops=self._flops(batch)))
        return batches

    def _add_idle_batches(self, batches: list[PackedBatch], is_split_by_shard: bool) -> list[PackedBatch]:
        """Append idle batches if the network is sharded, because all workers must call it equally often.

        Args:
            batches: micro-batches of this worker.
            is_split_by_shard: whether each micro-batch has samples of one virtual shard only.
        """
        if not self.config.model.sharded:
            return batches
        samples_per_shard = self.sampler.samples_per_shard
        size = self.config.batches.micro_batch_size
        if is_split_by_shard:
            batch_counts = [len(share) * math.ceil(samples_per_shard / size) for share in self.shares]
        else:
            batch_counts = [math.ceil(len(share) * samples_per_shard / size) for share in self.shares]
        idle_batch = replace(batches[0], idle=True)
        return batches + [idle_batch] * (max(batch_counts) - len(batches))

    def counts(self, batch: PackedBatch) -> Mapping[str, float]:
        if batch.idle:
            return {}
        return batch.counts | {objective.name: objective.count(batch) for objective in self.objectives}

    def kind_of(self, step: int, skipped: int = 0) -> str:  # noqa: ARG002
        return "" if step >= self.config.contrast.start_step else "before contrast"

    def _flops(self, batch: PackedBatch) -> float:
        """Return the necessary FLOPs of a micro-batch."""
        contrast = self.config.contrast
        return count_step_flops(
            self.module.encoder.size,
            batch.lengths[: batch.lm_sequences],
            len(batch.target_rows),
            batch.lengths[batch.lm_sequences :],
            batch.key_lengths,
            self.module.contrast_layer,
            contrast.queue_size,
        )

    def losses(self, batch: PackedBatch, scales: Mapping[str, float]) -> tuple[Tensor, dict[str, Tensor]]:
        if batch.idle:
            return self._idle_loss(batch, scales), {}
        batch = batch.to(self.device)
        by_group = torch.zeros(2, len(self.sampler.groups), dtype=torch.double, device=self.device)
        loss = torch.zeros((), device=self.device)
        sums = {"by_group": by_group}
        seed_dropout(self.config.seed, *batch.rng_key)
        with autocast(self.device, self.config.model.precision):
            outputs = self.module(batch, self._scale_of_targets(batch, scales))
        if outputs.losses is not None:
            losses_by_objective = {
                "mlm": outputs.losses[: batch.mlm_targets],
                "tlm": outputs.losses[batch.mlm_targets :],
            }
            for name, losses in losses_by_objective.items():
                if name in self.weights.by_name:
                    sums[name] = losses.sum()
            loss = loss + outputs.loss
            add_by_group(by_group, batch.target_groups, outputs.losses)
        if outputs.queries is not None:
            for objective in self.objectives:
                objective_loss, objective_sums = objective.loss(batch, outputs.queries, by_group)
                loss = loss + objective_loss * scales[objective.name]
                sums |= objective_sums
        return loss, sums

    def _idle_loss(self, batch: PackedBatch, scales: Mapping[str, float]) -> Tensor:
        """Compute a loss of weight 0, so that this worker takes part in the communication of the others."""
        new_keys = self.xlco.new_keys if self.has_contrast else []
        key_count = len(new_keys)
        loss, _ = self.losses(replace(batch, idle=False), dict.fromkeys(scales, 0.0))
        del new_keys[key_count:]  # an idle batch must not enter the queue
        return loss

    def _scale_of_targets(self, batch: PackedBatch, scales: Mapping[str, float]) -> Tensor:
        """Return the factor (N,) of each target in the loss. The targets of MLM come first."""
        dtype = self.module.encoder.token_embedding.weight.dtype
        scale = torch.full((len(batch.target_ids),), scales.get("tlm", 0.0), dtype=dtype, device=self.device)
        scale[: batch.mlm_targets] = scales.get("mlm", 0.0)
        return scale

    def statistics(self, sums: Mapping[str, Any], counts: Mapping[str, float]) -> dict[str, float]:
        statistics = {}
        by_language: defaultdict[str, np.ndarray] = defaultdict(lambda: np.zeros(2))  # sum and number of losses
        for group, (loss_sum, loss_count) in zip(self.sampler.groups, sums["by_group"].T, strict=True):
            objective_and_language, _, _ = group.rpartition("/")
            by_language[objective_and_language] += (loss_sum, loss_count)
            if loss_count:
                statistics[f"targets/{group}"] = float(loss_count)
        for objective_and_language, (loss_sum, loss_count) in by_language.items():
            if loss_count:
                statistics[f"loss_{objective_and_language}"] = float(loss_sum / loss_count)
        for objective in self.objectives:
            if counts[objective.name]:
                statistics |= objective.statistics(sums, counts[objective.name])
        return statistics

    def after_step(self, step: int, good: bool = True) -> None:
        for objective in self.objectives:
            objective.after_step(step, good)
        if self.has_contrast and step == self.config.contrast.start_step:
            self._fill_queue()

    def _fill_queue(self) -> None:
        """Fill the queue with the keys of K samples, from a random stream that training batches do not use."""
        queue_size = self.config.contrast.queue_size
        samples_per_draw = self.config.batches.global_batch_size
        my_shards = self.shares[distributed.rank()]
        for number in range(math.ceil(queue_size / samples_per_draw)):
            draw = self.sampler.draw(f"prefill {number}", my_shards, only="xlco")
            batches = micro_batches(draw, self.config.batches.micro_batch_size)
            for batch in self._add_idle_batches(batches, is_split_by_shard=False):
                self.xlco.make_keys(batch.to(self.device))
                if batch.idle:
                    self.xlco.new_keys.pop()
            self.xlco.enqueue(self.config.contrast.start_step, limit=queue_size - number * samples_per_draw)
        self.xlco.queue.pointer.zero_()
        logger.info("filled the queue with %d keys", queue_size)

    def state(self) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for objective in self.objectives:
            tensors |= objective.state()
        return tensors

"""InfoXLM's learner: computes MLM, TLM and sentence objectives in one forward pass per micro-batch."""

import logging
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from infoxlm_core.config import PretrainingConfig
from infoxlm_core.data.batches import PackedBatch, pack_micro_batches
from infoxlm_core.data.samples import Sampler
from infoxlm_core.data.shards import Shards
from infoxlm_core.model.flops import count_step_flops
from infoxlm_core.model.heads import InfoXLM
from infoxlm_core.systems.infoxlm.sentence_objectives import SENTENCE_OBJECTIVES, XLCO, add_to_groups
from infoxlm_core.training import distributed, sharding
from infoxlm_core.training.learner import Learner, LossWeights, autocast, half_precision, prepare_encoder, seed_dropout

logger = logging.getLogger(__name__)
GPU_TILE = 128  # tokens per tile of a GPU matrix product


class InfoXLMLearner(Learner):
    """Trains the query encoder on the enabled objectives. `XLCO` owns the key encoder and the queue."""

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
        if config.model.sharded:  # after the objectives, whose key encoder copies complete weights
            sharding.shard(model, model.encoder.layers, half_precision(self.device, config.model.precision))
            model.encoder.compile_layers()
            if self.has_contrast:
                self.xlco.shard()

    @property
    def has_contrast(self) -> bool:
        """Return whether XLCO is enabled."""
        return XLCO.name in self.weights.by_name

    @property
    def xlco(self) -> XLCO:
        """Return the XLCO objective, which must be enabled."""
        return next(objective for objective in self.objectives if isinstance(objective, XLCO))

    def batches(self, step: int, skipped: int = 0) -> Sequence[PackedBatch]:
        """Return this worker's micro-batches of a step, with the samples of step `step + skipped`."""
        my_shards = self.shares[distributed.rank()]
        shard_ranges = [my_shards]
        # Dropout is seeded by micro-batch. With dropout, a micro-batch therefore never mixes virtual shards, so that
        # losses do not depend on the number of workers.
        has_dropout = self.config.model.dropout > 0
        if has_dropout:
            shard_ranges = [range(shard, shard + 1) for shard in my_shards]
        batches: list[PackedBatch] = []
        for shard_range in shard_ranges:
            batches += self._draw_batches(step, step + skipped, shard_range)
        batches = self._add_dummy_batches(batches, is_split_by_shard=has_dropout)
        if self.device.type == "cpu":
            return batches
        # GPU matrix products are fastest if the number of tokens is a multiple of the tile size.
        tile_tokens = min(GPU_TILE, self.module.encoder.size.max_tokens)
        return [batch.pad_for_gpu(tile_tokens, self.sampler.vocabulary.pad) for batch in batches]

    def _draw_batches(self, step: int, draw_number: int, shards: range) -> list[PackedBatch]:
        """Draw the micro-batches of a range of virtual shards.

        Args:
            step: the training step that uses the micro-batches.
            draw_number: the step whose samples are drawn; larger than `step` if the guard skipped data.
            shards: virtual shard numbers.
        """
        contrast = self.config.contrast
        samples = self.sampler.draw(draw_number, shards, has_contrast=step >= contrast.start_step)
        batches = pack_micro_batches(samples, self.config.batches.micro_batch_size, contrast.symmetric)
        return [
            replace(batch, rng_key=(step, shards.start, number), flops=self._count_flops(batch))
            for number, batch in enumerate(batches)
        ]

    def _add_dummy_batches(self, batches: list[PackedBatch], is_split_by_shard: bool) -> list[PackedBatch]:
        """Pad this worker's batches with dummy batches, because all workers must call a sharded network equally often.

        Args:
            batches: this worker's micro-batches.
            is_split_by_shard: whether no micro-batch mixes virtual shards.
        """
        if not self.config.model.sharded:
            return batches
        max_shards = max(len(share) for share in self.shares)
        samples_per_shard = self.sampler.samples_per_shard
        micro_batch_size = self.config.batches.micro_batch_size
        if is_split_by_shard:
            max_batches = max_shards * math.ceil(samples_per_shard / micro_batch_size)
        else:
            max_batches = math.ceil(max_shards * samples_per_shard / micro_batch_size)
        dummy_batch = replace(batches[0], is_dummy=True)  # any batch will do, because its loss has weight 0
        return batches + [dummy_batch] * (max_batches - len(batches))

    def counts(self, batch: PackedBatch) -> Mapping[str, float]:
        """Count a micro-batch's targets by objective, tokens and FLOPs. A dummy batch counts nothing."""
        if batch.is_dummy:
            return {}
        return batch.counts | {objective.name: objective.count(batch) for objective in self.objectives}

    def kind_of(self, step: int, skipped: int = 0) -> str:  # noqa: ARG002
        # The loss rises when contrast begins, so the guard must not compare earlier with later steps.
        return "" if step >= self.config.contrast.start_step else "before contrast"

    def _count_flops(self, batch: PackedBatch) -> float:
        """Return the FLOPs of a micro-batch's forward and backward pass."""
        return count_step_flops(
            self.module.encoder.size,
            lm_lengths=batch.lengths[: batch.lm_sequences],
            targets=len(batch.target_rows),
            query_lengths=batch.lengths[batch.lm_sequences :],
            key_lengths=batch.key_lengths,
            contrast_layer=self.module.contrast_layer,
            queue_rows=self.config.contrast.queue_size,
        )

    def losses(self, batch: PackedBatch, scales: Mapping[str, float]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the scaled loss of a micro-batch, and the unscaled sums for `statistics`."""
        if batch.is_dummy:
            # A dummy batch only takes part in the communication of the sharded network, so its loss has weight 0.
            loss, _ = self._compute_losses(batch, dict.fromkeys(scales, 0.0))
            return loss, {}
        return self._compute_losses(batch, scales)

    def _compute_losses(self, batch: PackedBatch, scales: Mapping[str, float]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the scaled loss of all objectives, and the unscaled sums for `statistics`."""
        batch = batch.to(self.device)
        group_totals = torch.zeros(2, len(self.sampler.group_names), dtype=torch.double, device=self.device)
        loss = torch.zeros((), device=self.device)
        sums = {"by_group": group_totals}
        seed_dropout(self.config.seed, *batch.rng_key)
        with autocast(self.device, self.config.model.precision):
            outputs = self.module(batch, self._scale_targets(batch, scales))
        if outputs.losses is not None:  # MLM targets come first
            if "mlm" in self.weights.by_name:
                sums["mlm"] = outputs.losses[: batch.mlm_targets].sum()
            if "tlm" in self.weights.by_name:
                sums["tlm"] = outputs.losses[batch.mlm_targets :].sum()
            loss = loss + outputs.loss
            add_to_groups(group_totals, batch.target_group_ids, outputs.losses)
        if outputs.queries is not None:
            for objective in self.objectives:
                objective_loss, objective_sums = objective.loss(batch, outputs.queries, group_totals)
                loss = loss + objective_loss * scales[objective.name]
                sums |= objective_sums
        return loss, sums

    def _scale_targets(self, batch: PackedBatch, scales: Mapping[str, float]) -> Tensor:
        """Return each target's factor in the loss (N,). MLM targets come first."""
        dtype = self.module.encoder.token_embedding.weight.dtype
        target_scales = torch.full((len(batch.target_ids),), scales.get("tlm", 0.0), dtype=dtype, device=self.device)
        target_scales[: batch.mlm_targets] = scales.get("mlm", 0.0)
        return target_scales

    def statistics(self, sums: Mapping[str, Any], counts: Mapping[str, float]) -> dict[str, float]:
        """Return each group's target count, each language's mean loss, and the sentence objectives' statistics.

        A group is an objective, a language (pair) and a corpus, such as `mlm/en/wiki`.
        """
        statistics = {}
        loss_sums: defaultdict[str, float] = defaultdict(float)  # objective and language, such as mlm/en -> sum
        loss_counts: defaultdict[str, float] = defaultdict(float)
        for group, (group_sum, group_count) in zip(self.sampler.group_names, sums["by_group"].T, strict=True):
            objective_and_language, _, _ = group.rpartition("/")
            loss_sums[objective_and_language] += group_sum
            loss_counts[objective_and_language] += group_count
            if group_count:
                statistics[f"targets/{group}"] = float(group_count)
        for objective_and_language, loss_count in loss_counts.items():
            if loss_count:
                statistics[f"loss_{objective_and_language}"] = float(loss_sums[objective_and_language] / loss_count)
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
        """Fill the queue with keys of pairs that are drawn from a separate random stream."""
        queue_size = self.config.contrast.queue_size
        global_batch_size = self.config.batches.global_batch_size
        my_shards = self.shares[distributed.rank()]
        for number in range(math.ceil(queue_size / global_batch_size)):
            with distributed.sharing_errors():  # the text of one machine may be damaged or unavailable
                samples = self.sampler.draw_for_queue(number, my_shards)
            # Keys are computed without dropout, so a micro-batch may mix virtual shards.
            batches = pack_micro_batches(samples, self.config.batches.micro_batch_size)
            for batch in self._add_dummy_batches(batches, is_split_by_shard=False):
                batch_on_device = batch.to(self.device)
                self.xlco.collect_keys(batch_on_device, self.xlco.compute_keys(batch_on_device))
            remaining_rows = queue_size - number * global_batch_size
            self.xlco.enqueue(self.config.contrast.start_step, limit=remaining_rows)
        self.xlco.queue.pointer.zero_()  # the first training key replaces the oldest key
        logger.info("filled the queue with %d keys", queue_size)

    def state(self) -> dict[str, Tensor]:
        """Return the sentence objectives' tensors, such as the key encoder and the queue."""
        tensors: dict[str, Tensor] = {}
        for objective in self.objectives:
            tensors |= objective.state()
        return tensors

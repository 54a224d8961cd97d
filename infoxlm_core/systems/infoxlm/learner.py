"""InfoXLM's step: MLM + TLM + XLCO together, with key encoder and queue, as a learner of the training loop."""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from infoxlm_core.config import PretrainingConfig
from infoxlm_core.data.batches import PackedBatch, micro_batches
from infoxlm_core.data.samples import Sampler
from infoxlm_core.data.shards import Shards
from infoxlm_core.errors import ConfigError
from infoxlm_core.model.attention import choose_flash
from infoxlm_core.model.encoder import compiler_for
from infoxlm_core.model.flops import must_do_flops
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
from infoxlm_core.training.learner import (
    Learner,
    LossWeights,
    autocast,
    half_precision,
    seed_dropout,
    set_precision,
)

logger = logging.getLogger(__name__)
ALIGNED = 128  # tokens of a micro-batch on a GPU are a multiple: a tile of its products
STATISTICS_ROWS = 4096  # negatives of which the mean and spread of the logits are taken


class InfoXLMLearner(Learner):
    """The learner of the joint objective: InfoXLM's query encoder, its key encoder and the queue."""

    module: InfoXLM

    def __init__(self, config: PretrainingConfig, model: InfoXLM, shards: Shards) -> None:
        self.config, self.module, self.sampler = config, model, Sampler(shards, config)
        self.device, self.shares = distributed.device(), distributed.shares(config.batches.virtual_shards)
        if config.contrast.enqueue == "micro_batch" and len({len(share) for share in self.shares}) > 1:
            raise ConfigError(
                f"with contrast.enqueue: micro_batch {len(self.shares)} workers must divide batches.virtual_shards "
                f"({config.batches.virtual_shards}): take another number of workers, or enqueue: step"
            )
        self.weights = LossWeights(config.objectives.weights(), config.objectives.weighting)
        self.contrasting = "xlco" in self.weights.by_name
        choose_flash(self.device)
        if config.model.compiled:
            model.encoder.compiler = model.head.compiler = compiler_for(self.device, config.model.dropout)
        model.encoder.recompute = config.model.recompute
        set_precision(model.encoder, config.model, self.device)
        if self.contrasting:
            self.key_encoder = KeyEncoder(model).to(self.device)
            self.queue = Queue(config.contrast.queue_size, model.encoder.size.hidden, self.device)
        self.new_keys: list[tuple[Tensor, Tensor]] = []
        if config.model.sharded:
            sharding.shard(model, model.encoder.layers, half_precision(self.device, config.model.precision))
            model.encoder.compile_in_place()
        if config.model.sharded and self.contrasting:
            sharding.shard(self.key_encoder, self.key_encoder.encoder.layers)
            self.key_encoder.pair_with(model)
            self.key_encoder.encoder.compile_in_place()

    def _fill_queue(self) -> None:
        """Fill the queue with K real keys of a reserved random stream, so that training batches do not change."""
        size, each = self.config.contrast.queue_size, self.config.batches.global_batch_size
        mine = self.shares[distributed.rank()]
        for number in range(-(-size // each)):
            draw = self.sampler.draw(f"prefill {number}", mine, only="xlco")
            for batch in self._as_often(micro_batches(draw, self.config.batches.micro_batch_size), by_shard=False):
                self._make_keys(batch.to(self.device))
                if batch.idle:
                    self.new_keys.pop()
            self._enqueue(self.config.contrast.start_step, limit=size - number * each)
        self.queue.pointer.zero_()
        logger.info("filled the queue with %d keys", size)

    def batches(self, step: int, skipped: int = 0) -> Sequence[PackedBatch]:
        batches, contrast = self.config.batches, self.config.contrast
        mine = self.shares[distributed.rank()]
        only = "lm" if step < contrast.start_step else ""
        # Dropout is drawn for each micro-batch, so these must not depend on which worker has which virtual shard.
        parts = [range(shard, shard + 1) for shard in mine] if self.config.model.dropout else [mine]
        found = [
            replace(batch, rng_key=(step, part.start, number), flops=self._flops(batch))
            for part in parts
            for number, batch in enumerate(
                micro_batches(
                    self.sampler.draw(step + skipped, part, only), batches.micro_batch_size, contrast.symmetric
                )
            )
        ]
        found = self._as_often(found, by_shard=self.config.model.dropout > 0)
        if self.device.type == "cpu":
            return found
        return [batch.aligned(min(ALIGNED, self.module.encoder.size.longest)) for batch in found]

    def _as_often(self, found: list[PackedBatch], by_shard: bool) -> list[PackedBatch]:
        """Micro-batches of this worker's virtual shards, cut `by_shard` or together; where the network is sharded as
        many as the worker with most has: all gather each part, or none, so who has done its part repeats a batch."""
        if not self.config.model.sharded:
            return found
        samples, size = self.sampler.per_shard, self.config.batches.micro_batch_size
        counts = [
            len(share) * math.ceil(samples / size) if by_shard else math.ceil(len(share) * samples / size)
            for share in self.shares
        ]
        return found + [replace(found[0], idle=True)] * (max(counts) - len(found))

    def kind_of(self, step: int, skipped: int = 0) -> str:  # noqa: ARG002
        return "" if step >= self.config.contrast.start_step else "before contrast"

    def _flops(self, batch: PackedBatch) -> float:
        contrast, count = self.config.contrast, batch.lm_sequences
        lm, views, targets = batch.lengths[:count], batch.lengths[count:], len(batch.target_rows)
        size = self.module.encoder.size
        return must_do_flops(size, lm, targets, views, batch.key_lengths, contrast.layer, contrast.queue_size)

    def losses(self, batch: PackedBatch, scales: Mapping[str, float]) -> tuple[Tensor, dict[str, Tensor]]:
        if batch.idle:
            made = len(self.new_keys)
            loss, _ = self.losses(replace(batch, idle=False), dict.fromkeys(scales, 0.0))
            del self.new_keys[made:]
            return loss, {}
        if self.config.contrast.enqueue == "micro_batch" and self.new_keys:
            self._enqueue(batch.rng_key[0])
        batch = batch.to(self.device)
        by_group = torch.zeros(2, len(self.sampler.groups), dtype=torch.double, device=self.device)
        loss, sums = torch.zeros((), device=self.device), {"by_group": by_group}
        seed_dropout(self.config.seed, *batch.rng_key)
        with autocast(self.device, self.config.model.precision):
            outputs = self.module(batch, self._scale(batch, scales))
        if outputs.losses is not None:
            count = batch.mlm_targets
            found = {"mlm": outputs.losses[:count].sum(), "tlm": outputs.losses[count:].sum()}
            sums |= {name: value for name, value in found.items() if name in self.weights.by_name}
            loss = loss + outputs.loss
            _add_by_group(by_group, batch.target_groups, outputs.losses)
        if outputs.queries is not None:
            contrasted, more = self._contrast(batch, outputs.queries, by_group)
            loss = loss + contrasted * scales["xlco"]
            sums |= more
        return loss, sums

    def _scale(self, batch: PackedBatch, scales: Mapping[str, float]) -> Tensor:
        """(N,) factor of each target in the loss: MLM's first, then TLM's."""
        kind = self.module.projection.dtype
        scale = torch.full((len(batch.target_ids),), scales.get("tlm", 0.0), dtype=kind, device=self.device)
        scale[: batch.mlm_targets] = scales.get("mlm", 0.0)
        return scale

    def _contrast(self, batch: PackedBatch, queries: Tensor, by_group: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The summed contrast loss with gradient, and its sums without."""
        contrast = self.config.contrast
        keys, (negatives, sentence_ids) = self._make_keys(batch), (self.queue.rows, self.queue.sentence_ids)
        if contrast.in_batch_negatives:
            negatives, sentence_ids = torch.cat([negatives, keys]), torch.cat([sentence_ids, batch.sentence_ids])
        excluded = self._no_negatives(batch.sentence_ids, sentence_ids)
        logits = xlco_logits(queries, keys, negatives, contrast.temperature, excluded)
        losses = xlco_losses(logits)
        share = batch.items / len(losses)  # 1, or one half where each item is contrasted from both sides
        with torch.no_grad():
            _add_by_group(by_group, batch.view_groups, losses.detach(), share)
            every = -(-len(negatives) // STATISTICS_ROWS)
            sample = logits[:, 1::every]  # enough for a mean and a spread
            sample = sample.masked_fill(sample.isinf(), torch.nan)
            sums = {
                "xlco": losses.sum() * share,
                "hits": xlco_hits(logits) * share,
                "positive": logits[:, 0].sum() * share,
                "negative": sample.nanmean(dim=1).nan_to_num().sum() * share,
                "negative_square": sample.square().nanmean(dim=1).nan_to_num().sum() * share,
                "key_check": keys.sum() * 0.0,  # not finite if any key is not
            }
        return losses.sum() * share, sums

    def _no_negatives(self, mine: Tensor, theirs: Tensor) -> Tensor | None:
        """(B, K) true where a key is no negative: it shares a sentence, or it is of the item itself."""
        contrast = self.config.contrast
        if contrast.false_negatives == "off" and not contrast.in_batch_negatives:
            return None
        if contrast.false_negatives == "off":
            excluded = torch.zeros(len(mine), len(theirs), dtype=torch.bool, device=mine.device)
        else:
            compare = share_a_sentence if contrast.false_negatives == "overlap" else have_equal_sentences
            excluded = compare(mine, theirs)
        if contrast.in_batch_negatives:
            own = torch.arange(len(mine), device=mine.device)
            excluded[own, len(self.queue.rows) + own] = True
            if contrast.symmetric:  # and the query's own sentence, which is a key of the other half
                excluded[own, len(self.queue.rows) + (own + len(mine) // 2) % len(mine)] = True
        return excluded

    def _make_keys(self, batch: PackedBatch) -> Tensor:
        with autocast(self.device, self.config.model.precision):
            keys = self.key_encoder(batch.key_ids, batch.key_positions, batch.key_lengths)
        keys = keys[: len(batch.sentence_ids)]  # one of padding may come last
        self.new_keys.append((keys[: batch.items], batch.sentence_ids[: batch.items]))
        return keys

    def statistics(self, sums: Mapping[str, Any], counts: Mapping[str, float]) -> dict[str, float]:
        total, count = sums["by_group"]
        figures = {f"loss_{name}": float(total[i] / count[i]) for i, name in enumerate(self.sampler.groups) if count[i]}
        if "hits" not in sums:
            return figures
        n = counts["xlco"]
        mean = sums["negative"] / n
        return figures | {
            "queue/age": self.queue.age,
            "xlco/accuracy": sums["hits"] / n,
            "xlco/positive_logit": sums["positive"] / n,
            "xlco/negative_logit": mean,
            "xlco/negative_spread": max(0.0, sums["negative_square"] / n - mean**2) ** 0.5,
        }

    def after_step(self, step: int, good: bool = True) -> None:
        """Move the key encoder, then enqueue the step's keys in the order of the global batch; neither if bad."""
        contrast = self.config.contrast
        if not self.contrasting:
            return
        if good and step > contrast.start_step:
            self.key_encoder.follow(momentum_at(contrast, step - 1, self.config.optimization.steps))
            self._enqueue(step)
        self.new_keys.clear()
        if step == contrast.start_step:  # contrast begins
            self.key_encoder.follow(0.0)
            self._fill_queue()

    def _enqueue(self, step: int, limit: int | None = None) -> None:
        keys, sentence_ids = (torch.cat(parts) for parts in zip(*self.new_keys, strict=True))
        counts = [len(share) * self.sampler.per_shard for share in self.shares]
        if len(set(counts)) == 1:  # alike, and of a micro-batch perhaps
            counts = []
        keys, sentence_ids = (distributed.gather_rows(rows, counts) for rows in (keys, sentence_ids))
        self.queue.push(keys[:limit], sentence_ids[:limit], step)
        self.new_keys.clear()

    def state(self) -> dict[str, Tensor]:
        if not self.contrasting:
            return {}
        keys = {f"key_encoder/{name}": value for name, value in self.key_encoder.named_parameters()}
        return keys | {f"queue/{name}": value for name, value in self.queue.state().items()}


def _add_by_group(by_group: Tensor, groups: Tensor, losses: Tensor, share: float = 1.0) -> None:
    """Add losses (N,), and how many there are, to the groups (N,) they belong to: (2, groups)."""
    for row, values in zip(by_group, (losses, torch.ones_like(losses)), strict=True):
        row.index_add_(0, groups, values.to(row.dtype) * share)

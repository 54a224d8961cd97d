"""The learner of XLM and BERT: nothing but weights and Adam's moments is remembered between steps."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infoxlm_core.config import PretrainingConfig
from infoxlm_core.model.attention import choose_flash
from infoxlm_core.model.encoder import Encoder, EncoderSize, compiler_for
from infoxlm_core.model.flops import must_do_flops
from infoxlm_core.model.linear_cross_entropy import linear_cross_entropy
from infoxlm_core.systems.text_batches import TextBatch, TextSampler, micro_batches
from infoxlm_core.training import distributed
from infoxlm_core.training.learner import Learner, LossWeights, autocast, seed_dropout, set_precision

Loss = Callable[[Tensor, Tensor], Tensor]  # logits and answers of a question -> their summed loss


class TextNetwork(nn.Module):
    """An encoder; subclasses have heads."""

    compiler = ""  # as in `Encoder`

    def __init__(self, size: EncoderSize, dropout: float = 0.0) -> None:
        super().__init__()
        self.encoder = Encoder(size, dropout)

    def states(self, batch: TextBatch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """(N, d) at the batch's rows, which times the word embeddings and plus the bias (V,) are logits; and by
        objective the (sequences, …) logits of each question that is asked once a sequence."""
        raise NotImplementedError

    def logits(self, batch: TextBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """(N, V) logits at the batch's rows, and those of the questions."""
        states, bias, by_sequence = self.states(batch)
        return F.linear(states, self.encoder.token_embedding.weight, bias), by_sequence

    def forward(
        self, batch: TextBatch, scale: Tensor | None = None
    ) -> tuple[Tensor | None, Tensor | None, dict[str, Tensor]]:
        """The loss of the rows times `scale` (N,), to differentiate, and their (N,) losses in nats, without (N, V)
        logits (None, if there is no scale); and the logits of the questions."""
        states, bias, by_sequence = self.states(batch)
        if scale is None:
            return None, None, by_sequence
        table = self.encoder.token_embedding.weight
        return *linear_cross_entropy(states, table, bias, batch.answers, scale, compiler=self.compiler), by_sequence


class TextLearner(Learner):
    """Mean losses of the objectives that are on, over one packed forward pass a micro-batch."""

    module: TextNetwork

    def __init__(
        self, config: PretrainingConfig, model: TextNetwork, sampler: TextSampler, losses: Mapping[str, Loss]
    ) -> None:
        self.config, self.module, self.sampler, self.loss_of = config, model, sampler, losses
        self.weights = LossWeights(config.objectives.weights(), config.objectives.weighting)
        self.device = distributed.device()
        choose_flash(self.device)
        model.encoder.recompute = config.model.recompute
        if config.model.compiled:
            model.encoder.compiler = model.compiler = compiler_for(self.device, config.model.dropout)
        set_precision(model.encoder, config.model, self.device)

    def batches(self, step: int, skipped: int = 0) -> Sequence[TextBatch]:
        """Virtual shard by virtual shard, so that dropout does not depend on which worker has which."""
        most = self.config.batches.micro_batch_size
        shards = distributed.my_share(self.config.batches.virtual_shards)
        drawn = [(shard, self.sampler.draw(step + skipped, shard)) for shard in shards]
        batches = [b for shard, samples in drawn for b in micro_batches(samples, most, step, shard)]
        size = self.module.encoder.size
        return [replace(batch, flops=must_do_flops(size, batch.lengths, len(batch.rows))) for batch in batches]

    def kind_of(self, step: int, skipped: int = 0) -> str:
        return self.sampler.kind_of(step + skipped)

    def losses(self, batch: TextBatch, scales: Mapping[str, float]) -> tuple[Tensor, dict[str, Tensor]]:
        batch = batch.to(self.device)
        seed_dropout(self.config.seed, *batch.rng_key)
        scale = None
        if batch.objective in self.weights.by_name:
            kind = self.module.encoder.token_embedding.weight.dtype
            scale = torch.full((len(batch.answers),), scales[batch.objective], dtype=kind, device=self.device)
        with autocast(self.device, self.config.model.precision):
            loss, losses, by_sequence = self.module(batch, scale)
        on = {
            name: (by_sequence[name], labels) for name, labels in batch.labels.items() if name in self.weights.by_name
        }
        found = {name: self.loss_of[name](*question) for name, question in on.items()}
        parts = [] if loss is None else [loss]
        total = torch.stack([*parts, *(scales[name] * value for name, value in found.items())]).sum()
        sums = {name: value.detach() for name, value in found.items()}
        if losses is not None:
            sums[batch.objective] = losses.sum()
        for name in batch.labels.keys() & on.keys():
            answers, labels = on[name]
            sums[f"{name} hits"] = (answers.detach().argmax(dim=1) == labels).sum()
        return total, sums

    def statistics(self, sums: Mapping[str, Any], counts: Mapping[str, float]) -> dict[str, float]:
        hits = {name.removesuffix(" hits"): value for name, value in sums.items() if name.endswith(" hits")}
        return {f"{name}/accuracy": value / counts[name] for name, value in hits.items()}

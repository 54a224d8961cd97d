"""The learner of XLM and BERT. Its only state is the weights and Adam's moments."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from infoxlm_core.config import PretrainingConfig
from infoxlm_core.model.encoder import Encoder, EncoderSize
from infoxlm_core.model.flops import count_step_flops
from infoxlm_core.model.linear_cross_entropy import linear_cross_entropy
from infoxlm_core.model.objectives import cross_entropy
from infoxlm_core.systems.text_batches import TextBatch, TextSampler, micro_batches
from infoxlm_core.training import distributed
from infoxlm_core.training.learner import Learner, LossWeights, autocast, prepare_encoder, seed_dropout


class TargetStates(NamedTuple):
    """The inputs of the losses.

    A target's logits are its hidden state times the word embeddings, plus the bias.
    """

    hidden: Tensor  # (N, d) hidden states of the targets
    bias: Tensor  # (V,)
    sentence_logits: dict[str, Tensor]  # sentence objective -> (sequences, …)


class TextLosses(NamedTuple):
    """The losses of N targets, and the logits of sentence objectives."""

    scaled_loss: Tensor | None  # scaled sum of the losses, with gradient; None: not computed
    target_losses: Tensor | None  # (N,) in nats, without gradient
    sentence_logits: dict[str, Tensor]


class TextNetwork(nn.Module):
    """The base class of networks: an encoder, to which subclasses add heads."""

    compiler = ""  # name of the compiler for the loss, as in `Encoder`

    def __init__(self, size: EncoderSize, dropout: float = 0.0) -> None:
        super().__init__()
        self.encoder = Encoder(size, dropout)

    def compute_target_states(self, batch: TextBatch) -> TargetStates:
        """Compute the targets' hidden states and the logits of sentence objectives."""
        raise NotImplementedError

    def forward(self, batch: TextBatch, target_scales: Tensor | None = None) -> TextLosses:
        """Compute the losses of the targets and the logits of the sentence objectives.

        Args:
            batch: a micro-batch on the network's device.
            target_scales: each target's factor in the loss (N,); None: compute only the logits.
        """
        hidden, bias, sentence_logits = self.compute_target_states(batch)
        if target_scales is None:
            return TextLosses(None, None, sentence_logits)
        word_embeddings = self.encoder.token_embedding.weight  # (V, d)
        # This loss never stores the logits of all targets (N, V), because they would not fit into memory.
        scaled_loss, target_losses = linear_cross_entropy(
            hidden, word_embeddings, bias, batch.target_ids, target_scales, compiler=self.compiler
        )
        return TextLosses(scaled_loss, target_losses, sentence_logits)


class TextLearner(Learner):
    """Trains a `TextNetwork`. One packed forward pass per micro-batch serves all objectives."""

    module: TextNetwork

    def __init__(self, config: PretrainingConfig, model: TextNetwork, sampler: TextSampler) -> None:
        self.config = config
        self.module = model
        self.sampler = sampler
        self.weights = LossWeights(config.objectives.weights(), config.objectives.weighting)
        self.device = distributed.device()
        model.compiler = prepare_encoder(model.encoder, config.model, self.device)

    def batches(self, step: int, skipped: int = 0) -> Sequence[TextBatch]:
        """Return this worker's micro-batches of a step, with the samples of step `step + skipped`."""
        size = self.module.encoder.size
        batches = []
        # A micro-batch never mixes virtual shards, so that dropout does not depend on the number of workers.
        for shard in distributed.my_share(self.config.batches.virtual_shards):
            samples = self.sampler.draw(step + skipped, shard)
            for batch in micro_batches(samples, self.config.batches.micro_batch_size, step, shard):
                flops = count_step_flops(size, batch.lengths, len(batch.target_rows))
                batches.append(replace(batch, flops=flops))
        return batches

    def kind_of(self, step: int, skipped: int = 0) -> str:
        return self.sampler.kind_of(step + skipped)

    def losses(self, batch: TextBatch, scales: Mapping[str, float]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the scaled loss of all objectives, and the unscaled sums for `statistics`."""
        batch = batch.to(self.device)
        seed_dropout(self.config.seed, *batch.rng_key)
        with autocast(self.device, self.config.model.precision):
            outputs = self.module(batch, self._scale_targets(batch, scales))
        scaled_losses = []
        sums: dict[str, Tensor] = {}
        if outputs.scaled_loss is not None:
            scaled_losses.append(outputs.scaled_loss)
            sums[batch.objective] = outputs.target_losses.sum()
        for name, labels in batch.labels.items():
            if name not in self.weights.by_name:  # BERT's samples have labels for NSP even if NSP is disabled
                continue
            logits = outputs.sentence_logits[name]  # (sequences, classes)
            sentence_loss = cross_entropy(logits, labels)
            scaled_losses.append(scales[name] * sentence_loss)
            sums[name] = sentence_loss.detach()
            sums[f"{name} hits"] = (logits.detach().argmax(dim=1) == labels).sum()
        return torch.stack(scaled_losses).sum(), sums

    def _scale_targets(self, batch: TextBatch, scales: Mapping[str, float]) -> Tensor | None:
        """Return each target's factor in the loss (N,), or None if the batch's token-level objective is disabled."""
        if batch.objective not in self.weights.by_name:
            return None
        dtype = self.module.encoder.token_embedding.weight.dtype
        return torch.full((len(batch.target_ids),), scales[batch.objective], dtype=dtype, device=self.device)

    def statistics(self, sums: Mapping[str, Any], counts: Mapping[str, float]) -> dict[str, float]:
        """Return the accuracy of each sentence objective."""
        accuracies = {}
        for objective in self.weights.by_name:
            hits_name = f"{objective} hits"
            if hits_name in sums:
                accuracies[f"{objective}/accuracy"] = sums[hits_name] / counts[objective]
        return accuracies

"""Our side of every comparison: the learner and the step of the product, on batches that are handed to it."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.speed.inputs import SEED, batch, perturb
from infoxlm_core.config import OptimizationConfig, PretrainingConfig
from infoxlm_core.data.batches import PackedBatch
from infoxlm_core.data.shards import Pairs, Shards, Table
from infoxlm_core.data.vocabulary import EOS, FIRST_POSITION
from infoxlm_core.model.encoder import EncoderSize, initialise
from infoxlm_core.model.heads import InfoXLM
from infoxlm_core.systems.infoxlm.learner import InfoXLMLearner
from infoxlm_core.training.learner import Learner
from infoxlm_core.training.optimizer import make_adamw
from infoxlm_core.training.state import Progress
from infoxlm_core.training.step import train_step


def make_model(config: PretrainingConfig, vocabulary: int, noise: bool = True) -> InfoXLM:
    """The query encoder that a run with this config would start from, with noise."""
    size, contrast = config.model, config.contrast
    model = InfoXLM(
        EncoderSize(vocabulary, size.layers, size.hidden, size.ffn, size.heads, size.max_tokens + FIRST_POSITION),
        contrast.layer, contrast.pooling, contrast.normalise, size.dropout,
    )  # fmt: skip
    initialise(model, config.seed)
    if noise:
        perturb(model, SEED)
    return model


class Given(InfoXLMLearner):
    """The learner of the product; its batches do not come from shards."""

    def __init__(self, config: PretrainingConfig, model: InfoXLM) -> None:
        super().__init__(config, model, _two_pairs(model.encoder.size.vocabulary))
        if self.contrasting:
            self._make_contrast_hard()
        self.progress = Progress()
        self.optimizer = make_adamw(model.parameters(), config.optimization)

    def _make_contrast_hard(self) -> None:
        """Other noise for the key encoder, and near copies of real keys as negatives.

        With equal weights on both sides, or a queue of random numbers, the loss is zero and equality proves nothing.
        """
        generator = torch.Generator().manual_seed(SEED)
        perturb(self.key_encoder, SEED + 1)
        views = batch("ragged", self.module.encoder.size.vocabulary, 999, ("xlco",))
        views = views.to(self.device)
        keys = self.key_encoder(views.key_ids, views.key_positions, views.key_lengths)
        rows, sentence_ids = self.queue.rows, self.queue.sentence_ids
        rows.copy_(torch.randn(rows.shape, generator=generator) * 0.1)
        rows += keys[torch.arange(len(rows), device=rows.device) % len(keys)]
        sentence_ids.copy_(torch.empty(sentence_ids.shape, dtype=torch.long).random_(generator=generator))

    def mean_loss(self, given: PackedBatch) -> Tensor:
        """Sum over the objectives of their mean losses, to differentiate."""
        loss, _ = self.losses(given, {name: 1.0 / given.counts[name] for name in self.weights.by_name})
        self.new_keys.clear()
        return loss

    def take_step(self, given: PackedBatch) -> None:
        """A whole optimizer step: losses, backward, clipping, AdamW, key encoder, queue."""
        train_step(self, self.optimizer, self.config.optimization, self.progress, [given])


def steps(learner: Learner, config: OptimizationConfig, count: int) -> Callable[[int], float]:
    """What does a round: so many optimizer steps, on the batches that the learner makes; it returns their tokens."""
    optimizer, progress = make_adamw(learner.module.parameters(), config), Progress()

    def once(number: int) -> float:
        tokens = 0.0
        for _ in range(count):
            batches = learner.batches(progress.step)
            tokens += train_step(learner, optimizer, config, progress, batches)[0]["tokens"]
        return tokens

    return once


def _two_pairs(vocabulary: int) -> Shards:
    """The least text from which a learner can be made."""
    table = Table(np.full(4, EOS, np.uint32), np.array([0, 2, 4]))
    pairs = Pairs("none", table, table, np.arange(2))
    facts = {"facts": {"vocabulary_size": vocabulary}}
    return Shards(mono={"en": [table]}, pairs={"en-de": [pairs]}, held_out={}, manifest=facts, directory=Path())

"""Our variant of every comparison: the learner and the step of the product, on given batches."""

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from benchmarks.speed import inputs
from benchmarks.speed.inputs import SEED, perturb
from infoxlm_core import manifests
from infoxlm_core.config import OptimizationConfig, PretrainingConfig
from infoxlm_core.data.batches import PackedBatch
from infoxlm_core.data.shards import open_shards
from infoxlm_core.data.vocabulary import EOS
from infoxlm_core.data.writing import BLOCK_TOKENS, make_column, write_table
from infoxlm_core.model.encoder import EncoderSize, initialise
from infoxlm_core.model.heads import InfoXLM
from infoxlm_core.systems.infoxlm.learner import InfoXLMLearner
from infoxlm_core.training.learner import Learner
from infoxlm_core.training.optimizer import make_adamw
from infoxlm_core.training.state import Progress
from infoxlm_core.training.step import train_step


def make_model(config: PretrainingConfig, vocabulary: int, noise: bool = True) -> InfoXLM:
    """Return the query encoder with which a run of this config would start, plus noise."""
    model = InfoXLM.from_config(config, EncoderSize.from_config(config.model, vocabulary))
    initialise(model, config.seed)
    if noise:
        perturb(model, SEED)
    return model


class FixedBatchLearner(InfoXLMLearner):
    """The learner of the product, on batches that do not come from shards."""

    def __init__(self, config: PretrainingConfig, model: InfoXLM) -> None:
        with TemporaryDirectory() as folder:
            shards = open_shards(write_two_pairs(Path(folder), model.encoder.size.vocabulary))
            super().__init__(config, model, shards)
        if self.has_contrast:
            self.make_contrast_hard()
        self.progress = Progress()
        self.optimizer = make_adamw(model.parameters(), config.optimization)

    def make_contrast_hard(self) -> None:
        """Add other noise to the key encoder, and fill the queue with near copies of real keys.

        With equal weights on both sides, or with a queue of random numbers, the loss would be zero.
        """
        generator = torch.Generator().manual_seed(SEED)
        perturb(self.xlco.key_encoder, SEED + 1)
        views = inputs.batch("ragged", self.module.encoder.size.vocabulary, 999, ("xlco",))
        views = views.to(self.device)
        keys = self.xlco.key_encoder(views.key_ids, views.key_positions, views.key_lengths)
        rows = self.xlco.queue.rows
        rows.copy_(torch.randn(rows.shape, generator=generator) * 0.1)
        rows += keys[torch.arange(len(rows), device=rows.device) % len(keys)]
        sentence_ids = self.xlco.queue.sentence_ids
        sentence_ids.copy_(torch.empty(sentence_ids.shape, dtype=torch.long).random_(generator=generator))

    def mean_loss(self, batch: PackedBatch) -> Tensor:
        """Return the sum of the objectives' mean losses, with gradient."""
        loss, _ = self.losses(batch, {name: 1.0 / batch.counts[name] for name in self.weights.by_name})
        if self.has_contrast:
            self.xlco.new_keys.clear()
        return loss

    def take_step(self, batch: PackedBatch) -> None:
        """Take a whole optimizer step: losses, backward, clipping, AdamW, key encoder, queue."""
        train_step(self, self.optimizer, self.config.optimization, self.progress, [batch])


def steps(learner: Learner, config: OptimizationConfig, count: int) -> Callable[[int], float]:
    """Return a function that takes `count` optimizer steps on the learner's own batches and returns their tokens."""
    optimizer = make_adamw(learner.module.parameters(), config)
    progress = Progress()

    def train(number: int) -> float:
        tokens = 0.0
        for _ in range(count):
            batches = learner.batches(progress.step)
            tokens += train_step(learner, optimizer, config, progress, batches)[0]["tokens"]
        return tokens

    return train


def write_two_pairs(directory: Path, vocabulary: int) -> Path:
    """Write the shards with the least text that a learner accepts, and return their directory."""
    rows = make_column(np.full(4, EOS), [2, 2])
    pairs = pa.table({"source": rows, "target": rows, "sentence_id": np.arange(2, dtype=np.uint64)})
    tables = {
        "mono/en/none": write_table(directory, "mono/en/none", [pa.table({"text": rows})]),
        "pairs/en-de/none": write_table(directory, "pairs/en-de/none", [pairs]),
    }
    manifests.write(
        directory, "shards", {"vocabulary_size": vocabulary, "tables": tables, "block_tokens": BLOCK_TOKENS}
    )
    return directory

"""Our variant in every comparison: the product's learner and training step, on given batches."""

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from benchmarks.speed import inputs
from benchmarks.speed.inputs import SEED, add_noise
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
    """Make the initial query encoder of a pre-training run, by default with noise on its weights."""
    model = InfoXLM.from_config(config, EncoderSize.from_config(config.model, vocabulary))
    initialise(model, config.seed)
    if noise:
        add_noise(model, SEED)
    return model


class FixedBatchLearner(InfoXLMLearner):
    """The product's learner, on batches that do not come from shards."""

    def __init__(self, config: PretrainingConfig, model: InfoXLM) -> None:
        # The base class opens shards, but this learner never draws from them, so they may be deleted.
        with TemporaryDirectory() as directory:
            shards = open_shards(write_two_pairs(Path(directory), model.encoder.size.vocabulary))
            super().__init__(config, model, shards)
        if self.has_contrast:
            self.make_contrast_hard()
        self.progress = Progress()
        self.optimizer = make_adamw(model.parameters(), config.optimization)

    def make_contrast_hard(self) -> None:
        """Add noise to the key encoder, and fill the queue with noisy keys. Otherwise, the contrast loss is zero."""
        generator = torch.Generator().manual_seed(SEED)
        add_noise(self.xlco.key_encoder, SEED + 1)
        views = inputs.make_batch("ragged", self.module.encoder.size.vocabulary, seed=999, objectives=("xlco",))
        views = views.to(self.device)
        keys = self.xlco.key_encoder(views.key_ids, views.key_positions, views.key_lengths)
        rows = self.xlco.queue.rows
        rows.copy_(torch.randn(rows.shape, generator=generator) * 0.1)  # repeated keys differ by this noise
        rows += keys[torch.arange(len(rows), device=rows.device) % len(keys)]
        sentence_ids = self.xlco.queue.sentence_ids
        sentence_ids.copy_(torch.empty(sentence_ids.shape, dtype=torch.long).random_(generator=generator))

    def mean_loss(self, batch: PackedBatch) -> Tensor:
        """Return the sum of the objectives' mean losses, ready for a backward pass."""
        loss, _ = self.losses(batch, {name: 1.0 / batch.counts[name] for name in self.weights.by_name})
        if self.has_contrast:
            self.xlco.new_keys.clear()  # `take_step` would add them to the queue
        return loss

    def take_step(self, batch: PackedBatch) -> None:
        """Take an optimizer step: losses, backward pass, clipping, AdamW, key encoder, queue."""
        train_step(self, self.optimizer, self.config.optimization, self.progress, [batch])


class TrainingRounds:
    """Rounds of optimizer steps on batches drawn by the learner."""

    def __init__(self, learner: Learner, config: OptimizationConfig, steps_per_round: int) -> None:
        self.learner = learner
        self.config = config
        self.steps_per_round = steps_per_round
        self.optimizer = make_adamw(learner.module.parameters(), config)
        self.progress = Progress()

    def run(self, number: int) -> float:
        """Take the steps of a round and return their number of tokens. Each round continues the previous round."""
        tokens = 0.0
        for _ in range(self.steps_per_round):
            batches = self.learner.batches(self.progress.step)
            metrics, _ = train_step(self.learner, self.optimizer, self.config, self.progress, batches)
            tokens += metrics["tokens"]
        return tokens


def write_two_pairs(directory: Path, vocabulary: int) -> Path:
    """Write shards with two pairs of empty sentences, the minimum for a learner. Return their directory."""
    rows = make_column(np.full(4, EOS), [2, 2])
    pairs = pa.table({"source": rows, "target": rows, "sentence_id": np.arange(2, dtype=np.uint64)})
    tables = {
        "mono/en/none": write_table(directory, "mono/en/none", [pa.table({"text": rows})]),
        "pairs/en-de/none": write_table(directory, "pairs/en-de/none", [pairs]),
    }
    facts = {"vocabulary_size": vocabulary, "tables": tables, "block_tokens": BLOCK_TOKENS}
    manifests.write(directory, "shards", facts)
    return directory

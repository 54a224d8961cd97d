"""The learner for fine-tuning an encoder on any task, and the task's examples."""

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from infoxlm_core.config import RecipeConfig
from infoxlm_core.data.examples import Examples
from infoxlm_core.data.sampling import make_rng
from infoxlm_core.errors import ConfigError
from infoxlm_core.model import devices
from infoxlm_core.model.encoder import choose_compiler
from infoxlm_core.model.padded import Padded
from infoxlm_core.model.task_head import Head
from infoxlm_core.model.task_models import TaskModel
from infoxlm_core.training import distributed
from infoxlm_core.training.finetuning.best_checkpoints import BestCheckpoints, name_metrics
from infoxlm_core.training.finetuning.selection import DevScores
from infoxlm_core.training.learner import Learner, LossWeights, autocast, seed_dropout

logger = logging.getLogger(__name__)
MIN_COMPILED_STEPS = 1000  # minimum number of steps that repays GPU compilation, which takes one or two minutes


@dataclass(frozen=True)
class Training:
    """A task's training examples and targets, and the function that scores its development sets."""

    head: Head
    examples: Examples  # N training examples
    targets: np.ndarray  # (N, …) targets for the head's loss
    labels: tuple[str, ...] = ()  # label names by label number
    source_language: str = "en"  # language of the training text
    dev_languages: tuple[str, ...] = ()  # languages of the development sets
    score_dev: Callable[[TaskModel], dict[str, float]] | None = None
    """Function that scores a model on the development sets. Returns scores (0 to 1) by language."""
    head_dropout: float = 0.0
    write_extra_files: Callable[[Path], None] = lambda _: None  # writes further files into the model directory


@dataclass(frozen=True)
class Batch:
    """A micro-batch of N packed examples."""

    ids: Tensor  # (T,)
    types: Tensor  # (T,)
    lengths: tuple[int, ...]
    targets: Tensor  # (N, …), as in `Training`
    dropout_masks: Tensor | None  # (N, 2, d) bool; False where the head drops a unit; None: the model draws dropout
    rng_key: tuple[int, int]  # dropout seed: step, index of the first example in the global batch
    counts: dict[str, int]  # numbers of targets and tokens


class TaskLearner(Learner):
    """Trains on every example once per epoch, in an order that depends on the seed and the epoch."""

    module: TaskModel

    def __init__(
        self, config: RecipeConfig, module: TaskModel, task: Training, steps: int, best_checkpoints: BestCheckpoints
    ) -> None:
        self.config = config
        self.module = module
        self.task = task
        self.steps = steps
        self.best_checkpoints = best_checkpoints
        self.weights = LossWeights({task.head.name: 1.0})
        if steps >= MIN_COMPILED_STEPS and not isinstance(module, Padded):
            module.encoder.compiler = choose_compiler(distributed.device(), config.dropout)
        # Cache two orders, because a step may span two epochs, and shuffling millions of examples takes a second.
        draw_order = functools.partial(_draw_order, config.seed, len(task.examples))
        self.order = functools.lru_cache(2)(draw_order)

    def batches(self, step: int, skipped: int = 0) -> Sequence[Batch]:
        """Return this worker's micro-batches of a step, with the examples of step `step + skipped`."""
        batch_size = self.config.batch_size
        num_workers = distributed.world_size()
        if num_workers > batch_size:
            raise ConfigError(f"{num_workers} workers must not exceed finetuning.batch_size ({batch_size})")
        # This worker's positions in the global batch. The shares of workers differ by at most one example.
        positions = np.array_split(np.arange(batch_size), num_workers)[distributed.rank()]
        rows = self._find_rows((step + skipped) * batch_size + positions)
        dropout_masks = self._draw_dropout_masks(step, positions)
        batches = []
        for start in range(0, len(rows), self.config.micro_batch_size):
            micro_batch = slice(start, start + self.config.micro_batch_size)
            micro_batch_masks = None if dropout_masks is None else dropout_masks[micro_batch]
            batches.append(self._pack(rows[micro_batch], micro_batch_masks, (step, int(positions[start]))))
        return batches

    def _find_rows(self, numbers: np.ndarray) -> np.ndarray:
        """Return the rows of examples, given their numbers since the start of training."""
        epochs, indices_in_epoch = np.divmod(numbers, len(self.task.examples))
        rows = np.empty(len(numbers), np.int64)
        for epoch in np.unique(epochs).tolist():  # several if an epoch ends within the batch
            is_in_epoch = epochs == epoch
            rows[is_in_epoch] = self.order(epoch)[indices_in_epoch[is_in_epoch]]
        return rows

    def _draw_dropout_masks(self, step: int, positions: np.ndarray) -> Tensor | None:
        """Draw the head's dropout for the global batch, so that it does not depend on the number of workers."""
        if isinstance(self.module, Padded) or not self.module.dropout_mask_count:
            return None  # the model draws its own dropout
        shape = (self.config.batch_size, self.module.dropout_mask_count, self.module.encoder.size.hidden)
        uniform = make_rng(self.config.seed, "dropout", step).random(shape)
        return torch.from_numpy(uniform[positions] >= self.module.dropout)

    def _pack(self, rows: np.ndarray, dropout_masks: Tensor | None, rng_key: tuple[int, int]) -> Batch:
        """Pack the examples in the given rows into a micro-batch."""
        examples = self.task.examples.take(rows)
        targets = torch.from_numpy(self.task.targets[rows].astype(np.int64))
        return Batch(
            ids=torch.from_numpy(examples.ids),
            types=torch.from_numpy(examples.types),
            lengths=tuple(examples.lengths.tolist()),
            targets=targets,
            dropout_masks=dropout_masks,
            rng_key=rng_key,
            counts={self.task.head.name: self.task.head.count_losses(targets), "tokens": len(examples.ids)},
        )

    def losses(self, batch: Batch, scales: Mapping[str, float]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return a micro-batch's scaled loss, and the unscaled sums for `statistics`."""
        device = distributed.device()
        head = self.task.head
        ids = devices.send(batch.ids, device)
        types = devices.send(batch.types, device)
        targets = devices.send(batch.targets, device)
        dropout_masks = None if batch.dropout_masks is None else devices.send(batch.dropout_masks, device)
        seed_dropout(self.config.seed, *batch.rng_key)
        with autocast(device):
            logits = self.module(ids, types, batch.lengths, dropout_masks)
        loss, hits = head.loss(logits, targets, batch.lengths)
        return loss * scales[head.name], {head.name: loss.detach(), "hits": hits.sum()}

    def statistics(self, sums: Mapping[str, Any], counts: Mapping[str, float]) -> dict[str, float]:
        return {"train/accuracy": sums["hits"] / counts[self.task.head.name]}

    def observe(self, step: int) -> dict[str, float]:
        """Score the development sets if an evaluation is due after a step."""
        score_dev = self.task.score_dev
        is_due = step % self.config.selection.every == 0 or step == self.steps
        if score_dev is None or not is_due:
            return {}
        return distributed.on_first(lambda: self._evaluate(step, score_dev)) or {}

    def _evaluate(self, step: int, score_dev: Callable[[TaskModel], dict[str, float]]) -> dict[str, float]:
        """Score the development sets, save the weights if they are the best so far, and return the metrics."""
        scores = DevScores(step, score_dev(self.module))
        logger.info("step %d: %.4f on the development sets", step, scores.mean)
        self.best_checkpoints.update(self.module, [*self.best_checkpoints.read_evaluations(), scores])
        return name_metrics(scores)


def _draw_order(seed: int, num_examples: int, epoch: int) -> np.ndarray:
    """Return the order of the training examples in an epoch."""
    return make_rng(seed, "epoch", epoch).permutation(num_examples)

"""The learner of a task model: what the training loop asks to fine-tune an encoder, whatever the task."""

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from infoxlm_core.config import RecipeConfig
from infoxlm_core.data.examples import Examples
from infoxlm_core.data.sampling import generator
from infoxlm_core.errors import ConfigError
from infoxlm_core.model.objectives import full_precision, span_losses
from infoxlm_core.model.padded import Kind
from infoxlm_core.model.task_models import Classifier, TaskModel
from infoxlm_core.training import distributed
from infoxlm_core.training.best_checkpoints import Kept, figures
from infoxlm_core.training.learner import Learner, LossWeights, autocast, seed_dropout
from infoxlm_core.training.selection import Look

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Task:
    """What is learned.

    Attributes:
        examples: N training examples.
        targets: (N,) label numbers, or (N, 2) tokens of the example where the answer starts and ends (0, 0: it has
            none).
        labels: names of the labels, of classification.
        source: language of the training text.
        development: languages of the development sets.
        judge: model -> development score of each of them, from 0 to 1; None if there are none.
        leave: writes what must travel with the model into its directory.
    """

    kind: Kind
    examples: Examples
    targets: np.ndarray
    labels: tuple[str, ...] = ()
    source: str = "en"
    development: tuple[str, ...] = ()
    judge: Callable[[TaskModel], dict[str, float]] | None = None
    leave: Callable[[Path], None] = lambda _: None


@dataclass(frozen=True)
class Batch:
    """One micro-batch.

    Attributes:
        ids, types: (T,) of N packed examples.
        targets: (N,) or (N, 2), as in `Task`.
        kept: (N, 2, d) what dropout in the head keeps; None: it has none of its own.
        place: step, and place of the first example in the global batch.
        counts: how many examples and tokens.
    """

    ids: Tensor
    types: Tensor
    lengths: tuple[int, ...]
    targets: Tensor
    kept: Tensor | None
    place: tuple[int, int]
    counts: dict[str, int]


class TaskLearner(Learner):
    """The learner of a task model: every example once an epoch, in an order by (seed, epoch)."""

    module: TaskModel

    def __init__(self, config: RecipeConfig, module: TaskModel, task: Task, steps: int, kept: Kept) -> None:
        self.config, self.module, self.task, self.steps, self.kept = config, module, task, steps, kept
        self.weights = LossWeights({task.kind: 1.0})
        count = len(task.examples)
        # A step may begin in one epoch and end in the next; of millions of examples an order takes a second to draw.
        self.order = functools.lru_cache(2)(lambda epoch: generator(config.seed, "epoch", epoch).permutation(count))

    def batches(self, step: int) -> Sequence[Batch]:
        size, count, workers = self.config.batch_size, len(self.task.examples), distributed.world_size()
        if workers > size:
            raise ConfigError(f"{workers} workers must not exceed finetuning.batch_size ({size})")
        mine = np.array_split(np.arange(size), workers)[distributed.rank()]
        places = step * size + mine
        order = {epoch: self.order(epoch) for epoch in sorted(set((places // count).tolist()))}
        rows = np.array([order[place // count][place % count] for place in places], np.int64)
        kept = self._luck(step, mine)
        parts = [slice(i, i + self.config.micro_batch_size) for i in range(0, len(rows), self.config.micro_batch_size)]
        return [
            self._pack(rows[part], None if kept is None else kept[part], (step, int(mine[part][0]))) for part in parts
        ]

    def _luck(self, step: int, mine: np.ndarray) -> Tensor | None:
        """What dropout in the head keeps: drawn for the whole batch on every worker, whoever has which example."""
        if not isinstance(self.module, Classifier):
            return None
        shape = (self.config.batch_size, 2, self.module.encoder.size.hidden)
        luck = generator(self.config.seed, "dropout", step).random(shape)
        return torch.from_numpy(luck[mine] >= self.module.dropout)

    def _pack(self, rows: np.ndarray, kept: Tensor | None, place: tuple[int, int]) -> Batch:
        found = self.task.examples.take(rows)
        targets = torch.from_numpy(self.task.targets[rows].astype(np.int64))
        lengths = tuple(found.lengths.tolist())
        counts = {self.task.kind: len(targets), "tokens": len(found.ids)}
        return Batch(torch.from_numpy(found.ids), torch.from_numpy(found.types), lengths, targets, kept, place, counts)

    def losses(self, batch: Batch, scales: Mapping[str, float]) -> tuple[Tensor, dict[str, Tensor]]:
        device, kind = distributed.device(), self.task.kind
        targets, kept = batch.targets.to(device), None if batch.kept is None else batch.kept.to(device)
        # of the encoder: drawn for the examples that are computed together
        seed_dropout(self.config.seed, *batch.place)
        with autocast(device):
            logits = self.module(batch.ids.to(device), batch.types.to(device), batch.lengths, kept)
        if kind == "classification":
            loss = F.cross_entropy(full_precision(logits), targets, reduction="sum")
            hits = logits.argmax(dim=1) == targets  # (N,)
        else:
            padded = pad_sequence(logits.split(batch.lengths), batch_first=True, padding_value=-torch.inf)
            loss = span_losses(padded, targets).sum()
            hits = (padded.argmax(dim=1) == targets).all(dim=1)  # (N,)
        return loss * scales[kind], {kind: loss.detach(), "hits": hits.sum()}

    def statistics(self, sums: Mapping[str, Any], counts: Mapping[str, float]) -> dict[str, float]:
        return {"train/accuracy": sums["hits"] / counts[self.task.kind]}

    def observe(self, step: int) -> dict[str, float]:
        judge = self.task.judge
        if judge is None or (step % self.config.selection.every and step != self.steps):
            return {}
        return distributed.on_first(lambda: self._look(step, judge)) or {}

    def _look(self, step: int, judge: Callable[[TaskModel], dict[str, float]]) -> dict[str, float]:
        """Judge, and keep the weights if they are the best so far."""
        look = Look(step, judge(self.module))
        logger.info("step %d: %.4f on the development sets", step, look.mean)
        self.kept.keep(self.module, [*self.kept.looks(), look])
        return figures(look)

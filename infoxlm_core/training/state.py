"""The state of a training: every tensor the next step depends on, named once, for saving and for restoring alike."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NotRequired

import torch
from torch import Tensor
from typing_extensions import TypedDict

from infoxlm_core import outside
from infoxlm_core.errors import NoValidCheckpoint
from infoxlm_core.training import distributed
from infoxlm_core.training.checkpoints import Checkpoint
from infoxlm_core.training.guard import Guard, Said
from infoxlm_core.training.learner import Learner


@outside.with_more
class _Meta(TypedDict):
    """What a checkpoint says of a training."""

    updates: int
    bad_in_a_row: int
    figures: dict[str, float]
    guard: NotRequired[Said]


@dataclass
class Progress:
    """Where a training is. `updates` counts optimizer updates, fewer than `step` if steps were bad."""

    step: int = 0
    updates: int = 0
    bad_in_a_row: int = 0
    guard: Guard = field(default_factory=Guard)


def named_tensors(learner: Learner, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The live tensors by their names in a checkpoint: weights, Adam's moments, the learner's own."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in learner.module.named_parameters():
        tensors[f"model/{name}"] = parameter
        moments = optimizer.state.get(parameter, {})  # parameters that are not trained have none
        tensors |= {f"adam/{name}/{moment}": value for moment, value in moments.items()}
    return tensors | {f"learner/{name}": value for name, value in learner.state().items()}


def snapshot(
    learner: Learner,
    optimizer: torch.optim.Optimizer,
    progress: Progress,
    figures: Mapping[str, float],
    own: bool = False,
) -> Checkpoint:
    """Everything the next step depends on; and the last figures, for a run that finds itself finished.

    All workers call this: tensors are whole however they are sharded, and on the first worker only. `own`: the next
    step does not change them, where it computes on the CPU, too.
    """
    tensors = distributed.tensors_on_first(named_tensors(learner, optimizer), own)
    meta = {"updates": progress.updates, "bad_in_a_row": progress.bad_in_a_row, "figures": dict(figures)}
    meta["guard"] = progress.guard.state()
    return Checkpoint(progress.step, tensors, meta)


def restore(
    checkpoint: Checkpoint | None, learner: Learner, optimizer: torch.optim.Optimizer, progress: Progress
) -> dict[str, float] | None:
    """Put a checkpoint, which only the first worker needs to have, into the live tensors of all workers.

    Returns the figures of the step after which it was saved, or None without a checkpoint. Raises NoValidCheckpoint if
    it lacks a tensor.
    """
    saved = distributed.from_first((checkpoint.step, checkpoint.meta) if checkpoint else None)
    if saved is None:
        return None
    step, meta = saved
    tensors, found = named_tensors(learner, optimizer), checkpoint.tensors if checkpoint else {}

    def check() -> None:
        remedy = "restore another one, or remove the run's directory to start over"
        outside.check(meta, _Meta, f"meta.json of step {step}", remedy, NoValidCheckpoint)
        if missing := sorted(tensors.keys() - found.keys()):
            raise NoValidCheckpoint(
                f"the checkpoint of step {step} has no {missing[0]}: another version of this program wrote it; "
                "go on with that one, or remove the run's directory to start over"
            )

        for name, tensor in tensors.items():
            if found[name].shape != tensor.shape:
                raise NoValidCheckpoint(f"the checkpoint of step {step}: {name} has another size: {remedy}")

    distributed.on_first(check)
    distributed.copy_from_first(found, tensors)
    progress.step, progress.updates, progress.bad_in_a_row = step, meta["updates"], meta["bad_in_a_row"]
    progress.guard = Guard.of(progress.guard.deviations, meta.get("guard"))
    return meta["figures"]

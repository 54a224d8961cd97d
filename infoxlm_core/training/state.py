"""The state of a training run: every tensor that the next step depends on, under one name for saving and restoring."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from infoxlm_core.errors import NoValidCheckpoint
from infoxlm_core.training import distributed
from infoxlm_core.training.checkpoints import Checkpoint
from infoxlm_core.training.guard import Guard
from infoxlm_core.training.learner import Learner


@dataclass
class Progress:
    """How far a training run has come. Bad steps count in `step`, but not in `updates` of the weights."""

    step: int = 0
    updates: int = 0
    tokens: float = 0  # of all steps so far
    targets: dict[str, float] = field(default_factory=dict)
    """Targets of all steps so far, by metric name: `targets/OBJECTIVE/LANGUAGE/CORPUS`."""
    guard: Guard = field(default_factory=Guard)

    def add_targets(self, metrics: Mapping[str, float]) -> None:
        """Add the numbers of targets of a step."""
        for name, count in _select_targets(metrics).items():
            self.targets[name] = self.targets.get(name, 0.0) + count

    def metrics(self) -> dict[str, float]:
        """Return the totals of all steps so far."""
        metrics = {"tokens_seen": self.tokens, **self.targets}
        if self.updates < self.step:  # a total, since the curves may not have a point of each skipped step
            metrics["skipped_steps"] = float(self.step - self.updates)
        return metrics


def _select_targets(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics that count targets by corpus."""
    return {name: count for name, count in metrics.items() if name.startswith("targets/")}


def named_tensors(learner: Learner, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the live tensors by their names in a checkpoint: weights, Adam's moments, and the learner's own state."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in learner.module.named_parameters():
        tensors[f"model/{name}"] = parameter
        optimizer_state = optimizer.state.get(parameter, {})  # frozen parameters have none
        for key, value in optimizer_state.items():
            tensors[f"adam/{name}/{key}"] = value
    for name, value in learner.state().items():
        tensors[f"learner/{name}"] = value
    return tensors


def snapshot(
    learner: Learner,
    optimizer: torch.optim.Optimizer,
    progress: Progress,
    metrics: Mapping[str, float],
    copy: bool = False,
) -> Checkpoint:
    """Return a checkpoint of the current state. All workers must call this.

    Only that of the first worker has tensors, which are complete even if the model is sharded. With `copy`, later steps
    do not change them.
    """
    tensors = distributed.tensors_on_first(named_tensors(learner, optimizer), copy)
    meta = {"updates": progress.updates, "figures": dict(metrics), "guard": progress.guard.state()}
    return Checkpoint(progress.step, tensors, meta)


def restore(
    checkpoint: Checkpoint | None, learner: Learner, optimizer: torch.optim.Optimizer, progress: Progress
) -> dict[str, float] | None:
    """Restore the state of all workers from the first worker's checkpoint. All workers must call this.

    Args:
        checkpoint: the checkpoint on the first worker, None on the others; None on all if there is no checkpoint.
        learner: its weights and other tensors are overwritten.
        optimizer: its moments are overwritten.
        progress: is overwritten.

    Returns:
        The metrics of the checkpoint's step, or None if there is no checkpoint.

    Raises:
        NoValidCheckpoint: the checkpoint lacks a tensor, or a tensor has another shape.
    """
    step = distributed.from_first(checkpoint.step if checkpoint else None)
    if step is None:
        return None
    meta = distributed.from_first(checkpoint.meta if checkpoint else {})
    live_tensors = named_tensors(learner, optimizer)
    saved_tensors = checkpoint.tensors if checkpoint else {}
    distributed.on_first(lambda: _check_shapes(saved_tensors, live_tensors, step))
    distributed.copy_from_first(saved_tensors, live_tensors)
    progress.step = step
    progress.updates = meta["updates"]
    progress.tokens = meta["figures"].get("tokens_seen", 0)  # older checkpoints do not have it
    progress.targets = _select_targets(meta["figures"])
    progress.guard = Guard.from_state(progress.guard.deviations, meta["guard"])
    return meta["figures"]


def _check_shapes(saved_tensors: Mapping[str, Tensor], live_tensors: Mapping[str, Tensor], step: int) -> None:
    """Raise NoValidCheckpoint unless the checkpoint of a step has a tensor of equal shape for every live tensor."""
    for name, live_tensor in sorted(live_tensors.items()):
        if name not in saved_tensors:
            raise NoValidCheckpoint(
                f"the checkpoint of step {step} has no {name}, because another version of this program wrote it: "
                "resume with that version, or delete the run's directory to start over"
            )
        if saved_tensors[name].shape != live_tensor.shape:
            raise NoValidCheckpoint(
                f"the checkpoint of step {step} has another shape of {name} than the model: "
                "restore another checkpoint, or delete the run's directory to start over"
            )

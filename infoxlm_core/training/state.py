"""The state of a training run: all tensors and counters on which the next step depends."""

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
    """The progress of a training run. Bad steps increase `step`, but not the number of weight `updates`."""

    step: int = 0
    updates: int = 0
    tokens: float = 0  # total of all steps so far
    targets: dict[str, float] = field(default_factory=dict)
    """Target counts of all steps so far, by metric name: `targets/OBJECTIVE/LANGUAGE/CORPUS`."""
    guard: Guard = field(default_factory=Guard)

    def add_targets(self, metrics: Mapping[str, float]) -> None:
        """Add a step's target counts."""
        for name, count in _select_targets(metrics).items():
            self.targets[name] = self.targets.get(name, 0.0) + count

    def metrics(self) -> dict[str, float]:
        """Return the totals of all steps so far."""
        metrics = {"tokens_seen": self.tokens, **self.targets}
        if self.updates < self.step:  # log the total, because the curves may lack points for skipped steps
            metrics["skipped_steps"] = float(self.step - self.updates)
        return metrics


def _select_targets(metrics: Mapping[str, float]) -> dict[str, float]:
    """Select the metrics that count targets."""
    return {name: count for name, count in metrics.items() if name.startswith("targets/")}


def named_tensors(learner: Learner, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the live tensors by their names in a checkpoint: weights, Adam's moments and the learner's state."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in learner.module.named_parameters():
        tensors[f"model/{name}"] = parameter
        optimizer_state = optimizer.state.get(parameter, {})  # empty for frozen parameters
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
    """Create a checkpoint of the current state. All workers must call this.

    Only the first worker's checkpoint contains tensors, which are complete even if the model is sharded. With `copy`,
    later steps do not change these tensors.
    """
    tensors = distributed.tensors_on_first(named_tensors(learner, optimizer), copy)
    # `figures` is an earlier name for metrics, kept so that older checkpoints remain readable.
    meta = {"updates": progress.updates, "figures": dict(metrics), "guard": progress.guard.state()}
    return Checkpoint(progress.step, tensors, meta)


def restore(
    checkpoint: Checkpoint | None, learner: Learner, optimizer: torch.optim.Optimizer, progress: Progress
) -> dict[str, float] | None:
    """Restore the state of all workers from the first worker's checkpoint. All workers must call this.

    `checkpoint` is None on all other workers. Return the metrics of the checkpoint's step, or None if the first worker
    has no checkpoint.

    Raises:
        NoValidCheckpoint: a tensor is missing from the checkpoint or has a different shape.
    """
    saved = distributed.from_first((checkpoint.step, checkpoint.meta) if checkpoint else None)
    if saved is None:
        return None
    step, meta = saved
    live_tensors = named_tensors(learner, optimizer)
    saved_tensors = checkpoint.tensors if checkpoint else {}
    distributed.on_first(lambda: _check_shapes(saved_tensors, live_tensors, step))
    distributed.copy_from_first(saved_tensors, live_tensors)
    progress.step = step
    progress.updates = meta["updates"]
    progress.tokens = meta["figures"].get("tokens_seen", 0)  # missing in older checkpoints
    progress.targets = _select_targets(meta["figures"])
    progress.guard = Guard.from_state(progress.guard.deviations, meta["guard"])
    return meta["figures"]


def _check_shapes(saved_tensors: Mapping[str, Tensor], live_tensors: Mapping[str, Tensor], step: int) -> None:
    """Raise NoValidCheckpoint if a live tensor is missing from the checkpoint or the shapes differ."""
    for name, live_tensor in sorted(live_tensors.items()):
        saved_tensor = saved_tensors.get(name)
        if saved_tensor is None or saved_tensor.shape != live_tensor.shape:
            description = "no such tensor" if saved_tensor is None else f"shape {tuple(saved_tensor.shape)}"
            raise NoValidCheckpoint(
                f"{name} needs shape {tuple(live_tensor.shape)}, but the checkpoint of step {step} has {description}: "
                "resume with the settings and the version of this program that wrote it, or delete the run's "
                "directory to start over"
            )

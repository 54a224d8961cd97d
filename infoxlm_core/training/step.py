"""One optimizer step: the same for every learner and for any number of workers."""

import contextlib
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from infoxlm_core.config import OptimizationConfig
from infoxlm_core.training import distributed, gradients, sharding
from infoxlm_core.training.learner import Learner, MicroBatch
from infoxlm_core.training.optimizer import learning_rate
from infoxlm_core.training.state import Progress

logger = logging.getLogger(__name__)


def train_step(
    learner: Learner,
    optimizer: torch.optim.Optimizer,
    config: OptimizationConfig,
    progress: Progress,
    batches: Sequence[MicroBatch],
    stop: bool = False,
) -> tuple[dict[str, float], bool]:
    """Take one optimizer step on its micro-batches.

    Every loss is a sum over targets, divided once by the targets of all micro-batches on all workers: the result does
    not depend on how the work is split. The guard sees losses and gradients before the weights change.

    Returns:
        The figures of the step, and whether any worker wants to stop.
    """
    # The counts of the global batch are known before the first forward pass. They travel from CPU to CPU, so that no
    # worker waits for its device.
    weights = learner.weights.by_name
    counts = distributed.sum_numbers(count_targets(map(learner.counts, batches), weights) | {"stop": float(stop)})
    divisors = learner.weights.divisors(counts)
    scales = {name: weight / divisors[name] for name, weight in weights.items()}

    parameters = [p for p in learner.module.parameters() if p.requires_grad]
    sums = _backward(learner, batches, scales, parameters)
    for parameter in parameters:
        if parameter.grad is None:  # its objective had no target, but weight decay applies on any number of workers
            parameter.grad = torch.zeros_like(parameter)
    norm_tensor = sharding.norm_of([p.grad for p in parameters if p.grad is not None])

    # Only here does a step wait for its device. All workers read the same sums and norm, so they judge it alike.
    totals, norm = _read(sums, norm_tensor)
    finite = math.isfinite(norm) and all(bool(np.isfinite(value).all()) for value in totals.values())
    with_targets = [name for name in weights if counts[name]]
    loss_of_step = sum(weights[name] * (totals[name] / divisors[name]) for name in with_targets)
    good = _is_good(learner, progress, loss_of_step, norm, finite)
    rate = learning_rate(config, progress.updates)
    if good:
        if norm > config.clip_norm:
            nn.utils.clip_grads_with_norm_(parameters, config.clip_norm, norm_tensor)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        progress.updates += 1
    optimizer.zero_grad()
    progress.step += 1
    learner.after_step(progress.step, good)

    # The curves have the mean over each objective's own targets, also where `weighting: count` trains with another.
    figures = {f"loss/{name}": totals[name] / counts[name] for name in with_targets}
    figures |= learner.statistics(totals, counts)
    figures |= {"learning_rate": rate, "gradient_norm": norm, "tokens": counts["tokens"], "skipped": float(not good)}
    if progress.updates < progress.step:  # not each step is a point of the curves
        figures["skipped_steps"] = float(progress.step - progress.updates)
    if "flops" in counts:
        figures["flops"] = counts["flops"]
    return figures, counts["stop"] > 0


def _backward(
    learner: Learner,
    batches: Sequence[MicroBatch],
    scales: Mapping[str, float],
    parameters: Sequence[nn.Parameter],
) -> dict[str, Tensor]:
    """Accumulate the gradients of all micro-batches; return the sums of `Learner.losses`, in fp64 on the device.

    The last backward pass sums the gradients over all workers in the order of the parameters, so that a resumed run
    adds in the same order.

    Raises:
        ValueError: an objective has a loss, but its targets are not counted, so that nothing could divide it.
    """
    sums: dict[str, Tensor] = {}
    for number, batch in enumerate(batches, start=1):
        last = number == len(batches)
        sharding.sum_gradients_in(learner.module, last)
        loss, batch_sums = learner.losses(batch, scales)
        uncounted = scales.keys() & batch_sums.keys() - learner.counts(batch).keys()
        if uncounted:
            raise ValueError(f"{type(learner).__name__}.counts lacks the targets of {', '.join(uncounted)}")
        with gradients.summed(parameters) if last else contextlib.nullcontext():
            if loss.requires_grad:
                loss.backward()
        for name, value in batch_sums.items():
            sums[name] = sums.get(name, 0.0) + value.double()
    return sums


def _is_good(learner: Learner, progress: Progress, loss: float, norm: float, finite: bool) -> bool:
    """Let the guard judge a step; the first worker logs why a step is bad."""
    step, guard = progress.step, progress.guard
    kind = learner.kind_of(step, guard.skipped_positions(step))
    reason = guard.judge(kind, loss, norm, finite)
    if reason and distributed.rank() == 0:
        logger.warning("step %d is skipped: %s", step + 1, reason)
    return not reason


def count_targets(counts: Iterable[Mapping[str, float]], names: Iterable[str]) -> dict[str, float]:
    """Return targets of each objective, tokens and FLOPs of some micro-batches together, from their counts."""
    totals: dict[str, float] = dict.fromkeys([*names, "tokens"], 0)
    for batch_counts in counts:
        for name, count in batch_counts.items():
            totals[name] = totals.get(name, 0) + count
    return totals


def _read(sums: Mapping[str, Tensor], norm: Tensor) -> tuple[dict[str, Any], float]:
    """Return sums over all workers and the gradient's norm, in one copy from the device. All pass the same names.

    The norm is the first worker's: different devices may round it differently, and all must judge alike.
    """
    names = sorted(sums)
    first_norm = norm.double().reshape(1)
    if distributed.rank() > 0:
        first_norm = torch.zeros_like(first_norm)
    flat = torch.cat([*(sums[name].flatten() for name in names), first_norm])
    values = distributed.sum_over_workers(flat).cpu().numpy()
    ends = np.cumsum([sums[name].numel() for name in names])
    totals: dict[str, Any] = {}
    for name, total in zip(names, np.split(values[:-1], ends[:-1]), strict=True):
        totals[name] = total.reshape(sums[name].shape) if sums[name].ndim else total.item()
    return totals, values[-1].item()

"""Optimizer steps, for every learner and any number of workers."""

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
    stop_requested: bool = False,
) -> tuple[dict[str, float], bool]:
    """Take one optimizer step.

    Losses are summed over targets and divided by the number of targets in all micro-batches of all workers. The result
    therefore does not depend on how samples are split. The guard checks losses and gradients before the weights change.

    Args:
        learner: the model with its losses.
        optimizer: the optimizer of the model's parameters.
        config: settings of the schedule and of gradient clipping.
        progress: the run's progress, updated in place.
        batches: this worker's micro-batches.
        stop_requested: whether this worker was asked to stop.

    Returns:
        The step's metrics, and whether any worker was asked to stop.
    """
    weights = learner.weights.by_name
    # Target counts are known before the forward pass. They are summed on CPUs, so that no worker waits for its GPU.
    local_counts = count_targets([learner.counts(batch) for batch in batches], weights)
    counts = distributed.sum_numbers(local_counts | {"stop": float(stop_requested)})
    divisors = learner.weights.divisors(counts)
    scales = {name: weight / divisors[name] for name, weight in weights.items()}

    parameters = [p for p in learner.module.parameters() if p.requires_grad]
    sums = _backward(learner, batches, scales, parameters)
    norm_tensor = sharding.compute_norm(_complete_gradients(parameters))

    # Only here does a step wait for its device. All workers read the same values and therefore decide alike.
    totals, norm = _sum_and_read(sums, norm_tensor)
    is_finite = math.isfinite(norm) and all(bool(np.isfinite(total).all()) for total in totals.values())
    objectives = [name for name in weights if counts[name]]
    loss = sum(weights[name] * (totals[name] / divisors[name]) for name in objectives)
    is_good = _is_good(learner, progress, loss, norm, is_finite)
    rate = learning_rate(config, progress.updates)
    if is_good:
        if norm > config.clip_norm:
            nn.utils.clip_grads_with_norm_(parameters, config.clip_norm, norm_tensor)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        progress.updates += 1
    optimizer.zero_grad()
    progress.step += 1
    progress.tokens += counts["tokens"]
    learner.after_step(progress.step, is_good)

    metrics = {"learning_rate": rate, "gradient_norm": norm, "skipped": float(not is_good)}
    # The curves show means over each objective's own targets, even if `weighting: count` divides losses differently.
    metrics |= {f"loss/{name}": totals[name] / counts[name] for name in objectives}
    metrics |= {name: counts[name] for name in ("tokens", "flops") if name in counts}
    metrics |= learner.statistics(totals, counts)
    progress.add_targets(metrics)
    metrics |= progress.metrics()
    # Resumed runs restore totals in a different order, but their curves must be byte-identical.
    return dict(sorted(metrics.items())), counts["stop"] > 0


def _backward(
    learner: Learner, batches: Sequence[MicroBatch], scales: Mapping[str, float], parameters: Sequence[nn.Parameter]
) -> dict[str, Tensor]:
    """Accumulate the gradients of all micro-batches. Return the sums of `Learner.losses` in fp64 on the device.

    The last backward pass also sums the gradients over all workers, in a fixed order, so that resumed runs give
    identical results.

    Raises:
        ValueError: an objective has a loss but no target count.
    """
    sums: dict[str, Tensor] = {}
    for number, batch in enumerate(batches, start=1):
        is_last_batch = number == len(batches)
        sharding.sum_gradients_in_pass(learner.module, is_last_batch)
        loss, batch_sums = learner.losses(batch, scales)
        uncounted_objectives = (scales.keys() & batch_sums.keys()) - learner.counts(batch).keys()
        if uncounted_objectives:
            raise ValueError(f"{type(learner).__name__}.counts lacks the targets of {', '.join(uncounted_objectives)}")
        summing_gradients = gradients.summing_over_workers(parameters) if is_last_batch else contextlib.nullcontext()
        with summing_gradients:
            if loss.requires_grad:  # false for a micro-batch without targets
                loss.backward()
        for name, value in batch_sums.items():
            sums[name] = sums.get(name, 0.0) + value.double()
    return sums


def _complete_gradients(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """Set missing gradients to zeros, and return the gradients of all parameters.

    A parameter has no gradient if its objective had no target on this worker. AdamW would skip such parameters, so
    weight decay would depend on the number of workers.
    """
    complete_gradients = []
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        complete_gradients.append(parameter.grad)
    return complete_gradients


def _is_good(learner: Learner, progress: Progress, loss: float, norm: float, is_finite: bool) -> bool:
    """Return whether the guard accepts a step. The first worker logs the reason for a bad step."""
    kind = learner.kind_of(progress.step, progress.guard.skipped_positions(progress.step))
    reason = progress.guard.check_step(kind, loss, norm, is_finite)
    if reason and distributed.rank() == 0:
        logger.warning("step %d is skipped: %s", progress.step + 1, reason)
    return not reason


def count_targets(counts: Iterable[Mapping[str, float]], names: Iterable[str]) -> dict[str, float]:
    """Sum the counts of micro-batches: targets of each objective, tokens and FLOPs."""
    # Start at 0, because all workers must sum the same names, even a worker without targets of an objective.
    totals: dict[str, float] = dict.fromkeys([*names, "tokens"], 0)
    for batch_counts in counts:
        for name, count in batch_counts.items():
            totals[name] = totals.get(name, 0) + count
    return totals


def _sum_and_read(sums: Mapping[str, Tensor], gradient_norm: Tensor) -> tuple[dict[str, Any], float]:
    """Add up the sums of all workers, and read the totals and the gradient norm. Workers must pass the same names.

    All values are copied from the device in one transfer, because every transfer synchronizes with the device. All
    workers use the first worker's gradient norm, because rounding may differ and workers must make the same decision.
    """
    names = sorted(sums)
    norm_of_first_worker = gradient_norm.double().reshape(1)
    if distributed.rank() > 0:
        norm_of_first_worker = torch.zeros_like(norm_of_first_worker)  # does not change the sum over workers
    flat_sums = [sums[name].flatten() for name in names]
    local_values = torch.cat([*flat_sums, norm_of_first_worker])
    values = distributed.sum_over_workers(local_values).cpu().numpy()

    totals: dict[str, Any] = {}
    start = 0
    for name in names:
        end = start + sums[name].numel()
        is_scalar = sums[name].ndim == 0
        totals[name] = values[start].item() if is_scalar else values[start:end].reshape(sums[name].shape)
        start = end
    return totals, values[-1].item()

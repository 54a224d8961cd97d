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
    stop_requested: bool = False,
) -> tuple[dict[str, float], bool]:
    """Take one optimizer step on its micro-batches.

    Every loss is a sum over targets, divided once by the targets of all micro-batches on all workers. The result
    therefore does not depend on how the samples are split. The guard checks losses and gradients before the weights
    change.

    Args:
        learner: the model with its losses.
        optimizer: optimizer of the model's parameters.
        config: the schedule and the limit of the gradient norm.
        progress: updated by this step.
        batches: this worker's micro-batches.
        stop_requested: whether this worker was asked to stop.

    Returns:
        The metrics of the step, and whether any worker was asked to stop.
    """
    weights = learner.weights.by_name
    # The counts of the global batch are known before the first forward pass. They travel from CPU to CPU, so that no
    # worker waits for its device.
    local_counts = count_targets([learner.counts(batch) for batch in batches], weights)
    counts = distributed.sum_numbers(local_counts | {"stop": float(stop_requested)})
    divisors = learner.weights.divisors(counts)
    scales = {name: weight / divisors[name] for name, weight in weights.items()}

    parameters = [p for p in learner.module.parameters() if p.requires_grad]
    sums = _backward(learner, batches, scales, parameters)
    norm_tensor = sharding.compute_norm(_complete_gradients(parameters))

    # This is the only place where a step waits for its device. All workers read the same sums and norm, so all of them
    # come to the same decision.
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
    # The curves show the mean over each objective's own targets, even if `weighting: count` trains with another.
    metrics |= {f"loss/{name}": totals[name] / counts[name] for name in objectives}
    metrics |= {name: counts[name] for name in ("tokens", "flops") if name in counts}
    metrics |= learner.statistics(totals, counts)
    progress.add_targets(metrics)
    metrics |= progress.metrics()
    # The totals of a resumed run come from its checkpoint in another order, but its curves must have the same bytes.
    return dict(sorted(metrics.items())), counts["stop"] > 0


def _backward(
    learner: Learner,
    batches: Sequence[MicroBatch],
    scales: Mapping[str, float],
    parameters: Sequence[nn.Parameter],
) -> dict[str, Tensor]:
    """Accumulate the gradients of all micro-batches. Return the sums of `Learner.losses`, in fp64 on the device.

    The last backward pass also sums the gradients over all workers, always in the same order, so that a resumed run has
    the same result.

    Args:
        learner: computes the losses.
        batches: this worker's micro-batches.
        scales: factor of each objective's summed loss, by name.
        parameters: the trained parameters.

    Raises:
        ValueError: an objective has a loss but no count of targets, so its mean cannot be computed.
    """
    sums: dict[str, Tensor] = {}
    for number, batch in enumerate(batches, start=1):
        is_last_batch = number == len(batches)
        sharding.sum_gradients_in_pass(learner.module, is_last_batch)
        loss, batch_sums = learner.losses(batch, scales)
        uncounted_objectives = scales.keys() & (batch_sums.keys() - learner.counts(batch).keys())
        if uncounted_objectives:
            raise ValueError(f"{type(learner).__name__}.counts lacks the targets of {', '.join(uncounted_objectives)}")
        summing_gradients = gradients.summing_over_workers(parameters) if is_last_batch else contextlib.nullcontext()
        with summing_gradients:
            if loss.requires_grad:  # a micro-batch may have no target
                loss.backward()
        for name, value in batch_sums.items():
            sums[name] = sums.get(name, 0.0) + value.double()
    return sums


def _complete_gradients(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """Return the gradients of all parameters, after setting missing gradients to zeros.

    A parameter has no gradient if its objective had no target. AdamW would skip it, so weight decay would depend on the
    number of workers.
    """
    complete_gradients = []
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        complete_gradients.append(parameter.grad)
    return complete_gradients


def _is_good(learner: Learner, progress: Progress, loss: float, norm: float, is_finite: bool) -> bool:
    """Return whether the guard accepts a step. The first worker logs why a step is bad."""
    kind = learner.kind_of(progress.step, progress.guard.skipped_positions(progress.step))
    reason = progress.guard.check_step(kind, loss, norm, is_finite)
    if reason and distributed.rank() == 0:
        logger.warning("step %d is skipped: %s", progress.step + 1, reason)
    return not reason


def count_targets(counts: Iterable[Mapping[str, float]], names: Iterable[str]) -> dict[str, float]:
    """Return the sums of the counts of micro-batches: the targets of each objective, tokens and FLOPs."""
    totals: dict[str, float] = dict.fromkeys([*names, "tokens"], 0)
    for batch_counts in counts:
        for name, count in batch_counts.items():
            totals[name] = totals.get(name, 0) + count
    return totals


def _sum_and_read(sums: Mapping[str, Tensor], gradient_norm: Tensor) -> tuple[dict[str, Any], float]:
    """Return the sums over all workers and the gradient norm as numbers. Every worker must pass the same names.

    All of them are copied from the device at once, because each copy waits for it. The norm is that of the first
    worker, because devices may round it differently, and all workers must come to the same decision about a step.
    """
    names = sorted(sums)
    norm_of_first_worker = gradient_norm.double().reshape(1)
    if distributed.rank() > 0:
        norm_of_first_worker = torch.zeros_like(norm_of_first_worker)  # adds nothing to the sum over workers
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

"""One optimizer step, the same for every learner, and the same on one worker as on many."""

import contextlib
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from infoxlm_core.config import OptimizationConfig
from infoxlm_core.training import distributed, gradients
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
    """Take one optimizer step on its micro-batches; return its figures and whether any worker wants to stop.

    Every loss is a sum over targets, divided once by the targets of all micro-batches on all workers: the step comes
    out the same however the work is split. Bad losses and gradients (see `Guard`) are found before the weights move.
    """
    # What the whole global batch counts is known before the first forward pass: it goes from CPU to CPU, so that the
    # device need not be waited for.
    weights = learner.weights.by_name
    counts = distributed.sum_numbers(count_targets(batches, weights) | {"stop": float(stop)})
    divisors = learner.weights.divisors(counts)
    scales = {name: weight / divisors[name] for name, weight in weights.items()}

    # Gradients add up over the micro-batches, sums for the curves beside them in fp64; all of it stays on the device.
    # The last backward pass sums the gradients over all workers, in the order of the parameters: a resumed run adds as
    # the undisturbed one.
    parameters = [p for p in learner.module.parameters() if p.requires_grad]
    sums: dict[str, Tensor] = {}
    for number, batch in enumerate(batches, start=1):
        last = number == len(batches)
        distributed.sum_shards(learner.module, last)
        loss, parts = learner.losses(batch, scales)
        with gradients.summed(parameters) if last else contextlib.nullcontext():
            if loss.requires_grad:
                loss.backward()
        for name, value in parts.items():
            sums[name] = sums.get(name, 0.0) + value.double()

    for parameter in parameters:
        if parameter.grad is None:  # of an objective that was off: with any number of workers it still decays
            parameter.grad = torch.zeros_like(parameter)
    norm = distributed.norm_of([p.grad for p in parameters if p.grad is not None])

    # The only place where a step waits for the device: all workers read the same sums and norm, and so agree whether
    # the step is good. A bad one is skipped: weights, moments and learning rate stay as they are.
    totals, size = _read(sums, norm)
    finite = math.isfinite(size) and all(bool(np.isfinite(value).all()) for value in totals.values())
    means = {name: totals[name] / divisors[name] for name in weights if counts[name]}
    good = _is_good(learner, progress, sum(weights[name] * mean for name, mean in means.items()), size, finite)
    rate = learning_rate(config, progress.updates)
    if good:
        if size > config.clip_norm:
            nn.utils.clip_grads_with_norm_(parameters, config.clip_norm, norm)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        progress.updates += 1
    optimizer.zero_grad()
    progress.bad_in_a_row = 0 if good else progress.bad_in_a_row + 1
    progress.step += 1
    learner.after_step(progress.step, good)

    figures = {f"loss/{name}": mean for name, mean in means.items()}
    figures |= learner.statistics(totals, counts)
    figures |= {"learning_rate": rate, "gradient_norm": size, "tokens": counts["tokens"], "skipped": float(not good)}
    if "flops" in counts:
        figures["flops"] = counts["flops"]
    return figures, counts["stop"] > 0


def _is_good(learner: Learner, progress: Progress, loss: float, norm: float, finite: bool) -> bool:
    """Let the guard see a step; the first worker says what is wrong with a bad one."""
    step, guard = progress.step, progress.guard
    wrong = guard.look(step + 1, learner.kind_of(step, guard.skipped(step)), loss, norm, finite)
    if wrong and distributed.rank() == 0:
        logger.warning("step %d changes nothing: %s", step + 1, wrong)
    return not wrong


def count_targets(batches: Sequence[MicroBatch], names: Iterable[str]) -> dict[str, float]:
    """Targets of each objective, tokens and FLOPs of some micro-batches together."""
    counts: dict[str, float] = dict.fromkeys([*names, "tokens"], 0)
    for batch in batches:
        for name, value in batch.counts.items():
            counts[name] = counts.get(name, 0) + value
    return counts


def _read(sums: Mapping[str, Tensor], norm: Tensor) -> tuple[dict[str, Any], float]:
    """Sums over all workers, and the gradient's norm, in one copy from the device. All bring the same names.

    The norm is the first worker's: unlike devices may round it otherwise, and a verdict must not differ.
    """
    names = sorted(sums)
    size = norm.double().reshape(1)
    size = size if distributed.rank() == 0 else torch.zeros_like(size)
    values = distributed.sum_over_workers(torch.cat([*(sums[name].flatten() for name in names), size])).cpu().numpy()
    edges = np.cumsum([sums[name].numel() for name in names])
    parts = zip(names, np.split(values[:-1], edges[:-1]), strict=True)
    shaped = {name: part.reshape(sums[name].shape) for name, part in parts}
    return {name: part if part.ndim else part.item() for name, part in shaped.items()}, values[-1].item()

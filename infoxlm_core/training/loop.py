"""The training loop, the same for pre-training and fine-tuning: one optimizer step, repeated, saved now and then.

A step is a pure function of (seed, step) and of the state before it: there is nothing else to restore on resume.
"""

import contextlib
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from infoxlm_core.config import CheckpointsConfig, OptimizationConfig
from infoxlm_core.data.sampling import digest_key
from infoxlm_core.errors import BadNumbersLimit, Preempted
from infoxlm_core.model.flops import peak
from infoxlm_core.progress import time_left
from infoxlm_core.training import distributed
from infoxlm_core.training.checkpoints import METRICS, Checkpoints, Elsewhere
from infoxlm_core.training.fingerprint import Fingerprint
from infoxlm_core.training.learner import Learner, MicroBatch
from infoxlm_core.training.optimizer import learning_rate, make_adamw
from infoxlm_core.training.state import Progress, restore, snapshot
from infoxlm_core.training.tracker import FileTracker, Tracker, read

logger = logging.getLogger(__name__)
SECONDS_BETWEEN_LINES = 10.0


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
    out the same however the work is split.
    """
    parameters = [p for p in learner.module.parameters() if p.requires_grad]
    weights = learner.weights.by_name
    counts = _sum(count(batches, weights), distributed.device())
    divisors = learner.weights.divisors(counts)
    scales = {name: weight / divisors[name] for name, weight in weights.items()}
    sums: dict[str, Tensor] = {}
    for batch in batches:
        loss, parts = learner.losses(batch, scales)
        if loss.requires_grad:
            loss.backward()
        for name, value in parts.items():
            sums[name] = sums.get(name, 0.0) + value.double()
    for parameter in parameters:
        if parameter.grad is None:  # of an objective that was off: with any number of workers it still decays
            parameter.grad = torch.zeros_like(parameter)
    distributed.sum_gradients(parameters)
    norm = distributed.norm_of([p.grad for p in parameters if p.grad is not None])
    totals = _sum(sums | {"stop": float(stop)}, distributed.device())
    good = math.isfinite(norm.item()) and all(map(_is_finite, totals.values()))
    rate = learning_rate(config, progress.updates)
    if good:
        if norm > config.clip_norm:
            nn.utils.clip_grads_with_norm_(parameters, config.clip_norm, norm)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        progress.updates += 1
    optimizer.zero_grad()
    progress.bad_in_a_row = 0 if good else progress.bad_in_a_row + 1
    progress.step += 1
    learner.after_step(progress.step, good)
    figures = {f"loss/{name}": totals[name] / divisors[name] for name in weights if counts.get(name)}
    figures |= learner.statistics(totals, counts)
    figures |= {
        "learning_rate": rate,
        "gradient_norm": norm.item(),
        "tokens": counts["tokens"],
        "skipped": float(not good),
    } | {name: counts[name] for name in ("flops",) if name in counts}
    return figures, totals["stop"] > 0


def count(batches: Sequence[MicroBatch], names: Iterable[str]) -> dict[str, float]:
    """Targets of each objective, tokens and FLOPs of some micro-batches together."""
    counts: dict[str, float] = dict.fromkeys([*names, "tokens"], 0)
    for batch in batches:
        for name, value in batch.counts.items():
            counts[name] = counts.get(name, 0) + value
    return counts


def _sum(values: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Sum named numbers and arrays over workers in float64. Every worker must bring the same names."""
    parts = {name: torch.as_tensor(values[name], dtype=torch.float64, device=device) for name in sorted(values)}
    vector = distributed.sum_over_workers(torch.cat([part.flatten() for part in parts.values()])).cpu()
    sums = vector.split([part.numel() for part in parts.values()])
    return {
        name: total.view(part.shape).numpy() if part.dim() else total.item()
        for (name, part), total in zip(parts.items(), sums, strict=True)
    }


def _is_finite(value: Any) -> bool:
    return bool(np.isfinite(value).all())


def train(
    learner: Learner,
    config: OptimizationConfig,
    checkpoints: Checkpoints,
    tracker: Tracker,
    log_every: int,
    observe: Callable[[int], dict[str, float]] | None = None,
) -> dict[str, float]:
    """Train to the last step, from the newest valid checkpoint if there is one; return the last step's figures.

    The first worker decides where to start, saves and tracks; the others follow.

    Args:
        learner: what is trained.
        config: for how long, and how fast it learns.
        checkpoints: of this run.
        tracker: gets the curves.
        log_every: steps between two points of them.
        observe: what is looked at now and then, after so many steps, such as scores on held-out text; nothing if
            nothing is due. All workers call it: the first one looks (`distributed.on_first`), and its figures count,
            or all do if each has a part of a network.

    Raises:
        Preempted: somebody asked to stop; a checkpoint was saved.
        BadNumbersLimit: too many steps in a row were not finite.
        NoValidCheckpoint, ConfigMismatch: see `Checkpoints.load_newest`.
    """
    first = distributed.rank() == 0
    optimizer = make_adamw([p for p in learner.module.parameters() if p.requires_grad], config)
    progress = Progress()
    figures = restore(distributed.on_first(checkpoints.load_newest), learner, optimizer, progress)
    if figures is None:
        figures = {}
        learner.after_step(0)
    if first:
        tracker.resume(progress.step)
    pace = Pace(progress.step, config.steps)
    due = False
    with ThreadPoolExecutor(1, "batches") as ahead:  # makes the next step's batches while this one computes
        coming = ahead.submit(learner.batches, progress.step)
        while progress.step < config.steps:
            stop = first and checkpoints.asked_to_stop()
            batches, waited = _wait_for(coming)
            if progress.step + 1 < config.steps:
                coming = ahead.submit(learner.batches, progress.step + 1)
            figures, stopping = train_step(learner, optimizer, config, progress, batches, stop)
            last = progress.step == config.steps
            observed = observe(progress.step) if observe else {}
            if first:
                figures |= observed
                speed = pace.tell(progress.step, figures, waited)
                if progress.step % log_every == 0 or observed or last:
                    tracker.log(progress.step, figures | speed)
            if progress.bad_in_a_row >= config.max_bad_steps:
                raise BadNumbersLimit(
                    f"{progress.bad_in_a_row} steps in a row up to step {progress.step} had a loss or gradient that is "
                    "not finite: lower optimization.learning_rate or raise contrast.temperature"
                )
            due = due or progress.step % checkpoints.every == 0 or stopping
            if last or (due and progress.bad_in_a_row == 0):  # bad steps must not push out what was before them
                _save(learner, optimizer, progress, figures, checkpoints, tracker, stopping or last)
                due = False
            if stopping and not due:  # among bad steps a request waits for a good one, or for too many bad ones
                distributed.on_first(checkpoints.forget_request)
                raise Preempted(f"asked to stop after step {progress.step}: a checkpoint is saved, run again to go on")
    return figures


def _wait_for(coming: Future[Any]) -> tuple[Sequence[Any], float]:
    """The batches, and the seconds that nobody computed because of them."""
    began = time.monotonic()
    batches = coming.result()
    return batches, time.monotonic() - began


def _save(
    learner: Learner,
    optimizer: torch.optim.Optimizer,
    progress: Progress,
    figures: Mapping[str, float],
    checkpoints: Checkpoints,
    tracker: Tracker,
    last: bool,
) -> None:
    """Save what all workers agree on; the first one writes.

    Raises:
        RankDesync: a worker holds other weights or another queue than the first.
    """
    distributed.check_equal({**dict(learner.module.named_parameters()), **learner.state()}, progress.step)
    checkpoint = snapshot(learner, optimizer, progress, figures)
    distributed.on_first(lambda: checkpoints.save(checkpoint, last))
    if distributed.rank() == 0:
        tracker.sync()


class Pace:
    """How fast it goes: a line on the console every ten seconds, and the figures of speed for the curves."""

    def __init__(self, start: int, steps: int) -> None:
        self.start, self.steps = start, steps
        self.began = self.spoke = time.monotonic()
        self.tokens = self.waited = 0.0  # since the last line
        self.probed: dict[str, float] = {}  # what was seen last

    def tell(self, step: int, figures: Mapping[str, float], waited: float) -> dict[str, float]:
        """Count a step, log a line if it is time.

        Returns:
            tokens per second and the share of time that the step waited for data, since the last line; on a GPU we
            know, model FLOPs utilisation; on any, the most memory used.
        """
        now = time.monotonic()
        self.tokens, self.waited = self.tokens + figures["tokens"], self.waited + waited
        seconds = max(now - self.spoke, 1e-9)
        self.probed |= {name: value for name, value in figures.items() if name.startswith("probe/")}
        rate = self.tokens / seconds
        speed = {"tokens_per_second": rate, "data_wait": self.waited / seconds}
        if torch.cuda.is_available():
            speed["gpu_memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
            fastest = peak(torch.cuda.get_device_name())
            if fastest and "flops" in figures:
                needed = figures["flops"] / figures["tokens"] * rate
                speed["mfu"] = needed / (fastest * distributed.world_size())
        if now - self.spoke >= SECONDS_BETWEEN_LINES or step == self.steps:
            shown = {name: value for name, value in figures.items() if name.startswith("loss/")}
            shown |= {name: value for name, value in figures.items() if name.endswith("accuracy")} | self.probed
            words = " ".join(f"{name} {value:.3f}" for name, value in shown.items() if name.count("/") == 1)
            left = time_left(now - self.began, step - self.start, self.steps - self.start)
            logger.info("step %d/%d %s, %.0f tokens/s, %s", step, self.steps, words, rate, left)
            self.spoke, self.tokens, self.waited = now, 0.0, 0.0
        return speed


CLOCKED = ("tokens_per_second", "data_wait", "gpu_memory_gib", "mfu")
"""Figures that depend on the machine and its load, not on the training."""


@contextlib.contextmanager
def run_directory(
    directory: Path,
    fingerprint: Fingerprint,
    config: CheckpointsConfig,
    track: Callable[[Path], Tracker],
    elsewhere: Elsewhere | None = None,
) -> Iterator[tuple[Checkpoints, Tracker]]:
    """Checkpoints and tracker of a run; the first worker holds the run's lock as long as it trains.

    Raises:
        LeaseHeld: another process trains this run.
    """
    checkpoints = Checkpoints(
        directory, fingerprint, config.every, config.keep, elsewhere, accept_changes=config.resume == directory.name
    )
    with contextlib.ExitStack() as stack:
        distributed.on_first(lambda: stack.enter_context(checkpoints.locked()))
        tracker = track(directory / METRICS) if distributed.rank() == 0 else FileTracker(os.devnull)
        stack.callback(tracker.close)
        yield checkpoints, tracker


def export_curves(run: Path, output: Path) -> None:
    """Copy a run's curves beside its model, without what the clock says: equal trainings make equal artifacts."""
    points = read(run / METRICS)
    kept = [{"step": step} | {n: v for n, v in values.items() if n not in CLOCKED} for step, values in points]
    (output / METRICS).write_text("".join(json.dumps(point) + "\n" for point in kept))


def seed_dropout(*key: object) -> None:
    """Draw dropout from a key such as (seed, step, worker, micro-batch), not from what was drawn before."""
    torch.manual_seed(int.from_bytes(digest_key(*key)[:8], "little"))


@contextlib.contextmanager
def autocast(device: torch.device) -> Iterator[None]:
    """bf16 on GPUs; fp32 on CPUs, where bf16 is slower without special instructions."""
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        yield

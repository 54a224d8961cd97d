"""The training loop, the same for pre-training and fine-tuning: steps, from the newest checkpoint to the last one.

A step is a pure function of (seed, step) and of the state before it: there is nothing else to restore on resume.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from infoxlm_core.config import GuardConfig, OptimizationConfig
from infoxlm_core.errors import Preempted, TrainingDiverged
from infoxlm_core.training import distributed
from infoxlm_core.training.checkpoints import Checkpoints
from infoxlm_core.training.guard import Guard
from infoxlm_core.training.learner import Learner, MicroBatch
from infoxlm_core.training.optimizer import make_adamw
from infoxlm_core.training.pace import Pace
from infoxlm_core.training.state import Progress, restore, snapshot
from infoxlm_core.training.step import train_step
from infoxlm_core.training.tracker import Tracker

logger = logging.getLogger(__name__)
NO_GUARD = GuardConfig(deviations=0.0, rewinds=0)
"""For trainings whose healthy losses jump, as those of small batches do at the end of a fine-tuning."""


def train(
    learner: Learner,
    config: OptimizationConfig,
    checkpoints: Checkpoints,
    tracker: Tracker,
    log_every: int,
    observe: Callable[[int], dict[str, float]] | None = None,
    guard: GuardConfig = NO_GUARD,
) -> dict[str, float]:
    """Train to the last step, from the newest valid checkpoint if there is one; return the last step's figures.

    The first worker decides where to start, saves and tracks (a point of the curves every `log_every` steps); the
    others follow. `observe` is what is evaluated every so many steps, such as scores on held-out text; nothing if
    nothing is due. All workers call it: the first one evaluates (`distributed.on_first`), and its figures count, or all
    do if each has a part of a network.

    Raises:
        Preempted: somebody asked to stop; a checkpoint was saved.
        TrainingDiverged: too many steps were bad, and going back is not possible, or did not help.
        NoValidCheckpoint, ConfigMismatch: see `Checkpoints.load_newest`.
    """
    first = distributed.rank() == 0
    optimizer = make_adamw([p for p in learner.module.parameters() if p.requires_grad], config)
    progress = Progress(guard=Guard(guard.deviations))
    figures = _begin(learner, optimizer, progress, checkpoints, tracker)
    pace = Pace(config.steps)
    save_due = False

    with ThreadPoolExecutor(1, "batches") as ahead:

        def prepare(step: int) -> Future[Sequence[MicroBatch]]:
            return ahead.submit(learner.batches, step, progress.guard.skipped(step))

        coming = prepare(progress.step)
        while progress.step < config.steps:
            # The next step's batches are made on the CPU while this step computes: they depend on its number alone.
            stop = first and (checkpoints.asked_to_stop() or checkpoints.has_failed())
            began = time.monotonic()
            batches = coming.result()
            waited = time.monotonic() - began  # seconds in which nobody computed
            if progress.step + 1 < config.steps:
                coming = prepare(progress.step + 1)
            figures, stopping = train_step(learner, optimizer, config, progress, batches, stop)

            # Every so often a point of the curves: all workers evaluate, as each may hold a part of the network, and
            # the first one writes.
            last = progress.step == config.steps
            observed = observe(progress.step) if observe else {}
            if first:
                figures |= observed | progress.guard.figures(progress.step)
                speed = pace.tell(progress.step, figures, waited)
                if progress.step % log_every == 0 or observed or last:
                    tracker.log(progress.step, figures | speed)

            # A bad step or two may be chance and was skipped; several will not heal by themselves.
            if trouble := progress.guard.trouble(progress.step, progress.bad_in_a_row, config.max_bad_steps):
                _go_back(learner, optimizer, progress, checkpoints, tracker, guard.rewinds, trouble)
                coming, save_due = prepare(progress.step), False
                continue

            # Workers that drift apart are found long before a checkpoint is due, at the cost of reading all weights.
            _compare_workers(learner, progress.step, max(8, checkpoints.every // 10))

            # Every so often, and before the process goes, a checkpoint; but none among bad steps, which would push
            # out those from before the trouble. What is due then waits for a good step.
            save_due = save_due or progress.step % checkpoints.every == 0 or stopping
            if last or (save_due and progress.bad_in_a_row == 0):
                _save(learner, optimizer, progress, figures, checkpoints, tracker, stopping or last)
                save_due = False

            # Whoever asked gets the process to stop once all is saved: the same command then goes on from here.
            if stopping and not save_due:
                distributed.on_first(checkpoints.forget_request)
                raise Preempted(f"asked to stop after step {progress.step}: a checkpoint is saved, run again to go on")
    return figures


def _begin(
    learner: Learner,
    optimizer: torch.optim.Optimizer,
    progress: Progress,
    checkpoints: Checkpoints,
    tracker: Tracker,
) -> dict[str, float]:
    """Restore the newest checkpoint, if there is one; return the figures of its step."""
    # The first worker chooses the checkpoint, as only it may see the disk; its tensors go to all. Without one a run
    # begins, and the learner prepares what it starts from.
    figures = restore(distributed.on_first(checkpoints.load_newest), learner, optimizer, progress)
    if figures is None:
        learner.after_step(0)
    if distributed.rank() == 0:
        tracker.resume(progress.step)
    return figures or {}


def _go_back(
    learner: Learner,
    optimizer: torch.optim.Optimizer,
    progress: Progress,
    checkpoints: Checkpoints,
    tracker: Tracker,
    rewinds: int,
    trouble: str,
) -> None:
    """Restore a checkpoint from before the trouble, and leave out the data since; TrainingDiverged if that was done
    often enough, or there is none."""
    step, now = progress.step, progress.guard
    distributed.on_first(checkpoints.finish)
    found = distributed.on_first(lambda: checkpoints.go_back(step)) if now.rewinds < rewinds else None
    if restore(found, learner, optimizer, progress) is None:
        raise TrainingDiverged(
            f"{trouble} had a loss or gradient that is not finite, or far above those before, after {now.rewinds} "
            "rewinds: lower optimization.learning_rate or raise contrast.temperature"
        )
    now.go_back(progress.guard, progress.step, step)
    progress.guard = now
    if distributed.rank() == 0:
        logger.warning("%s were bad: back to step %d, on with the data after step %d", trouble, progress.step, step)
        tracker.resume(progress.step)


def _compare_workers(learner: Learner, step: int, every: int = 1) -> None:
    """Raise RankDesync if weights, key encoder or queue are not the same on all workers, once in so many steps."""
    if step % every == 0:
        distributed.check_equal({**dict(learner.module.named_parameters()), **learner.state()}, step)


def _save(
    learner: Learner,
    optimizer: torch.optim.Optimizer,
    progress: Progress,
    figures: Mapping[str, float],
    checkpoints: Checkpoints,
    tracker: Tracker,
    last: bool,
) -> None:
    """Save what all workers agree on, else raise RankDesync; the first one writes, the last one before it returns."""
    distributed.on_first(checkpoints.finish)
    _compare_workers(learner, progress.step)
    later = checkpoints.background and not last
    checkpoint = snapshot(learner, optimizer, progress, figures, own=later)
    if distributed.rank() == 0:
        tracker.sync()  # first: a checkpoint that is newer than its curves would go on without their points
    distributed.on_first(lambda: checkpoints.begin(checkpoint) if later else checkpoints.save(checkpoint, last))

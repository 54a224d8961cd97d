"""The training loop of pre-training and fine-tuning: steps, from the newest checkpoint to the last step.

A step is a pure function of (seed, step) and of the state before it, so that resuming restores nothing else.
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
"""For trainings in which spikes of the loss are normal, such as fine-tuning with small batches."""


def train(
    learner: Learner,
    config: OptimizationConfig,
    checkpoints: Checkpoints,
    tracker: Tracker,
    log_every: int,
    observe: Callable[[int], dict[str, float]] | None = None,
    guard: GuardConfig = NO_GUARD,
) -> dict[str, float]:
    """Train to the last step, from the newest valid checkpoint if there is one; all workers call this.

    Args:
        learner: what is trained.
        config: the optimizer and the number of steps.
        checkpoints: the run's checkpoints; the first worker saves.
        tracker: receives the curves; the first worker writes.
        log_every: steps between two points of the curves.
        observe: returns the evaluations due after a step, such as scores on held-out text.
        guard: how bad steps are handled.

    Returns:
        The figures of the last step.

    Raises:
        Preempted: the run was asked to stop; a checkpoint was saved.
        TrainingDiverged: too many steps were bad, and a rewind is impossible or did not help.
        NoValidCheckpoint, ConfigMismatch: see `Checkpoints.load_newest`.
    """
    first = distributed.rank() == 0
    optimizer = make_adamw([p for p in learner.module.parameters() if p.requires_grad], config)
    progress = Progress(guard=Guard(guard.deviations))
    figures = _begin(learner, optimizer, progress, checkpoints, tracker)
    pace = Pace(config.steps)
    save_due = False

    with ThreadPoolExecutor(1, "batches") as executor:

        def prepare(step: int) -> Future[Sequence[MicroBatch]]:
            return executor.submit(learner.batches, step, progress.guard.skipped_positions(step))

        next_batches = prepare(progress.step)
        while progress.step < config.steps:
            # The CPU prepares the next step's batches while this step computes.
            stop = first and (checkpoints.asked_to_stop() or checkpoints.save_has_failed())
            wait_started = time.monotonic()
            batches = next_batches.result()
            waited = time.monotonic() - wait_started
            if progress.step + 1 < config.steps:
                next_batches = prepare(progress.step + 1)
            figures, stopping = train_step(learner, optimizer, config, progress, batches, stop)

            # All workers evaluate, since each may hold a part of the network; the first one writes the curves.
            last = progress.step == config.steps
            observed = observe(progress.step) if observe else {}
            if first:
                figures |= observed | progress.guard.figures(progress.step)
                speed = pace.record(progress.step, figures, waited)
                if progress.step % log_every == 0 or observed or last:
                    tracker.log(progress.step, figures | speed)

            # A single bad step was skipped. After several, the training does not recover by itself.
            if progress.guard.bad_in_a_row >= config.max_bad_steps:
                _rewind(learner, optimizer, progress, checkpoints, tracker, guard.rewinds)
                next_batches, save_due = prepare(progress.step), False
                continue

            # Compare the workers more often than checkpoints are saved: it is cheap, one pass over all weights.
            if progress.step % max(8, checkpoints.every // 10) == 0:
                _compare_workers(learner, progress.step)

            # Do not save among bad steps: that would replace checkpoints from before them.
            save_due = save_due or progress.step % checkpoints.every == 0 or stopping
            if last or (save_due and progress.guard.bad_in_a_row == 0):
                _save(learner, optimizer, progress, figures, checkpoints, tracker, stopping or last)
                save_due = False

            if stopping and not save_due:
                distributed.on_first(checkpoints.forget_request)
                raise Preempted(
                    f"asked to stop after step {progress.step}: a checkpoint is saved. Run again to continue"
                )
    return figures


def _begin(
    learner: Learner,
    optimizer: torch.optim.Optimizer,
    progress: Progress,
    checkpoints: Checkpoints,
    tracker: Tracker,
) -> dict[str, float]:
    """Restore the newest checkpoint, if there is one; return the figures of its step."""
    # The first worker chooses it, since the others may not see the same disk.
    figures = restore(distributed.on_first(checkpoints.load_newest), learner, optimizer, progress)
    if figures is None:
        learner.after_step(0)
    if distributed.rank() == 0:
        tracker.resume(progress.step)
    return figures or {}


def _rewind(
    learner: Learner,
    optimizer: torch.optim.Optimizer,
    progress: Progress,
    checkpoints: Checkpoints,
    tracker: Tracker,
    max_rewinds: int,
) -> None:
    """Restore a checkpoint from before the bad steps and skip the data since then.

    Raises:
        TrainingDiverged: `max_rewinds` rewinds were made before, or there is no such checkpoint.
    """
    step, guard = progress.step, progress.guard
    bad_steps = f"{guard.bad_in_a_row} steps in a row up to step {step}"
    distributed.on_first(checkpoints.finish_save)
    target = distributed.on_first(lambda: checkpoints.rewind(step)) if guard.rewinds < max_rewinds else None
    if restore(target, learner, optimizer, progress) is None:
        raise TrainingDiverged(
            f"{bad_steps} had a loss or gradient that is not finite, or a loss far above those before, "
            f"after {guard.rewinds} rewinds: lower optimization.learning_rate or raise contrast.temperature"
        )
    guard.rewind(progress.guard, progress.step, step)
    progress.guard = guard
    if distributed.rank() == 0:
        logger.warning("%s were bad: rewind to step %d, skip the data up to step %d", bad_steps, progress.step, step)
        tracker.resume(progress.step)


def _compare_workers(learner: Learner, step: int) -> None:
    """Raise RankDesync if weights, key encoder or queue differ between workers."""
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
    """Save a checkpoint after comparing the workers; wait until it is written if it is the last of this process."""
    distributed.on_first(checkpoints.finish_save)
    _compare_workers(learner, progress.step)
    background = checkpoints.background and not last
    checkpoint = snapshot(learner, optimizer, progress, figures, copy=background)
    if distributed.rank() == 0:
        tracker.sync()  # first, so that no checkpoint is newer than its curves
    distributed.on_first(
        lambda: checkpoints.begin_save(checkpoint) if background else checkpoints.save(checkpoint, last)
    )

"""The training loop of pre-training and fine-tuning: steps, from the newest checkpoint to the last step.

A step is a pure function of (seed, step) and of the state before it, so that resuming restores nothing else.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

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
MIN_COMPARISON_INTERVAL = 8  # steps between two comparisons of the workers, if checkpoints are saved very often


def train(
    learner: Learner,
    config: OptimizationConfig,
    checkpoints: Checkpoints,
    tracker: Tracker,
    log_every: int,
    observe: Callable[[int], dict[str, float]] | None = None,
    guard: GuardConfig = NO_GUARD,
) -> dict[str, float]:
    """Train to the last step, from the newest valid checkpoint if there is one. All workers call this.

    Args:
        learner: the model with its data and losses.
        config: the optimizer and the number of steps.
        checkpoints: the run's checkpoints, which the first worker saves.
        tracker: receives the curves from the first worker.
        log_every: steps between two points of the curves.
        observe: returns the evaluations due after a step, such as scores on held-out text.
        guard: limits of bad steps and of rewinds.

    Returns:
        The metrics of the last step.

    Raises:
        Preempted: the run was asked to stop; a checkpoint was saved.
        TrainingDiverged: too many steps were bad, and a rewind is impossible or did not help.
        NoValidCheckpoint, ConfigMismatch: see `Checkpoints.load_newest`.
    """
    is_first_worker = distributed.rank() == 0
    trainable_parameters = [p for p in learner.module.parameters() if p.requires_grad]
    optimizer = make_adamw(trainable_parameters, config)
    progress = Progress(guard=Guard(guard.deviations))
    run = _Run(learner, optimizer, progress, checkpoints, tracker)
    metrics = run.resume()
    pace = Pace(config.steps)
    comparison_interval = max(MIN_COMPARISON_INTERVAL, checkpoints.every // 10)
    is_save_due = False

    with ThreadPoolExecutor(1, "batches") as executor:

        def prepare_batches(step: int) -> Future[Sequence[MicroBatch]]:
            return executor.submit(learner.batches, step, progress.guard.skipped_positions(step))

        next_batches = prepare_batches(progress.step)
        while progress.step < config.steps:
            # The CPU prepares the next step's batches while this step computes.
            stop_requested = is_first_worker and (checkpoints.asked_to_stop() or checkpoints.save_has_failed())
            batches, seconds_waited = _wait_for(next_batches)
            if progress.step + 1 < config.steps:
                next_batches = prepare_batches(progress.step + 1)
            metrics, is_stopping = train_step(learner, optimizer, config, progress, batches, stop_requested)

            # All workers evaluate, because each may hold a part of the network; the first worker writes the curves.
            is_last_step = progress.step == config.steps
            evaluations = observe(progress.step) if observe else {}
            if is_first_worker:
                metrics |= evaluations | progress.guard.metrics(progress.step)
                speed = pace.record(progress.step, metrics, seconds_waited)
                if progress.step % log_every == 0 or evaluations or is_last_step:
                    tracker.log(progress.step, metrics | speed)

            # A single bad step was skipped. After several, the training does not recover by itself.
            if progress.guard.bad_in_a_row >= config.max_bad_steps:
                run.rewind(guard.rewinds)
                next_batches = prepare_batches(progress.step)
                is_save_due = False
                continue

            # Compare the workers more often than checkpoints are saved: it is cheap, one pass over all weights.
            if progress.step % comparison_interval == 0:
                run.compare_workers()

            # Do not save among bad steps: that would replace checkpoints from before them.
            is_save_due = is_save_due or progress.step % checkpoints.every == 0 or is_stopping
            if is_last_step or (is_save_due and progress.guard.bad_in_a_row == 0):
                run.save(metrics, is_last_save=is_stopping or is_last_step)
                is_save_due = False

            if is_stopping and not is_save_due:
                distributed.on_first(checkpoints.forget_request)
                raise Preempted(
                    f"asked to stop after step {progress.step}: a checkpoint is saved. Run again to continue"
                )
    return metrics


def _wait_for(batches: Future[Sequence[MicroBatch]]) -> tuple[Sequence[MicroBatch], float]:
    """Wait until batches are prepared. Return them and the seconds of waiting."""
    start_time = time.monotonic()
    prepared_batches = batches.result()
    return prepared_batches, time.monotonic() - start_time


@dataclass
class _Run:
    """One run of the training loop: resumes from, saves and rewinds to checkpoints. All workers call each method."""

    learner: Learner
    optimizer: torch.optim.Optimizer
    progress: Progress
    checkpoints: Checkpoints
    tracker: Tracker

    def resume(self) -> dict[str, float]:
        """Restore the newest checkpoint, if there is one. Return the metrics of its step."""
        # The first worker chooses the checkpoint, because the others may not see the same disk.
        checkpoint = distributed.on_first(self.checkpoints.load_newest)
        metrics = restore(checkpoint, self.learner, self.optimizer, self.progress)
        if metrics is None:
            metrics = {}
            self.learner.after_step(0)
        if distributed.rank() == 0:
            self.tracker.resume(self.progress.step)
        return metrics

    def rewind(self, max_rewinds: int) -> None:
        """Restore a checkpoint from before the bad steps and skip the data since then.

        Raises:
            TrainingDiverged: the run was rewound `max_rewinds` times before, or there is no such checkpoint.
        """
        step = self.progress.step
        guard = self.progress.guard  # `restore` replaces it by that of the checkpoint
        bad_steps = f"{guard.bad_in_a_row} steps in a row up to step {step}"
        distributed.on_first(self.checkpoints.finish_save)
        checkpoint = None
        if guard.rewinds < max_rewinds:
            checkpoint = distributed.on_first(lambda: self.checkpoints.rewind(step))
        if restore(checkpoint, self.learner, self.optimizer, self.progress) is None:
            raise TrainingDiverged(
                f"{bad_steps} had a loss or gradient that is not finite, or a loss of more than twice its limit, "
                f"after {guard.rewinds} rewinds: lower optimization.learning_rate or raise contrast.temperature"
            )
        target = self.progress.step
        guard.rewind(self.progress.guard, target, step)
        self.progress.guard = guard
        if distributed.rank() == 0:
            logger.warning("%s were bad: rewind to step %d, skip the data up to step %d", bad_steps, target, step)
            self.tracker.resume(target)

    def compare_workers(self) -> None:
        """Raise RankDesync if weights, key encoder or queue differ between workers."""
        tensors = dict(self.learner.module.named_parameters()) | self.learner.state()
        distributed.check_equal(tensors, self.progress.step)

    def save(self, metrics: Mapping[str, float], is_last_save: bool) -> None:
        """Save a checkpoint with the metrics of its step, after comparing the workers.

        Args:
            metrics: metrics of the step.
            is_last_save: whether this process saves nothing later, so that it must wait until the file is written.
        """
        distributed.on_first(self.checkpoints.finish_save)
        self.compare_workers()
        in_background = self.checkpoints.background and not is_last_save
        # A thread writes while the next steps change the tensors, so it needs copies.
        checkpoint = snapshot(self.learner, self.optimizer, self.progress, metrics, copy=in_background)
        if distributed.rank() == 0:
            self.tracker.sync()  # first, so that no checkpoint is newer than its curves
        if in_background:
            distributed.on_first(lambda: self.checkpoints.begin_save(checkpoint))
        else:
            distributed.on_first(lambda: self.checkpoints.save(checkpoint, is_last_save))

"""The training loop of pre-training and fine-tuning.

A step is a pure function of the seed, the step number and the saved state, so that resumed runs are reproducible.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from infoxlm_core.config import GuardConfig, OptimizationConfig
from infoxlm_core.errors import ConfigError, Preempted, TrainingDiverged
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
"""For runs in which loss spikes are normal, such as fine-tuning with small batches."""
MIN_COMPARISON_INTERVAL = 8  # minimum number of steps between two comparisons of the workers


def train(
    learner: Learner,
    config: OptimizationConfig,
    checkpoints: Checkpoints,
    tracker: Tracker,
    log_every: int,
    observe: Callable[[int], dict[str, float]] | None = None,
    guard: GuardConfig = NO_GUARD,
) -> dict[str, float]:
    """Train to the last step, resuming from the newest valid checkpoint if possible. All workers call this.

    Args:
        learner: the model with its data and losses.
        config: settings of the optimizer and the number of steps.
        checkpoints: the run's checkpoints. Only the first worker saves.
        tracker: tracker for the curves. Only the first worker logs.
        log_every: number of steps between two points of the curves.
        observe: function that runs the evaluations due after a step, such as scoring held-out text.
        guard: limits for bad steps and rewinds.

    Returns:
        The metrics of the last step.

    Raises:
        Preempted: the run was asked to stop; a checkpoint was saved.
        TrainingDiverged: too many consecutive steps were bad, and no further rewind is possible.
        NoValidCheckpoint, ConfigMismatch: see `Checkpoints.load_newest`.
        ConfigError: the run that `checkpoints.resume` names has already taken more steps than configured.
    """
    trainable_parameters = [p for p in learner.module.parameters() if p.requires_grad]
    optimizer = make_adamw(trainable_parameters, config)
    progress = Progress(guard=Guard(guard.deviations))
    run = _Run(learner, optimizer, progress, checkpoints, tracker)
    metrics = run.resume()
    if progress.step > config.steps:  # otherwise, the model would be exported as one of fewer steps
        raise ConfigError(
            f"{checkpoints.directory} has already taken {progress.step} steps, more than optimization.steps "
            f"({config.steps}): raise it to at least {progress.step}"
        )
    pace = Pace(config.steps)
    with ThreadPoolExecutor(1, "batches") as executor:
        preparer = _BatchPreparer(executor, learner, progress, config.steps)
        preparer.prepare(progress.step)
        while progress.step < config.steps:
            stop_requested = run.is_stop_requested()
            batches, seconds_waited = preparer.take_batches()
            metrics, is_stopping = train_step(learner, optimizer, config, progress, batches, stop_requested)
            is_last_step = progress.step == config.steps

            # All workers evaluate, because each may hold a part of the network. The first worker writes the curves.
            evaluations = observe(progress.step) if observe else {}
            if distributed.rank() == 0:
                metrics |= evaluations | progress.guard.metrics(progress.step)
                speed = pace.record(progress.step, metrics, seconds_waited)
                if progress.step % log_every == 0 or evaluations or is_last_step:
                    tracker.log(progress.step, metrics | speed)

            # Training does not recover by itself after several consecutive diverged steps.
            if progress.guard.consecutive_diverged_steps >= config.max_bad_steps:
                run.rewind(guard.rewinds)
                preparer.prepare(progress.step)  # replaces the batches prepared for the abandoned steps
            else:
                run.save_if_due(metrics, is_stopping, is_last_step)
    return metrics


@dataclass
class _BatchPreparer:
    """Prepares the next step's micro-batches in a thread during the current step."""

    executor: ThreadPoolExecutor
    learner: Learner
    progress: Progress
    steps: int  # total number of training steps

    def prepare(self, step: int) -> None:
        """Start preparing a step's micro-batches."""
        skipped_positions = self.progress.guard.skipped_positions(step)
        self.prepared_batches = self.executor.submit(self.learner.batches, step, skipped_positions)

    def take_batches(self) -> tuple[Sequence[MicroBatch], float]:
        """Return the next step's micro-batches and the seconds waited, and start preparing the following step."""
        start_time = time.monotonic()
        with distributed.sharing_errors():  # the text of one machine may be damaged or unavailable
            batches = self.prepared_batches.result()
            seconds_waited = time.monotonic() - start_time
        if self.progress.step + 1 < self.steps:
            self.prepare(self.progress.step + 1)
        return batches, seconds_waited


@dataclass
class _Run:
    """Resumes, saves and rewinds a training run. All workers call each method."""

    learner: Learner
    optimizer: torch.optim.Optimizer
    progress: Progress
    checkpoints: Checkpoints
    tracker: Tracker
    is_save_due: bool = False

    def is_stop_requested(self) -> bool:
        """Return whether the run must save and stop, because of a request or a failed save."""
        if distributed.rank() > 0:  # `train_step` tells all workers the first worker's answer
            return False
        return self.checkpoints.is_stop_requested() or self.checkpoints.save_has_failed()

    def resume(self) -> dict[str, float]:
        """Restore the newest checkpoint, or start a new run. Return the metrics of the checkpoint's step."""
        # Only the first worker chooses, because the others may not share its disk.
        checkpoint = distributed.on_first(self.checkpoints.load_newest)
        metrics = restore(checkpoint, self.learner, self.optimizer, self.progress)
        if metrics is None:
            metrics = {}
            self.learner.after_step(0)  # initializes the state of a new run, such as the queue
        distributed.on_first(lambda: self.tracker.resume(self.progress.step))
        return metrics

    def rewind(self, max_rewinds: int) -> None:
        """Restore a checkpoint from before the bad steps, and skip the data since then.

        Raises:
            TrainingDiverged: the run has already rewound `max_rewinds` times, or no checkpoint is old enough.
        """
        step = self.progress.step
        guard = self.progress.guard  # `restore` replaces `progress.guard` by the checkpoint's guard
        bad_steps = f"{guard.consecutive_diverged_steps} steps in a row up to step {step}"
        # Finish first, because the rewind must also delete the checkpoint that is being written.
        distributed.on_first(self.checkpoints.finish_save)
        checkpoint = None
        if guard.rewinds < max_rewinds:
            checkpoint = distributed.on_first(lambda: self.checkpoints.rewind(step))
        restored_metrics = restore(checkpoint, self.learner, self.optimizer, self.progress)
        if restored_metrics is None:  # on all workers, if the first worker has no checkpoint
            raise TrainingDiverged(
                f"{bad_steps} had a loss or gradient that is not finite, or a loss of more than twice its limit, "
                f"after {guard.rewinds} rewinds: lower optimization.learning_rate or raise contrast.temperature"
            )
        self.is_save_due = False  # a due save would have saved the abandoned steps
        saved_step = self.progress.step
        guard.rewind(self.progress.guard, saved_step, last_step=step)
        self.progress.guard = guard  # only this guard knows the rewinds and skips since the checkpoint
        if distributed.rank() == 0:
            logger.warning("%s were bad: rewind to step %d, skip the data up to step %d", bad_steps, saved_step, step)
        distributed.on_first(lambda: self.tracker.resume(saved_step))

    def compare_workers(self) -> None:
        """Raise RankDesync if the weights, key encoder or queue differ between workers."""
        tensors = dict(self.learner.module.named_parameters()) | self.learner.state()
        distributed.check_equal_on_workers(tensors, self.progress.step)

    def save_if_due(self, metrics: Mapping[str, float], is_stopping: bool, is_last_step: bool) -> None:
        """Save a checkpoint if due, and regularly compare the weights of all workers.

        Raises:
            Preempted: the run was asked to stop, and a checkpoint is saved.
        """
        step = self.progress.step
        # Workers are compared more often than checkpoints are saved, because a comparison only reads the weights once.
        if step % max(MIN_COMPARISON_INTERVAL, self.checkpoints.every // 10) == 0:
            self.compare_workers()
        # Do not save during divergence, because new checkpoints would displace good checkpoints.
        self.is_save_due = self.is_save_due or step % self.checkpoints.every == 0 or is_stopping
        if is_last_step or (self.is_save_due and self.progress.guard.consecutive_diverged_steps == 0):
            self.save(metrics, is_last_save=is_stopping or is_last_step)
            self.is_save_due = False
            if is_stopping:
                distributed.on_first(self.checkpoints.delete_stop_request)
                raise Preempted(f"asked to stop after step {step}: a checkpoint is saved. Run again to continue")

    def save(self, metrics: Mapping[str, float], is_last_save: bool) -> None:
        """Check that all workers agree, then save a checkpoint with the current step's metrics.

        Args:
            metrics: metrics of the current step.
            is_last_save: whether the process ends afterwards, so that the save must not run in the background.
        """
        distributed.on_first(self.checkpoints.finish_save)  # only one checkpoint is written at a time
        self.compare_workers()
        in_background = self.checkpoints.background and not is_last_save
        # A background save needs copies, because the next steps change the tensors.
        checkpoint = snapshot(self.learner, self.optimizer, self.progress, metrics, copy=in_background)
        if distributed.rank() == 0:
            self.tracker.sync()  # before saving, so that no checkpoint is newer than its curves
        if in_background:
            distributed.on_first(lambda: self.checkpoints.begin_save(checkpoint))
        else:
            distributed.on_first(lambda: self.checkpoints.save(checkpoint, is_last_save))

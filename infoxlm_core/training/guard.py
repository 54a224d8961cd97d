"""Detect bad training steps, and decide when to rewind to a checkpoint and which data to skip then.

A step is bad if its loss or gradient norm is not finite, or spikes: it is more than 6 standard deviations above the
mean of the last 128 steps, from the 65th step on (as OLMo-core's `SkipStepOptimizer`). A low value is never bad,
because losses fall fast at the start of every training run. A bad step is skipped.

Each finite step enters the window of the last 128 steps. A spike enters as the limit that it exceeded: one spike hardly
raises the limit, but a lasting rise raises it from step to step until the rise is accepted. With a window of good steps
only, all steps after a lasting rise would be bad.

Several steps in a row whose loss is not finite, or more than twice the limit, mean that the training has diverged and
cannot recover by itself. Lower spikes do not: where the key encoder becomes a copy of the query encoder
(`contrast.momentum_schedule: refresh`), the loss of a healthy training jumps and stays high. A diverged training
rewinds to a checkpoint from well before these steps and skips the data of the steps in between. The number of a step,
by which schedules go, therefore differs from its position in the data:

    steps      0 … 399 | 400 … 503 |                       rewind to 400: (400, 104) joins `skips`
    positions  0 … 399 | 400 … 503 |
    steps      0 … 399             | 400 …
    positions  0 … 399             | 504 …

All workers share the state of the guard, and every checkpoint contains it: an interrupted run makes the same decisions.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

WINDOW = 128  # steps with which a step is compared
MIN_WINDOW = 64  # with fewer steps in the window, no step is a spike
DIVERGENCE_FACTOR = 2.0  # a loss of more than this many times its limit means that the training has diverged
REWIND_DISTANCE = 100  # steps by which a checkpoint must precede the bad steps to be a rewind target

Skips = list[tuple[int, int]]


@dataclass
class Guard:
    """Decides whether a training step is bad, by comparing it with the steps before."""

    deviations: float = 0.0  # limit of a spike, in standard deviations; 0: only non-finite steps are bad
    recent: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    """Loss and gradient norm of the last finite steps by the kind of step; spikes are reduced to their limit."""
    diverged_in_a_row: int = 0
    """Number of last steps that were not finite or had more than twice the loss limit. A lower spike resets it."""
    skips: Skips = field(default_factory=list)  # (step, number of positions skipped before it)
    rewinds: int = 0
    furthest: int = 0  # the largest step before any rewind: later steps up to it repeat steps

    def check_step(self, kind: str, loss: float, gradient_norm: float, is_finite: bool) -> str:
        """Compare a step with the steps before it. Return why it is bad, or "" if it is good.

        Args:
            kind: the kind of the step, see `Learner.kind_of`; only steps of one kind are compared.
            loss: weighted sum of the mean losses.
            gradient_norm: norm of the gradient before clipping.
            is_finite: whether all losses and gradients are finite.
        """
        if not is_finite:
            self.diverged_in_a_row += 1
            return f"not all numbers are finite (loss {loss:.4g}, gradient norm {gradient_norm:.4g})"
        if not self.deviations:
            self.diverged_in_a_row = 0
            return ""
        window = self.recent.setdefault(kind, [])
        loss_limit = math.inf
        norm_limit = math.inf
        if len(window) >= MIN_WINDOW:
            loss_limit = upper_limit([step_loss for step_loss, _ in window], self.deviations)
            norm_limit = upper_limit([step_norm for _, step_norm in window], self.deviations)
        window.append((min(loss, loss_limit), min(gradient_norm, norm_limit)))
        del window[:-WINDOW]  # keeps the last `WINDOW` steps
        if loss > DIVERGENCE_FACTOR * loss_limit:
            self.diverged_in_a_row += 1
        else:
            self.diverged_in_a_row = 0
        if loss > loss_limit:
            return f"loss {loss:.4g} is above {loss_limit:.4g}"
        if gradient_norm > norm_limit:
            return f"gradient norm {gradient_norm:.4g} is above {norm_limit:.4g}"
        return ""

    def skipped_positions(self, step: int) -> int:
        """Return how many positions are skipped before a step, whose position is `step` plus this number."""
        return sum(count for skip_step, count in self.skips if skip_step <= step)

    def rewind(self, saved_guard: "Guard", saved_step: int, last_step: int) -> None:
        """Go back to a checkpoint, and skip all data that was drawn since then.

        Args:
            saved_guard: the guard in the checkpoint.
            saved_step: step of the checkpoint.
            last_step: the step that was reached before the rewind.
        """
        # The rewind undoes skips after the checkpoint. Their data lies in the range that is skipped now.
        earlier_skips = [(skip_step, count) for skip_step, count in self.skips if skip_step < saved_step]
        first_position = saved_step + sum(count for _, count in earlier_skips)
        end_position = last_step + self.skipped_positions(last_step)
        self.skips = [*earlier_skips, (saved_step, end_position - first_position)]
        self.recent = saved_guard.recent
        self.diverged_in_a_row = 0
        self.rewinds += 1
        self.furthest = max(self.furthest, last_step)

    def metrics(self, step: int) -> dict[str, float]:
        """Return the number of rewinds if it is not 0, and whether a rewind made the training repeat this step."""
        metrics = {"rewinds": float(self.rewinds)} if self.rewinds else {}
        if step <= self.furthest:
            metrics["repeated"] = 1.0
        return metrics

    def state(self) -> dict[str, Any]:
        """Return the state of the guard that a checkpoint stores as JSON.

        JSON stores floats exactly, so the restored state is identical. `diverged_in_a_row` is not stored, because
        it is 0 at every checkpoint from which a training run continues.
        """
        return {
            "recent": {kind: list(window) for kind, window in self.recent.items()},
            "skips": list(self.skips),
            "rewinds": self.rewinds,
            "furthest": self.furthest,
        }

    @classmethod
    def from_state(cls, deviations: float, state: Mapping[str, Any]) -> "Guard":
        """Return the guard with the state that a checkpoint stores."""
        recent = {}
        for kind, window in state.get("recent", {}).items():  # older checkpoints do not have it
            recent[kind] = [(loss, norm) for loss, norm in window]
        skips = [(step, count) for step, count in state["skips"]]
        return cls(deviations, recent, 0, skips, state["rewinds"], state["furthest"])


def upper_limit(values: Sequence[float], deviations: float) -> float:
    """Return the mean plus `deviations` standard deviations. `fmean` adds exactly, so the order does not matter."""
    mean = fmean(values)
    variance = fmean([(value - mean) ** 2 for value in values])
    return mean + deviations * math.sqrt(variance)


def compute_rewind_interval(save_interval: int) -> int:
    """Return the steps between two checkpoints to rewind to, given the steps between two checkpoints.

    It is the smallest multiple of `save_interval` that is at least `REWIND_DISTANCE`.
    """
    return math.ceil(REWIND_DISTANCE / save_interval) * save_interval

"""Detect bad training steps, and decide when to rewind to a checkpoint and which data to skip.

Bad steps are skipped. A step is bad if its loss or gradient norm is not finite or spikes. A spike is more than 6
standard deviations above the mean of the last 128 steps, from the 65th step on (as in OLMo-core's `SkipStepOptimizer`).
Low values are never bad, because losses fall fast at the start of training.

The window contains the last 128 finite steps. Spikes enter the window clipped to their limit. A single spike therefore
hardly raises the limit, but a lasting rise raises the limit step by step until the rise is accepted. If only good steps
entered the window, all steps after a lasting rise would be bad.

Training has diverged and cannot recover if several consecutive steps are not finite, or have a loss above twice the
limit. Smaller spikes do not count: with `contrast.momentum_schedule: refresh`, the loss of a healthy run jumps and
stays high whenever the key encoder becomes a copy of the query encoder. After divergence, training rewinds to an
earlier checkpoint and skips the data since then. Schedules follow the step number, which then differs from the position
in the data:

    steps      0 … 399 | 400 … 503 |                       rewind to 400: (400, 104) joins `skips`
    positions  0 … 399 | 400 … 503 |
    steps      0 … 399             | 400 …
    positions  0 … 399             | 504 …

All workers have the same guard state, and every checkpoint contains it, so that a resumed run makes the same decisions.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

WINDOW = 128  # number of recent steps with which a step is compared
MIN_WINDOW = 64  # number of recent steps required to detect spikes
DIVERGENCE_FACTOR = 2.0  # a loss above this multiple of its limit indicates divergence
REWIND_DISTANCE = 100  # minimum number of steps between a rewind target and the current step

Skips = list[tuple[int, int]]


@dataclass
class Guard:
    """Decides whether a training step is bad by comparing it with earlier steps."""

    deviations: float = 0.0  # spike threshold in standard deviations; 0: only non-finite steps are bad
    window_by_kind: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    """Mapping from step kind to the losses and gradient norms of recent finite steps. Spikes are clipped."""
    consecutive_diverged_steps: int = 0
    """Number of consecutive steps, up to the last step, that were not finite or had a loss above twice its limit."""
    skips: Skips = field(default_factory=list)  # pairs of a step and the number of positions skipped before the step
    rewinds: int = 0
    last_step_reached: int = 0  # largest step before any rewind; steps up to this step are repeated

    def check_step(self, kind: str, loss: float, gradient_norm: float, is_finite: bool) -> str:
        """Compare a step with earlier steps. Return the reason if the step is bad, or "" if it is good.

        Args:
            kind: step kind, see `Learner.kind_of`. Only steps of the same kind are compared.
            loss: weighted sum of the objectives' mean losses.
            gradient_norm: gradient norm before clipping.
            is_finite: whether all losses and gradients are finite.
        """
        if not is_finite:
            self.consecutive_diverged_steps += 1
            return f"not all numbers are finite (loss {loss:.4g}, gradient norm {gradient_norm:.4g})"
        if self.deviations == 0:  # spikes are not detected
            self.consecutive_diverged_steps = 0
            return ""
        window = self.window_by_kind.setdefault(kind, [])
        loss_limit = math.inf
        norm_limit = math.inf
        if len(window) >= MIN_WINDOW:
            loss_limit = upper_limit([step_loss for step_loss, _ in window], self.deviations)
            norm_limit = upper_limit([step_norm for _, step_norm in window], self.deviations)
        # Clip spikes, so that a single spike hardly raises the limits of later steps, but a lasting rise does.
        window.append((min(loss, loss_limit), min(gradient_norm, norm_limit)))
        del window[:-WINDOW]
        if loss > DIVERGENCE_FACTOR * loss_limit:
            self.consecutive_diverged_steps += 1
        else:
            self.consecutive_diverged_steps = 0
        if loss > loss_limit:
            return f"loss {loss:.4g} is above {loss_limit:.4g}"
        if gradient_norm > norm_limit:
            return f"gradient norm {gradient_norm:.4g} is above {norm_limit:.4g}"
        return ""

    def skipped_positions(self, step: int) -> int:
        """Return the number of positions skipped before a step. The step's position is `step` plus this number."""
        return sum(count for skip_step, count in self.skips if skip_step <= step)

    def rewind(self, saved_guard: "Guard", saved_step: int, last_step: int) -> None:
        """Return to a checkpoint's state, and skip all data drawn since then.

        Args:
            saved_guard: the checkpoint's guard.
            saved_step: the checkpoint's step.
            last_step: the last step before the rewind.
        """
        # Skips after the checkpoint are dropped, because the new skip covers their data.
        earlier_skips = [(skip_step, count) for skip_step, count in self.skips if skip_step < saved_step]
        first_position = saved_step + sum(count for _, count in earlier_skips)  # first position after the checkpoint
        end_position = last_step + self.skipped_positions(last_step)  # the first position that no step has used
        self.skips = [*earlier_skips, (saved_step, end_position - first_position)]
        self.window_by_kind = saved_guard.window_by_kind
        self.consecutive_diverged_steps = 0
        self.rewinds += 1
        self.last_step_reached = max(self.last_step_reached, last_step)

    def metrics(self, step: int) -> dict[str, float]:
        """Return the number of `rewinds`, if any, and `repeated` for a step that is taken again after a rewind."""
        metrics = {"rewinds": float(self.rewinds)} if self.rewinds else {}
        if step <= self.last_step_reached:
            metrics["repeated"] = 1.0
        return metrics

    def state(self) -> dict[str, Any]:
        """Return the state that a checkpoint stores as JSON.

        JSON stores floats exactly, so the restored state is identical. `consecutive_diverged_steps` is omitted. While
        training diverges, no checkpoint is saved except at the run's last step, and no step follows that checkpoint.
        """
        # `recent` and `furthest` are earlier names, kept so that older checkpoints remain readable.
        return {
            "recent": {kind: list(window) for kind, window in self.window_by_kind.items()},
            "skips": list(self.skips),
            "rewinds": self.rewinds,
            "furthest": self.last_step_reached,
        }

    @classmethod
    def from_state(cls, deviations: float, state: Mapping[str, Any]) -> "Guard":
        """Restore a guard from the state in a checkpoint."""
        window_by_kind = {}
        for kind, window in state.get("recent", {}).items():  # older checkpoints have no windows
            window_by_kind[kind] = [(loss, norm) for loss, norm in window]  # JSON stores pairs as lists
        skips = [(step, count) for step, count in state["skips"]]
        return cls(
            deviations, window_by_kind, skips=skips, rewinds=state["rewinds"], last_step_reached=state["furthest"]
        )


def upper_limit(values: Sequence[float], deviations: float) -> float:
    """Return the mean plus `deviations` standard deviations. `fmean` makes the result independent of the order."""
    mean = fmean(values)
    variance = fmean([(value - mean) ** 2 for value in values])
    return mean + deviations * math.sqrt(variance)


def compute_rewind_interval(save_interval: int) -> int:
    """Return the steps between two rewind targets: the smallest multiple of `save_interval` >= `REWIND_DISTANCE`."""
    return math.ceil(REWIND_DISTANCE / save_interval) * save_interval

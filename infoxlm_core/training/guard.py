"""Detect bad training steps, and decide when to rewind to a checkpoint and which data to skip then.

A step is bad if its loss or gradient norm is not finite, or far above those of the good steps before it: 6 standard
deviations above the mean of the last 128, from the 64th good step on (as OLMo-core's `SkipStepOptimizer`). A low value
is never bad: losses fall fast at the start of every training.

Several bad steps in a row, or too many among the last thousand, mean that the training cannot recover by itself. It
then rewinds to a checkpoint from well before them and skips the data of the steps in between. The number of a step, by
which schedules go, therefore differs from its position in the stream of data:

    steps      0 … 399 | 400 … 503 |                       rewind to 400: (400, 104) joins `skips`
    positions  0 … 399 | 400 … 503 |
    steps      0 … 399             | 400 …
    positions  0 … 399             | 504 …

All workers share the state of the guard, and every checkpoint contains it: an interrupted run makes the same decisions.
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field
from typing_extensions import TypedDict

WINDOW = 128  # good steps with which a step is compared
MIN_WINDOW = 64  # with fewer good steps, no step is a spike
RECENT_STEPS, MAX_RECENT_BAD = 1_000, 10  # more bad steps among the recent ones: the training is in trouble
DISTANCE = 100  # steps by which a checkpoint must precede the trouble to be a rewind target

Skips = list[tuple[int, int]]
_TwoFloats = Annotated[list[float], Field(min_length=2, max_length=2)]
_TwoInts = Annotated[list[int], Field(min_length=2, max_length=2)]


class GuardState(TypedDict):
    """The guard's state in a checkpoint."""

    good: dict[str, list[_TwoFloats]]
    bad: list[int]
    skips: list[_TwoInts]
    rewinds: int
    furthest: int


@dataclass
class Guard:
    """Judges the steps of one training by those before them."""

    deviations: float = 0.0  # limit of a spike, in standard deviations; 0: only non-finite steps are bad
    good: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    """Loss and gradient norm of the last good steps, by the kind of step."""
    bad: list[int] = field(default_factory=list)  # numbers of the bad steps among the recent ones
    skips: Skips = field(default_factory=list)  # (step, number of positions skipped before it)
    rewinds: int = 0
    furthest: int = 0  # the last step before a rewind: steps up to it are repeated

    def judge(self, step: int, kind: str, loss: float, norm: float, finite: bool) -> str:
        """Record a step; return what is wrong with it, or "" if it is good.

        Args:
            step: number of steps including this one.
            kind: see `Learner.kind_of`; only steps of one kind are compared.
            loss: weighted sum of the mean losses.
            norm: of the gradient before clipping.
            finite: whether all losses and gradients are finite.
        """
        reason = self._reason(kind, loss, norm, finite)
        if reason:
            self.bad = [bad_step for bad_step in self.bad if bad_step > step - RECENT_STEPS] + [step]
        elif self.deviations:
            window = self.good.setdefault(kind, [])
            window.append((loss, norm))
            del window[:-WINDOW]
        return reason

    def _reason(self, kind: str, loss: float, norm: float, finite: bool) -> str:
        if not finite:
            return f"not all numbers are finite (loss {loss:.4g}, gradient norm {norm:.4g})"
        window = self.good.get(kind, [])
        if not self.deviations or len(window) < MIN_WINDOW:
            return ""
        losses, norms = zip(*window, strict=True)
        for name, value, values in (("loss", loss, losses), ("gradient norm", norm, norms)):
            limit = upper_limit(values, self.deviations)
            if value > limit:
                return f"{name} {value:.4g} is above {limit:.4g}"
        return ""

    def trouble(self, step: int, bad_in_a_row: int, max_bad_steps: int) -> str:
        """Return why a training cannot continue after a step, or "" if it can."""
        if bad_in_a_row >= max_bad_steps:
            return f"{bad_in_a_row} steps in a row up to step {step}"
        recent = sum(bad_step > step - RECENT_STEPS for bad_step in self.bad)
        if self.deviations and recent > MAX_RECENT_BAD:
            return f"{recent} of the last {RECENT_STEPS:,} steps up to step {step}"
        return ""

    def skipped_positions(self, step: int) -> int:
        """Return how many positions are skipped before a step, whose position is `step` plus this number."""
        return sum(count for skip_step, count in self.skips if skip_step <= step)

    def rewind(self, past: "Guard", target: int, step: int) -> None:
        """Rewind from `step` to `target`, and skip all data in between.

        Args:
            past: the guard in the checkpoint of step `target`.
            target: step of the checkpoint.
            step: number of steps that were taken.
        """
        earlier = [(skip_step, count) for skip_step, count in self.skips if skip_step < target]
        first_position = target + sum(count for _, count in earlier)
        self.skips = [*earlier, (target, step + self.skipped_positions(step) - first_position)]
        self.good, self.bad = past.good, past.bad
        self.rewinds += 1
        self.furthest = max(self.furthest, step)

    def figures(self, step: int) -> dict[str, float]:
        """Return points of the curves: the number of rewinds, if any, and whether this step is a repeated one."""
        if not self.rewinds:
            return {}
        repeated = {"repeated": 1.0} if step <= self.furthest else {}
        return {"rewinds": float(self.rewinds)} | repeated

    def state(self) -> dict[str, Any]:
        """Return a copy of everything but the setting, for JSON, which stores numbers exactly."""
        return {name: copy.deepcopy(value) for name, value in vars(self).items() if name != "deviations"}

    @classmethod
    def from_state(cls, deviations: float, state: GuardState | None) -> "Guard":
        """Return the guard that a checkpoint contains; a new guard if the checkpoint is older than guards."""
        if not state:
            return cls(deviations)
        good = {kind: [(loss, norm) for loss, norm in values] for kind, values in state["good"].items()}
        skips = [(step, count) for step, count in state["skips"]]
        return cls(deviations, good, state["bad"], skips, state["rewinds"], state["furthest"])


def upper_limit(values: Sequence[float], deviations: float) -> float:
    """Return the mean plus so many standard deviations; sums are exact, so their order does not matter."""
    mean = math.fsum(values) / len(values)
    return mean + deviations * math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))


def target_spacing(every: int) -> int:
    """Return the spacing of rewind targets where checkpoints are saved every so many steps: at least `DISTANCE`."""
    return math.ceil(DISTANCE / every) * every

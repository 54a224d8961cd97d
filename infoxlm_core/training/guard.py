"""The guard of a training: which steps are bad, when it goes back to a checkpoint, and which data it then leaves out.

A step is bad if its loss or gradient norm is not finite, or far above those of the good steps before it. The law is
that of OLMo-core's `SkipStepOptimizer`: 6 standard deviations above the mean of the last 128, from the 64th good step
on. Downward is never bad: a loss that falls fast, as at the start of every training, is what one wants.

Bad steps in a row, or too many of the last thousand, do not heal by themselves. Then the training goes back to a
checkpoint from well before them and goes on with other data: those of the steps in between are left out. For that, a
step (what the schedules count) and its position in the stream of data are two numbers:

    steps      0 … 399 | 400 … 503 |                       back to 400: (400, 104) joins `skips`
    positions  0 … 399 | 400 … 503 |
    steps      0 … 399             | 400 …
    positions  0 … 399             | 504 …

Everything here is numbers that all workers share, and all of it is in each checkpoint: a run that is interrupted
decides as one that is not.
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field
from typing_extensions import TypedDict

WINDOW = 128  # good steps that a step is compared with
LEAST = 64  # fewer than so many say nothing
RECENT, MOST_BAD = 1_000, 10  # of so many steps more than so many are bad: 1 %
DISTANCE = 100  # steps that a checkpoint must lie back to be from before the trouble

Skips = list[tuple[int, int]]


class Said(TypedDict):
    """What a checkpoint says of a guard."""

    good: dict[str, list[Annotated[list[float], Field(min_length=2, max_length=2)]]]
    bad: list[int]
    skips: list[Annotated[list[int], Field(min_length=2, max_length=2)]]
    rewinds: int
    furthest: int


@dataclass
class Guard:
    """What the guard of one training remembers."""

    deviations: float = 0.0  # a step is bad above so many; 0: only if it is not finite
    good: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    """Loss and gradient norm of the last good steps, by the kind of step."""
    bad: list[int] = field(default_factory=list)  # those of the last steps that were bad
    skips: Skips = field(default_factory=list)  # (step, positions that are left out before it)
    rewinds: int = 0
    furthest: int = 0  # the last step that was reached before a rewind: up to there steps are taken again

    def look(self, step: int, kind: str, loss: float, norm: float, finite: bool) -> str:
        """Remember a step; return what is wrong with it, nothing if it is good. `kind`: see `Learner.kind_of`."""
        before = self.good.setdefault(kind, []) if self.deviations else []
        wrong = "" if finite else f"not all numbers are finite (loss {loss:.4g}, gradient norm {norm:.4g})"
        if finite and len(before) >= LEAST:
            for name, value, values in zip(
                ("loss", "gradient norm"), (loss, norm), zip(*before, strict=True), strict=True
            ):
                if not wrong and value > (limit := highest(values, self.deviations)):
                    wrong = f"{name} {value:.4g} is above {limit:.4g}"
        if wrong:
            self.bad = [one for one in self.bad if one > step - RECENT] + [step]
        elif self.deviations:
            before.append((loss, norm))
            del before[:-WINDOW]
        return wrong

    def trouble(self, step: int, bad_in_a_row: int, max_bad_steps: int) -> str:
        """Why a training cannot go on after a step, in words; nothing if it can."""
        if bad_in_a_row >= max_bad_steps:
            return f"{bad_in_a_row} steps in a row up to step {step}"
        if self.deviations and (count := sum(one > step - RECENT for one in self.bad)) > MOST_BAD:
            return f"{count} of the last {RECENT:,} steps up to step {step}"
        return ""

    def skipped(self, step: int) -> int:
        """Positions that are left out before a step: its own is `step` plus these."""
        return sum(count for at, count in self.skips if at <= step)

    def go_back(self, past: "Guard", to: int, step: int) -> None:
        """Remember after `step` steps what `past`, of the checkpoint of step `to`, did, and that nothing is to be seen
        again that was seen since."""
        earlier = [(at, count) for at, count in self.skips if at < to]
        begin = to + sum(count for _, count in earlier)
        self.skips = [*earlier, (to, step + self.skipped(step) - begin)]
        self.good, self.bad = past.good, past.bad
        self.rewinds, self.furthest = self.rewinds + 1, max(self.furthest, step)

    def figures(self, step: int) -> dict[str, float]:
        """What the curves say: rewinds, if there were any, and whether this step was taken before."""
        again = {"repeated": 1.0} if step <= self.furthest else {}
        return {"rewinds": float(self.rewinds)} | again if self.rewinds else {}

    def state(self) -> dict[str, Any]:
        """A copy of all of it but the setting, for JSON, whose numbers are exact."""
        return {name: copy.deepcopy(value) for name, value in vars(self).items() if name != "deviations"}

    @classmethod
    def of(cls, deviations: float, state: Said | None) -> "Guard":
        """The guard that a checkpoint tells of; a new one, if it is older than guards."""
        if not state:
            return cls(deviations)
        good = {kind: [(loss, norm) for loss, norm in values] for kind, values in state["good"].items()}
        skips = [(at, count) for at, count in state["skips"]]
        return cls(deviations, good, state["bad"], skips, state["rewinds"], state["furthest"])


def highest(values: Sequence[float], deviations: float) -> float:
    """Mean plus so many standard deviations; sums are exact, so that the order does not matter."""
    mean = math.fsum(values) / len(values)
    return mean + deviations * math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))


def spacing(every: int) -> int:
    """Of checkpoints every so many steps, those at multiples of this are kept to go back to."""
    return -(-DISTANCE // every) * every

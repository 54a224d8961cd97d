"""How everything here is measured: side by side, in one process, on one thread, ratios taken inside a round.

In every round each variant runs once on that round's input, in rotated order, after a garbage collection. Neighbours
on the machine slow all variants of a round alike, so the result is the median over rounds of the ratio within each.
"""

import gc
import logging
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

logger = logging.getLogger(__name__)

OURS = "ours"
LOSS, GRADIENT, TENSOR = 1e-5, 1e-5, 1e-4
"""Largest relative differences of two sides that are timed: loss, whole gradient, worst tensor of the gradient."""


class Unequal(AssertionError):
    """Two sides of a benchmark do not compute the same: their times must not be compared."""


@dataclass
class Case:
    """One comparison: what ran, on what, and how long it took.

    Attributes:
        name: such as `mlm_step, ragged, 32k`.
        inputs: what one run gets: real tokens, padding, targets.
        about: for each variant its settings, in words.
        equality: for each peer the relative differences found before timing.
        unit: what the work of a run is counted in.
        work: for each variant the units of each round; the same for all unless they draw their own data.
        cpu, wall: for each variant the seconds of each round.
        peak: for each variant bytes above the weights, where memory was measured.
    """

    name: str
    inputs: dict[str, Any] = field(default_factory=dict)
    about: dict[str, str] = field(default_factory=dict)
    equality: dict[str, dict[str, float]] = field(default_factory=dict)
    unit: str = "tokens"
    work: dict[str, list[float]] = field(default_factory=dict)
    cpu: dict[str, list[float]] = field(default_factory=dict)
    wall: dict[str, list[float]] = field(default_factory=dict)
    peak: dict[str, int] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    def ratios(self, peer: str, ours: str = OURS) -> list[float]:
        """CPU seconds a unit of `peer` by those of ours, round by round; peak memory the other way round."""
        if self.peak:
            return [self.peak[ours] / self.peak[peer]]
        theirs, mine = self._each(peer), self._each(ours)
        return [a / b for a, b in zip(theirs, mine, strict=True)]

    def _each(self, variant: str) -> list[float]:
        return [seconds / work for seconds, work in zip(self.cpu[variant], self.work[variant], strict=True)]

    def rate(self, variant: str) -> float:
        """Units in a CPU second, the median round."""
        return 1 / statistics.median(self._each(variant))


@dataclass
class Sheet:
    """A table of figures that are no comparison inside rounds; its rows share their columns."""

    name: str
    about: dict[str, str]
    rows: list[dict[str, Any]]


def measure(case: Case, variants: Mapping[str, Callable[[int], float | None]], rounds: int) -> Case:
    """Time variants and write the seconds into the case.

    Args:
        variants: each takes the number of a round and does that round's work; it returns how many units that was,
            or None where `case.inputs` knows them under the name of the unit.
        rounds: measured ones; one more, number 0, warms up. 0: none at all.
    """
    names = list(variants)
    for number in range(rounds + 1) if rounds else ():
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            gc.collect()
            wall, cpu = time.perf_counter(), time.process_time()
            work = variants[name](number)
            cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
            if number:
                case.cpu.setdefault(name, []).append(cpu)
                case.wall.setdefault(name, []).append(wall)
                case.work.setdefault(name, []).append(float(case.inputs[case.unit] if work is None else work))
    for name in case.cpu:
        logger.info("%s: %s %.4g %s per CPU second", case.name, name, case.rate(name), case.unit)
    return case


def differences(loss: float, gradient: Mapping[str, Tensor], other_loss: float, other: Mapping[str, Tensor],
                ignored: Sequence[str] = ()) -> dict[str, float]:  # fmt: skip
    """How far two sides are apart, relative: loss, whole gradient, worst tensor of the gradient.

    Args:
        gradient, other: tensors under the same names.
        ignored: ends of names whose gradient is zero but for rounding; they count in the whole gradient only.
    """
    missing = gradient.keys() ^ other.keys()
    if missing:
        raise Unequal(f"only one side has a gradient for {', '.join(sorted(missing))}")
    squares = {name: float((gradient[name] - other[name]).double().square().sum()) for name in other}
    sizes = {name: float(other[name].double().square().sum()) for name in other}
    judged = [name for name in other if not name.endswith(tuple(ignored) or "\0") and sizes[name]]
    return {
        "loss": abs(loss - other_loss) / abs(other_loss),
        "gradient": (sum(squares.values()) / sum(sizes.values())) ** 0.5,
        "worst tensor": max((squares[name] / sizes[name]) ** 0.5 for name in judged),
    }


def require_equal(name: str, peer: str, found: Mapping[str, float]) -> dict[str, float]:
    """Raise `Unequal` if two sides differ by more than rounding does; else return the differences."""
    for what, limit in (("loss", LOSS), ("gradient", GRADIENT), ("worst tensor", TENSOR)):
        if not found[what] <= limit:
            raise Unequal(f"{name}: {what} differs from {peer} by {found[what]:.2e}, allowed {limit:.0e}")
    return dict(found)

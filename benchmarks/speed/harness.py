"""Measure the speed of variants side by side, in one process and one thread, and compare them within each round.

In every round each variant runs once on that round's input, in rotated order, after a garbage collection. Other work on
the machine slows all variants of a round alike, so the result is the median over rounds of the ratio within each.
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
LIMITS = {"loss": 1e-5, "gradient": 1e-5, "worst tensor": 1e-4}
"""Largest relative differences between two variants that are timed."""


class Unequal(AssertionError):
    """Two variants do not compute the same, so their times must not be compared."""


@dataclass
class Case:
    """One comparison of variants: their input and the time or the memory that they took. Most fields are by variant."""

    name: str  # such as `mlm_step, ragged, 32k`
    inputs: dict[str, Any] = field(default_factory=dict)  # figures of the input of one run: tokens, padding, targets
    about: dict[str, str] = field(default_factory=dict)  # settings of each variant in words
    equality: dict[str, dict[str, float]] = field(default_factory=dict)  # relative differences of each peer from ours
    unit: str = "tokens"  # in which the work of a round is counted
    work: dict[str, list[float]] = field(default_factory=dict)  # units of work in each round
    cpu: dict[str, list[float]] = field(default_factory=dict)  # CPU seconds of each round
    wall: dict[str, list[float]] = field(default_factory=dict)  # seconds of each round
    peak: dict[str, int] = field(default_factory=dict)  # bytes above the weights, if memory is measured and not time
    skipped: dict[str, str] = field(default_factory=dict)  # why a variant did not run

    def ratios(self, peer: str) -> list[float]:
        """Return CPU seconds per unit of a peer divided by ours, for each round. For memory, divide our peak."""
        if self.peak:
            return [self.peak[OURS] / self.peak[peer]]
        pairs = zip(self.seconds_per_unit(peer), self.seconds_per_unit(OURS), strict=True)
        return [peer_seconds / our_seconds for peer_seconds, our_seconds in pairs]

    def seconds_per_unit(self, variant: str) -> list[float]:
        return [seconds / work for seconds, work in zip(self.cpu[variant], self.work[variant], strict=True)]

    def rate(self, variant: str) -> float:
        """Return the units per CPU second of the median round."""
        return 1 / statistics.median(self.seconds_per_unit(variant))


def measure(case: Case, variants: Mapping[str, Callable[[int], float | None]], rounds: int) -> Case:
    """Time all variants in every round and write the seconds into the case.

    Args:
        variants: name -> function that does the work of a round, given by its number, and returns the units of work.
            If it returns None, the units are `case.inputs[case.unit]`.
        rounds: number of timed rounds. Round 0 comes before them as a warm-up. With 0 rounds, nothing runs.
    """
    if not rounds:
        return case
    names = list(variants)
    for number in range(rounds + 1):
        first = number % len(names)  # each round starts with another variant, so that none has an advantage
        for name in names[first:] + names[:first]:
            gc.collect()
            wall_start = time.perf_counter()
            cpu_start = time.process_time()
            unit_count = variants[name](number)
            cpu = time.process_time() - cpu_start
            wall = time.perf_counter() - wall_start
            if unit_count is None:
                unit_count = case.inputs[case.unit]
            if number > 0:
                case.cpu.setdefault(name, []).append(cpu)
                case.wall.setdefault(name, []).append(wall)
                case.work.setdefault(name, []).append(float(unit_count))
    for name in case.cpu:
        logger.info("%s: %s %.4g %s per CPU second", case.name, name, case.rate(name), case.unit)
    return case


def compute_differences(
    loss: float, gradient: Mapping[str, Tensor], peer_loss: float, peer_gradient: Mapping[str, Tensor],
    ignored: Sequence[str] = (),
) -> dict[str, float]:  # fmt: skip
    """Return the relative differences of two variants in the loss, the whole gradient and its worst tensor.

    Args:
        gradient, peer_gradient: parameter name -> gradient.
        ignored: endings of the names of parameters whose gradients are rounding errors around zero. Their relative
            differences are large, so they cannot be the worst tensor.
    """
    missing = gradient.keys() ^ peer_gradient.keys()
    if missing:
        raise Unequal(f"Only one variant has a gradient for {', '.join(sorted(missing))}.")
    squared_differences = {}
    squared_norms = {}
    for name, tensor in peer_gradient.items():
        squared_differences[name] = float((gradient[name] - tensor).double().square().sum())
        squared_norms[name] = float(tensor.double().square().sum())
    tensor_differences = []
    for name, squared_norm in squared_norms.items():
        if squared_norm and not name.endswith(tuple(ignored)):
            tensor_differences.append((squared_differences[name] / squared_norm) ** 0.5)
    return {
        "loss": abs(loss - peer_loss) / abs(peer_loss),
        "gradient": (sum(squared_differences.values()) / sum(squared_norms.values())) ** 0.5,
        "worst tensor": max(tensor_differences),
    }


def require_equal(name: str, peer: str, relative: Mapping[str, float]) -> dict[str, float]:
    """Return the differences. Raise `Unequal` if one is larger than rounding explains."""
    for quantity, limit in LIMITS.items():
        if not relative[quantity] <= limit:
            raise Unequal(f"{name}: {quantity} differs from {peer} by {relative[quantity]:.2e}, allowed {limit:.0e}.")
    return dict(relative)

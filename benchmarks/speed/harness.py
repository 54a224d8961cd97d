"""Measure the speed of variants side by side, in one process and one thread.

In every round, each variant runs once on the round's input, in rotated order, after a garbage collection. Other work on
the machine slows all variants of a round alike, so the result is the median over rounds of the ratio within a round.
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

Round = Callable[[int], float | None]
"""A function that takes the number of a round, does the round's work, and returns the units of work or None."""
OURS = "ours"
LIMITS = {"loss": 1e-5, "gradient": 1e-5, "worst tensor": 1e-4}
"""Largest relative differences between two timed variants."""


class Unequal(AssertionError):
    """Two variants compute different results, so their times must not be compared."""


@dataclass
class Case:
    """One comparison of variants, with their input and the measured time or memory. Mappings have variants as keys."""

    name: str  # such as `mlm_step, ragged, 32k`
    inputs: dict[str, Any] = field(default_factory=dict)  # facts about the input of one run: tokens, padding, targets
    about: dict[str, str] = field(default_factory=dict)  # description of each variant
    equality: dict[str, dict[str, float]] = field(default_factory=dict)  # relative differences of each peer from ours
    unit: str = "tokens"  # unit of work
    work: dict[str, list[float]] = field(default_factory=dict)  # units of work in each round
    cpu: dict[str, list[float]] = field(default_factory=dict)  # CPU seconds of each round
    wall: dict[str, list[float]] = field(default_factory=dict)  # seconds of each round
    peak: dict[str, int] = field(default_factory=dict)  # bytes above the weights, in cases that measure memory
    skipped: dict[str, str] = field(default_factory=dict)  # reason why a variant did not run

    def ratios(self, peer: str) -> list[float]:
        """Return the peer's CPU seconds per unit divided by ours, by round.

        If the case measures memory, return a single ratio: our peak divided by the peer's peak.
        """
        if self.peak:
            return [self.peak[OURS] / self.peak[peer]]
        pairs = zip(self.seconds_per_unit(peer), self.seconds_per_unit(OURS), strict=True)
        return [peer_seconds / our_seconds for peer_seconds, our_seconds in pairs]

    def seconds_per_unit(self, variant: str) -> list[float]:
        """Return the CPU seconds per unit of work, by round."""
        return [seconds / work for seconds, work in zip(self.cpu[variant], self.work[variant], strict=True)]

    def rate(self, variant: str) -> float:
        """Return the units per CPU second in the median round."""
        return 1 / statistics.median(self.seconds_per_unit(variant))


def measure(case: Case, variants: Mapping[str, Round], rounds: int) -> Case:
    """Time all variants in every round and store the seconds in the case.

    Args:
        variants: functions by name. If a function returns None, its work was `case.inputs[case.unit]` units.
        rounds: number of timed rounds. A warm-up, round 0, precedes them. With 0 rounds, nothing runs.
    """
    if not rounds:
        return case
    names = list(variants)
    for number in range(rounds + 1):
        first = number % len(names)  # each round starts with another variant, so that none has an advantage
        for name in names[first:] + names[:first]:
            gc.collect()  # no variant pays for the garbage of another
            wall_start = time.perf_counter()
            cpu_start = time.process_time()
            unit_count = variants[name](number)
            cpu = time.process_time() - cpu_start
            wall = time.perf_counter() - wall_start
            if unit_count is None:
                unit_count = case.inputs[case.unit]
            if number > 0:  # not the warm-up
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
    """Compute the relative differences of two variants in the loss, the whole gradient and the worst tensor.

    Args:
        gradient, peer_gradient: gradients by parameter name.
        ignored: endings of parameter names. The gradients of these parameters are rounding errors around zero, so they
            cannot be the worst tensor.
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
        # A gradient of zero has no relative difference, but it counts in the whole gradient.
        if squared_norm and not name.endswith(tuple(ignored)):
            tensor_differences.append((squared_differences[name] / squared_norm) ** 0.5)
    return {
        "loss": abs(loss - peer_loss) / abs(peer_loss),
        "gradient": (sum(squared_differences.values()) / sum(squared_norms.values())) ** 0.5,
        "worst tensor": max(tensor_differences),
    }


def gradient_of(tensor: Tensor) -> Tensor:
    """Return the gradient of a tensor after a backward pass, which must have computed it."""
    assert tensor.grad is not None
    return tensor.grad


def require_equal(name: str, peer: str, relative: Mapping[str, float]) -> dict[str, float]:
    """Return the differences unchanged. Raise `Unequal` if a difference is larger than rounding explains."""
    for quantity, limit in LIMITS.items():
        if not relative[quantity] <= limit:  # also true for NaN
            raise Unequal(f"{name}: {quantity} differs from {peer} by {relative[quantity]:.2e}, allowed {limit:.0e}.")
    return dict(relative)

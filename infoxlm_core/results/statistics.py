"""Values of several seeds -> mean, sample standard deviation and the 95 % interval of the mean (Student's t).

Also how a metric is read: which way is better, whether it is a share, with how many decimals it is shown.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean, stdev

from scipy import special

_SHARES = ("retrieval/", "classification/", "xnli/", "mlqa/", "xlco/accuracy")
_LOWER = ("perplexity/", "loss/", "transfer_gap")


@dataclass(frozen=True)
class Statistic:
    """One figure over seeds; a published one, or one of a single seed, has its mean alone."""

    n: int
    mean: float | None
    deviation: float | None = None
    interval: tuple[float, float] | None = None
    values: Mapping[int, float | None] = field(default_factory=dict)  # by seed; None for one that is not finite


def over_seeds(values: Mapping[int, float]) -> Statistic:
    """Sum up values by seed; one that is not finite does not count.

    `deviation` and `interval` are None for a single seed, `mean` too for none.
    """
    finite = [value for value in values.values() if math.isfinite(value)]
    n, mean = len(finite), fmean(finite) if finite else None
    by_seed = {seed: value if math.isfinite(value) else None for seed, value in values.items()}
    if mean is None or n < 2:
        return Statistic(n, mean, values=by_seed)
    deviation = stdev(finite)
    half = float(special.stdtrit(n - 1, 0.975)) * deviation / math.sqrt(n)
    return Statistic(n, mean, deviation, (mean - half, mean + half), by_seed)


def over_seeds_each(by_seed: Mapping[int, Mapping[str, float]]) -> dict[str, Statistic]:
    """{metric: value} by seed -> {metric: its statistic}."""
    names = next(iter(by_seed.values()))
    return {name: over_seeds({seed: values[name] for seed, values in by_seed.items()}) for name in names}


def exact(value: float | None) -> Statistic | None:
    """A figure that is known without its seeds."""
    return None if value is None else Statistic(1, value)


def is_lower_better(metric: str) -> bool:
    """Whether less is better."""
    return any(part in metric for part in _LOWER)


def is_share(metric: str) -> bool:
    """Whether a metric is a share from 0 to 1, shown in percent."""
    return metric.startswith(_SHARES) and not metric.endswith("/best_layer")


def show(metric: str, value: float | None, like: float | None = None) -> str:
    """A value as people read it: percent with two decimals, else four digits, or as many decimals as `like` gets."""
    if value is None:
        return "–"
    if is_share(metric):
        return f"{100 * value:.2f}"
    whole = len(str(int(abs(value if like is None else like))))
    return f"{value:,.{max(0, 4 - whole)}f}"


def name_column(metric: str) -> str:
    """A column's name with its unit and which way is better."""
    parts = [metric] + ["%"] * is_share(metric) + ["↓" if is_lower_better(metric) else "↑"]
    return "\N{NO-BREAK SPACE}".join(parts)

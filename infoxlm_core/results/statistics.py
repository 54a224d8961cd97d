"""Compute and compare statistics of metrics over seeds, and name metrics."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import Any

from scipy import special

from infoxlm_core.tasks import TASKS

CONFIDENCE = 0.95
"""Confidence level of all intervals: for means over seeds, and for a candidate's gain in the promotion gate."""

INTERVAL = f"{100 * CONFIDENCE:g} % interval"
"""Name of an interval in texts."""


@dataclass(frozen=True)
class Statistic:
    """A metric over seeds. A published figure or the result of a single seed has only a mean."""

    n: int
    mean: float | None
    deviation: float | None = None
    interval: tuple[float, float] | None = None
    values: Mapping[int, float | None] = field(default_factory=dict)  # by seed; None if a value is not finite


def summarise_seeds(values: Mapping[int, float | None], comparisons: int = 1) -> Statistic:
    """Compute the mean, sample deviation and confidence interval (Student's t) of a metric from its finite values.

    Args:
        values: values of the metric by seed.
        comparisons: number of intervals reported together. Bonferroni's correction widens each interval, so that all
            intervals together contain their true means with probability `CONFIDENCE`.
    """
    finite_by_seed = {seed: value for seed, value in values.items() if value is not None and math.isfinite(value)}
    finite_or_none = {seed: finite_by_seed.get(seed) for seed in values}
    finite = list(finite_by_seed.values())
    n = len(finite)
    if n < 2:  # one value has no deviation
        return Statistic(n, fmean(finite) if finite else None, values=finite_or_none)
    mean = fmean(finite)
    deviation = stdev(finite)
    alpha = (1 - CONFIDENCE) / comparisons  # significance level of one interval
    quantile = float(special.stdtrit(n - 1, 1 - alpha / 2))  # inverse of Student's t distribution
    half_width = quantile * deviation / math.sqrt(n)
    return Statistic(n, mean, deviation, (mean - half_width, mean + half_width), finite_or_none)


def summarise_metrics_by_seed(
    metrics_by_seed: Mapping[int, Mapping[str, Any]], names: Iterable[str] = ()
) -> dict[str, Statistic]:
    """Compute the statistic of each metric over the seeds that have a value of it.

    Args:
        metrics_by_seed: values by seed and metric.
        names: names of the metrics; by default all.
    """
    selected_names = list(names)
    if not selected_names:
        for metrics in metrics_by_seed.values():
            selected_names += metrics
    statistics = {}
    for name in dict.fromkeys(selected_names):  # removes duplicates, because most seeds have the same metrics
        values = {seed: metrics[name] for seed, metrics in metrics_by_seed.items() if name in metrics}
        statistics[name] = summarise_seeds(values)
    return statistics


def compare_seeds(variant: Statistic, reference: Statistic, comparisons: int) -> Statistic:
    """Compute the statistic of a variant's differences from a reference, over the seeds that both have.

    Trials with the same seed read the same data in the same order, so differences vary less than the metrics.

    Args:
        variant: metric of the variant.
        reference: same metric of the reference.
        comparisons: number of variants compared with the reference.
    """
    differences = {}
    for seed, value in variant.values.items():
        reference_value = reference.values.get(seed)
        if value is not None and reference_value is not None:
            differences[seed] = value - reference_value
    return summarise_seeds(differences, comparisons)


def is_share(metric: str) -> bool:
    """Return whether a metric is a share from 0 to 1. Shares are shown in percent."""
    if metric == "probe/retrieval" or metric.endswith("/accuracy"):  # training curves
        return True
    task_name, _, metric_name = metric.partition("/")
    task_names = {"guard", *TASKS}  # only the stage `evaluate` has the guard, so it is not in the registry
    for task in TASKS.values():
        task_names.update(task.presets)
    last_part = metric_name.rpartition("/")[2]
    is_whole_number = last_part in ("best_layer", "layer", "seeds")
    return task_name in task_names and not is_whole_number


def is_lower_better(metric: str) -> bool:
    """Return whether lower values of a metric are better."""
    return any(part in metric for part in ("perplexity/", "loss/", "transfer_gap"))


def name_column(metric: str, is_percentage: bool) -> str:
    """Return a metric's name with its unit and an arrow that points to better values."""
    words = [metric, "%"] if is_percentage else [metric]
    words.append("↓" if is_lower_better(metric) else "↑")
    return "\N{NO-BREAK SPACE}".join(words)

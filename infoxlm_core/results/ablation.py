"""Metrics of an ablation's trials -> one comparison: variants over their seeds, each with one whole evaluation."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from infoxlm_core.errors import InputError
from infoxlm_core.results import published, trials
from infoxlm_core.results.statistics import Statistic, is_lower_better, over_seeds, show
from infoxlm_core.results.trials import Trial


@dataclass(frozen=True)
class Variant:
    """One variant over its seeds."""

    what: str
    seeds: tuple[int, ...]
    unfinished: tuple[int, ...]
    metrics: Mapping[str, Statistic]


@dataclass(frozen=True)
class Comparison:
    """What the seeds of an ablation tell."""

    title: str
    metrics: tuple[str, ...]
    variants: Mapping[str, Variant]
    said: Mapping[str, str] = field(default_factory=dict)  # of each metric the order of the variants, and what overlaps

    @property
    def unfinished(self) -> tuple[str, ...]:
        """The trials that are missing, each named."""
        return tuple(f"{name} seed {seed}" for name, row in self.variants.items() for seed in row.unfinished)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as comparison.json holds them."""
        return asdict(self)

    def flatten(self) -> dict[str, float]:
        """As metrics: `full/retrieval/best`, and `.../deviation`, `.../n`."""
        flat: dict[str, float | None] = {}
        for variant, row in self.variants.items():
            for name, found in row.metrics.items():
                under = f"{variant}/{name}"
                flat |= {under: found.mean, f"{under}/deviation": found.deviation, f"{under}/n": found.n}
        return {name: value for name, value in flat.items() if value is not None}


def compare(
    results: Iterable[tuple[Trial, Mapping[str, float]]], title: str, metrics: Sequence[str] = ()
) -> Comparison:
    """Compare variants over their seeds, in the order of the results; a trial that did not finish has no metrics.

    The default are the headlines, the contrast layer and the paper's tasks, of these what a trial has.

    Raises:
        InputError: no trial has a metric that is named.
    """
    groups: dict[str, list[tuple[Trial, Mapping[str, float]]]] = {}
    for trial, values in results:
        groups.setdefault(trial.model, []).append((trial, values))
    known = {name for group in groups.values() for _, values in group for name in values}
    for name in metrics:
        if name not in known:
            raise InputError(f"no trial has a metric {name!r}; known are {', '.join(sorted(known)) or 'none'}")
    default = (*trials.HEADLINES, "retrieval/contrast", *published.METRICS)
    chosen = tuple(metrics) or tuple(name for name in default if name in known)
    variants = {
        variant: Variant(
            what=group[0][0].what,
            seeds=tuple(sorted(trial.seed for trial, _ in group)),
            unfinished=tuple(sorted(trial.seed for trial, values in group if not values)),
            metrics={
                name: over_seeds({trial.seed: values[name] for trial, values in group if name in values})
                for name in chosen
            },
        )
        for variant, group in groups.items()
    }
    return Comparison(title, chosen, variants, {name: describe(name, variants) for name in chosen})


def describe(metric: str, variants: Mapping[str, Variant]) -> str:
    """Say the order of the variants, and of which neighbours the intervals overlap."""
    found = {name: row.metrics[metric] for name, row in variants.items() if row.metrics[metric].n}
    order = sorted(found, key=lambda name: found[name].mean or 0.0, reverse=not is_lower_better(metric))
    text = "Best first: " + ", ".join(f"{name} {show(metric, found[name].mean)}" for name in order) + "."
    apart: list[str] = []
    together: list[str] = []
    for first, second in itertools.pairwise(name for name in order if found[name].interval):
        (low, high), (low_2, high_2) = found[first].interval or (0, 0), found[second].interval or (0, 0)
        (together if low <= high_2 and low_2 <= high else apart).append(f"{first} and {second}")
    if together:
        text += f" The intervals of these neighbours overlap: {', '.join(together)}."
    if apart:
        text += f" The intervals of these neighbours do not overlap: {', '.join(apart)}."
    if alone := [name for name in order if not found[name].interval]:
        text += f" Without an interval, since one seed cannot tell: {', '.join(alone)}."
    return text

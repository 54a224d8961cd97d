"""Summarise an ablation: the headline metrics of its variants, and their differences from the first variant.

An ablation's summary has no tasks, because its trials log only metrics.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from infoxlm_core.errors import InputError
from infoxlm_core.results import evidence, published, trials
from infoxlm_core.results.bootstrap import paired_bootstrap
from infoxlm_core.results.evidence import Outcomes
from infoxlm_core.results.statistics import CONFIDENCE, Statistic, compare_seeds, summarise_metrics_by_seed
from infoxlm_core.results.summaries.suite import Metrics, Summary, Variant
from infoxlm_core.results.trials import Trial

OutcomesBySeed = Mapping[str, Mapping[int, Outcomes]]
"""Variant -> seed -> questions that the model answered correctly."""
COSTS = ("steps", "tokens_seen", "cost/cpu_hours/pretrain", "cost/gpu_hours/pretrain")
"""Metrics of the pre-training cost."""


def summarise_metrics(
    title: str,
    results: Iterable[tuple[Trial, Mapping[str, float]]],
    metrics: Sequence[str] = (),
    outcomes: OutcomesBySeed = MappingProxyType({}),
) -> Summary:
    """Summarise an ablation: every variant over its seeds, in the order of the results.

    Args:
        title: title of the page.
        results: trials with their metrics. An unfinished trial has no metrics.
        metrics: names of the metrics to compare; by default all logged headline metrics and the paper's tasks.
        outcomes: stored outcomes of finished trials by variant and seed.

    Raises:
        InputError: no trial logged one of the requested metrics.
    """
    results_by_variant: dict[str, list[tuple[Trial, Mapping[str, float]]]] = {}
    logged_metrics: set[str] = set()
    for trial, values in results:
        results_by_variant.setdefault(trial.model, []).append((trial, values))
        logged_metrics.update(values)
    headline_metrics = _select_headlines(metrics, logged_metrics)
    costs = [name for name in COSTS if name in logged_metrics]
    variants: dict[str, Variant] = {}
    unfinished_trials: list[str] = []
    for name, variant_results in results_by_variant.items():
        variants[name] = _summarise_variant(variant_results, headline_metrics, costs)
        unfinished_trials += [trial.name for trial, values in variant_results if not values]
    variants = _compare_with_first(variants, headline_metrics, outcomes)
    return Summary(
        title=title,
        model=next(iter(variants), ""),
        models={name: variant.what for name, variant in variants.items()},
        metrics=headline_metrics,
        variants=variants,
        unfinished=tuple(unfinished_trials),
        tasks={},
    )


def _compare_with_first(
    variants: Mapping[str, Variant], headline_metrics: Sequence[str], outcomes: OutcomesBySeed
) -> dict[str, Variant]:
    """Add to each variant its differences from the first variant, the baseline."""
    baseline = next(iter(variants), "")
    comparisons = len(variants) - 1
    compared = {}
    for name, variant in variants.items():
        if name == baseline:
            compared[name] = variant
            continue
        differences = {}
        for metric in headline_metrics:
            reference = variants[baseline].metrics[metric]
            differences[metric] = compare_seeds(variant.metrics[metric], reference, comparisons)
        question_differences = _compare_answers(
            outcomes.get(name, {}), outcomes.get(baseline, {}), headline_metrics, comparisons
        )
        compared[name] = replace(variant, differences=differences, question_differences=question_differences)
    return compared


def _select_headlines(requested: Sequence[str], logged_metrics: set[str]) -> tuple[str, ...]:
    """Return the requested metrics, or by default all headline metrics that a trial logged.

    Raises:
        InputError: no trial logged a requested metric.
    """
    for name in requested:
        if name not in logged_metrics:
            available = ", ".join(sorted(logged_metrics)) or "none"
            raise InputError(f"No trial has the metric {name!r}. Known metrics: {available}.")
    if requested:
        return tuple(requested)
    bleu_by_direction = sorted(name for name in logged_metrics if name.startswith("translation/bleu/"))
    candidates = (*trials.HEADLINES, *bleu_by_direction, *published.METRICS)
    return tuple(name for name in candidates if name in logged_metrics)


def _summarise_variant(
    results: Sequence[tuple[Trial, Mapping[str, float]]], headline_metrics: Sequence[str], costs: Sequence[str]
) -> Variant:
    """Summarise the trials of one variant. An unfinished trial has no metrics in `results`."""
    values_by_seed = {trial.seed: values for trial, values in results}
    first_trial, _ = results[0]
    return Variant(
        what=first_trial.what,
        seeds=tuple(sorted(trial.seed for trial, _ in results)),
        unfinished=tuple(sorted(trial.seed for trial, values in results if not values)),
        metrics=summarise_metrics_by_seed(values_by_seed, headline_metrics),
        costs=summarise_metrics_by_seed(values_by_seed, costs) if costs else {},
    )


def _compare_answers(
    candidate: Mapping[int, Outcomes], reference: Mapping[int, Outcomes], metrics: Sequence[str], comparisons: int
) -> Metrics:
    """Compare the accuracy of two variants. Return each metric's difference with its interval over the questions.

    The answers to a question are averaged over the seeds that both variants have.

    Args:
        candidate: the compared variant's answers by seed.
        reference: the baseline's answers by seed.
        metrics: metrics to compare. Metrics that are not shares of correct answers are left out.
        comparisons: number of variants compared with the baseline, for Bonferroni's correction.
    """
    seeds = sorted(candidate.keys() & reference.keys())
    if not seeds:
        return {}
    level = 1 - (1 - CONFIDENCE) / comparisons
    differences = {}
    for name in metrics:
        try:
            candidate_scores = evidence.average([candidate[seed] for seed in seeds], name)
            reference_scores = evidence.average([reference[seed] for seed in seeds], name)
            interval = paired_bootstrap(candidate_scores, reference_scores, level=level)
        except (InputError, ValueError):  # not a share of correct answers, or the variants answered different questions
            continue
        differences[name] = Statistic(interval.questions, interval.gain, interval=(interval.lower, interval.upper))
    return differences

"""Means, deviations and intervals over seeds, by hand."""

import math

import pytest

from infoxlm_core.results import statistics
from infoxlm_core.results.statistics import compare_seeds, summarise_seeds


@pytest.mark.parametrize(
    ("values", "quantile"), [((1.0, 2.0, 6.0), 4.303), ((0.0, 2.0), 12.706), ((0.0, 1.0) * 6, 2.201)]
)
def test_mean_deviation_and_interval_by_hand(values, quantile):
    statistic = summarise_seeds(dict(enumerate(values)))

    mean = sum(values) / len(values)
    deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))
    half_width = quantile * deviation / math.sqrt(len(values))
    assert (statistic.n, statistic.mean) == (len(values), mean)
    assert statistic.deviation == pytest.approx(deviation)
    assert statistic.interval == pytest.approx((mean - half_width, mean + half_width), rel=1e-3)


def test_single_finite_seed_has_no_deviation_and_no_interval():
    statistic = summarise_seeds({1: 0.5, 2: math.nan})

    assert (statistic.n, statistic.mean, statistic.deviation, statistic.interval) == (1, 0.5, None, None)


# Quantiles of Student's t with two degrees of freedom, with Bonferroni's correction.
@pytest.mark.parametrize(("comparisons", "quantile"), [(1, 4.303), (2, 6.205)])
def test_paired_difference_is_significant_where_the_intervals_overlap(comparisons, quantile):
    reference = summarise_seeds({1: 0.50, 2: 0.56, 3: 0.62})
    variant = summarise_seeds({1: 0.55, 2: 0.60, 3: 0.67, 4: 0.10})

    difference = compare_seeds(variant, reference, comparisons)

    mean = 0.14 / 3
    deviation = math.sqrt(1 / 30_000)
    half_width = quantile * deviation / math.sqrt(3)
    assert (difference.n, difference.mean, difference.deviation) == pytest.approx((3, mean, deviation))
    assert difference.interval == pytest.approx((mean - half_width, mean + half_width), rel=1e-3)
    assert difference.interval[0] > 0
    assert reference.interval[1] > summarise_seeds({1: 0.55, 2: 0.60, 3: 0.67}).interval[0]


def test_seeds_of_one_variant_only_are_not_compared():
    variant = summarise_seeds({1: 0.5, 2: math.nan})
    reference = summarise_seeds({2: 0.5, 3: 0.5})

    assert compare_seeds(variant, reference, comparisons=1).mean is None


@pytest.mark.parametrize(
    ("metric", "is_share", "arrow"),
    [
        ("retrieval/served", True, "↑"), ("xnli/transfer_gap", True, "↓"), ("retrieval/best_layer", False, "↑"),
        ("probe/retrieval", True, "↑"), ("train/accuracy", True, "↑"), ("perplexity/mean", False, "↓"),
        ("loss/mlm", False, "↓"),
    ],
)  # fmt: skip
def test_column_of_a_metric_shows_its_unit_and_direction(metric, is_share, arrow):
    assert statistics.is_share(metric) is is_share
    assert statistics.name_column(metric, is_share).split() == [metric, *(["%"] if is_share else []), arrow]

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
    half = quantile * deviation / math.sqrt(len(values))
    assert (statistic.n, statistic.mean) == (len(values), mean)
    assert statistic.deviation == pytest.approx(deviation)
    assert statistic.interval == pytest.approx((mean - half, mean + half), rel=1e-3)


def test_one_seed_has_a_mean_but_no_deviation_and_no_interval():
    statistic = summarise_seeds({1: 0.5, 2: math.nan})

    assert (statistic.n, statistic.mean, statistic.deviation, statistic.interval) == (1, 0.5, None, None)


def test_a_paired_difference_shows_what_intervals_of_the_means_hide():
    """Quantiles of Student's t with two degrees of freedom: 4.303 for one comparison, 6.205 for two."""
    reference = summarise_seeds({1: 0.50, 2: 0.56, 3: 0.62})
    variant = summarise_seeds({1: 0.55, 2: 0.60, 3: 0.67, 4: 0.10})

    for comparisons, quantile in ((1, 4.303), (2, 6.205)):
        difference = compare_seeds(variant, reference, comparisons)

        mean, deviation = 0.14 / 3, math.sqrt(1 / 30_000)
        half = quantile * deviation / math.sqrt(3)
        assert (difference.n, difference.mean, difference.deviation) == pytest.approx((3, mean, deviation))
        assert difference.interval == pytest.approx((mean - half, mean + half), rel=1e-3)
        assert difference.interval[0] > 0
    assert reference.interval[1] > summarise_seeds({1: 0.55, 2: 0.60, 3: 0.67}).interval[0]  # the intervals overlap


def test_a_seed_that_only_one_variant_has_is_no_pair():
    assert compare_seeds(summarise_seeds({1: 0.5, 2: math.nan}), summarise_seeds({2: 0.5, 3: 0.5}), 1).mean is None


@pytest.mark.parametrize(
    ("metric", "share", "arrow"),
    [
        ("retrieval/served", True, "↑"),
        ("xnli/transfer_gap", True, "↓"),
        ("retrieval/best_layer", False, "↑"),
        ("probe/retrieval", True, "↑"),
        ("train/accuracy", True, "↑"),
        ("perplexity/mean", False, "↓"),
        ("loss/mlm", False, "↓"),
    ],
)
def test_a_metric_is_a_share_if_it_is_of_a_task_and_says_which_way_is_better(metric, share, arrow):
    assert statistics.is_share(metric) is share
    assert statistics.name_column(metric, share).split()[-1] == arrow

"""Means, deviations and intervals over seeds, by hand."""

import math

import pytest

from infoxlm_core.results import statistics, tables


def test_mean_deviation_and_interval_of_three_seeds_by_hand():
    summary = statistics.over_seeds({1: 1.0, 2: 2.0, 3: 6.0})

    assert (summary.n, summary.mean) == (3, 3.0)
    assert summary.deviation == pytest.approx(math.sqrt(7))  # (4 + 1 + 9) / 2
    half = 4.303 * math.sqrt(7) / math.sqrt(3)
    assert summary.interval == pytest.approx((3 - half, 3 + half), rel=1e-3)


def test_two_seeds_have_a_wide_interval():
    low, high = statistics.over_seeds({1: 0.0, 2: 2.0}).interval

    assert (low, high) == pytest.approx((1 - 12.706, 1 + 12.706), rel=1e-4)


def test_twelve_seeds_take_the_quantile_of_twelve():
    summary = statistics.over_seeds({seed: float(seed % 2) for seed in range(12)})

    assert summary.interval[1] - summary.mean == pytest.approx(2.201 * summary.deviation / math.sqrt(12), rel=1e-4)


def test_one_seed_has_a_mean_but_no_deviation_and_no_interval():
    summary = statistics.over_seeds({1: 0.5})

    assert (summary.mean, summary.deviation, summary.interval) == (0.5, None, None)


def test_values_and_deviations_are_shown_with_the_same_decimals():
    assert statistics.show("retrieval/best", 0.46375) == "46.38"
    assert statistics.show("retrieval/best_layer", 2.0) == "2.000"
    column = tables.Column("it", lambda value, like: statistics.show("perplexity/mean", value, like))
    assert "".join(tables.show(column, statistics.Statistic(3, 264.31, 6.85))) == "264.3 ± 6.8"
    assert statistics.show("perplexity/mean", 12356.2) == "12,356"

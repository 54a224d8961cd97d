"""The summary of an ablation: means over seeds, differences from the first variant, and trials without a result."""

import pytest

from infoxlm_core.errors import InputError
from infoxlm_core.results.summaries.ablation import summarise_metrics
from tests.toys.scores import trial

METRIC = "retrieval/best"
RESULTS = [
    trial("MLM", 1, retrieval__best=0.1),
    trial("MLM", 2, retrieval__best=0.3),
    trial("full", 1, retrieval__best=0.6),
    trial("full", 2, retrieval__best=0.7),
]


def test_variants_are_compared_with_the_first_seed_by_seed():
    variants = summarise_metrics("toy", RESULTS).variants

    assert list(variants) == ["MLM", "full"]
    assert variants["MLM"].metrics[METRIC].mean == pytest.approx(0.2)
    assert variants["MLM"].differences == {}
    assert variants["full"].differences[METRIC].mean == pytest.approx(((0.6 - 0.1) + (0.7 - 0.3)) / 2)


def test_trial_without_metrics_is_unfinished_and_not_part_of_the_mean():
    summary = summarise_metrics("toy", [*RESULTS, trial("full", 3)])

    assert summary.unfinished == ("full seed 3",)
    assert summary.variants["full"].unfinished == (3,)
    assert summary.variants["full"].metrics[METRIC].mean == pytest.approx(0.65)


def test_requested_metric_that_no_trial_logged_is_refused():
    with pytest.raises(InputError, match=r"No trial has the metric 'xnli/accuracy'\. Known metrics: retrieval/best\."):
        summarise_metrics("toy", RESULTS, metrics=["xnli/accuracy"])

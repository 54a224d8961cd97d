"""What the seeds of an ablation tell about its variants."""

import pytest

from infoxlm_core.errors import InputError
from infoxlm_core.results import ablation_page, tables
from infoxlm_core.results.ablation import compare
from tests.toys.scores import trial


def test_neighbours_are_said_to_overlap_or_not_in_the_order_of_their_means():
    trials = [trial("a", s, retrieval__best=0.50 + s / 1000) for s in (1, 2, 3)]
    trials += [trial("b", s, retrieval__best=0.30 + s / 1000) for s in (1, 2, 3)]
    trials += [trial("c", s, retrieval__best=0.301 + s / 1000) for s in (1, 2, 3)] + [
        trial("d", 1, retrieval__best=0.1)
    ]

    said = compare(trials, "t", ["retrieval/best"]).said["retrieval/best"]

    assert said == (
        "Best first: a 50.20, c 30.30, b 30.20, d 10.00. The intervals of these neighbours overlap: c and b. "
        "The intervals of these neighbours do not overlap: a and c. Without an interval, since one seed cannot tell: d."
    )


def test_less_is_better_for_perplexity_and_the_transfer_gap():
    trials = [trial("a", 1, perplexity__mean=9.0, classification__transfer_gap=0.2)]
    trials += [trial("b", 1, perplexity__mean=8.0, classification__transfer_gap=0.1)]
    compared = compare(trials, "t", ["perplexity/mean", "classification/transfer_gap"])

    assert all(sentence.startswith("Best first: b ") for sentence in compared.said.values())
    assert [cell.split()[-1] for cell in tables.lay_out(ablation_page.tabulate(compared))[0][2:]] == ["↓", "↓"]


def test_a_metric_nobody_has_is_left_out_and_refused_where_it_was_asked_for():
    trials = [trial("full", 1, retrieval__best=0.4)]

    assert compare(trials, "t").metrics == ("retrieval/best",)
    with pytest.raises(InputError, match="'retrieval/bset'; known are retrieval/best"):
        compare(trials, "t", ["retrieval/bset"])


def test_metrics_for_a_server_are_flat_and_finite():
    trials = [trial("full", s, retrieval__best=s / 10) for s in (1, 3)] + [trial("-TLM", 1)]

    flat = compare(trials, "t", ["retrieval/best"]).flatten()

    assert flat["full/retrieval/best"] == 0.2 and flat["full/retrieval/best/deviation"] == pytest.approx(0.1 * 2**0.5)
    assert flat["-TLM/retrieval/best/n"] == 0 and "-TLM/retrieval/best" not in flat

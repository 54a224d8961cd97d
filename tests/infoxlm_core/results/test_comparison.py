"""Variants compared over their seeds: means, deviations and intervals by hand, and what is said of them."""

import json
import math

import pytest

from infoxlm_core.errors import InputError
from infoxlm_core.results import comparison, published


def trial(variant: str, seed: int, **metrics: float) -> dict:
    named = {name.replace("__", "/"): value for name, value in metrics.items()}
    return {"variant": variant, "seed": seed, "what": f"what {variant} is", "metrics": named}


def test_mean_deviation_and_interval_of_three_seeds_by_hand():
    summary = comparison.summarise({1: 1.0, 2: 2.0, 3: 6.0})

    assert (summary["n"], summary["mean"]) == (3, 3.0)
    assert summary["deviation"] == pytest.approx(math.sqrt(7))  # (4 + 1 + 9) / 2
    half = 4.303 * math.sqrt(7) / math.sqrt(3)
    assert summary["interval"] == pytest.approx((3 - half, 3 + half))


def test_two_seeds_have_a_wide_interval():
    low, high = comparison.summarise({1: 0.0, 2: 2.0})["interval"]

    assert (low, high) == pytest.approx((1 - 12.706, 1 + 12.706))


def test_more_than_ten_seeds_take_the_quantile_of_ten():
    summary = comparison.summarise({seed: float(seed % 2) for seed in range(12)})

    assert summary["interval"][1] - summary["mean"] == pytest.approx(2.262 * summary["deviation"] / math.sqrt(12))


def test_one_seed_has_a_mean_but_no_deviation_and_no_interval():
    summary = comparison.summarise({1: 0.5})

    assert (summary["mean"], summary["deviation"], summary["interval"]) == (0.5, None, None)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_value_that_is_not_finite_does_not_count_and_leaves_valid_json(tmp_path, bad):
    trials = [trial("full", 1, retrieval__best=0.4), trial("full", 2, retrieval__best=bad)]
    compared = comparison.compare(trials, ["retrieval/best"], "t")
    comparison.write(tmp_path, compared)

    summary = json.loads((tmp_path / "comparison.json").read_text(), parse_constant=pytest.fail)["variants"]["full"]
    assert summary["metrics"]["retrieval/best"]["n"] == 1
    assert summary["metrics"]["retrieval/best"]["values"] == {"1": 0.4, "2": None}
    assert comparison.tabulate(compared)[1] == ["full", "2", "40.00 (n=1)"]


def test_a_trial_that_did_not_finish_is_named_and_not_counted(tmp_path):
    trials = [trial("full", 1, retrieval__best=0.4), trial("full", 2), trial("-XLCO", 1), trial("-XLCO", 2)]
    compared = comparison.compare(trials, ["retrieval/best"], "t")
    comparison.write(tmp_path, compared)

    assert comparison.list_unfinished(compared) == ["full seed 2", "-XLCO seed 1", "-XLCO seed 2"]
    assert comparison.tabulate(compared)[1:] == [["full", "1 of 2", "40.00"], ["-XLCO", "0 of 2", "–"]]
    for kind in ("md", "html"):
        assert "full seed 2, -XLCO seed 1, -XLCO seed 2" in (tmp_path / f"comparison.{kind}").read_text()


def test_nothing_finished_is_still_a_page(tmp_path):
    comparison.write(tmp_path, comparison.compare([trial("full", 1)], ["retrieval/best"], "t"))

    assert "full seed 1" in (tmp_path / "comparison.html").read_text()
    assert (tmp_path / "comparison.png").stat().st_size > 1000


def test_neighbours_are_said_to_overlap_or_not_in_the_order_of_their_means():
    trials = [trial("a", s, retrieval__best=0.50 + s / 1000) for s in (1, 2, 3)]
    trials += [trial("b", s, retrieval__best=0.30 + s / 1000) for s in (1, 2, 3)]
    trials += [trial("c", s, retrieval__best=0.301 + s / 1000) for s in (1, 2, 3)] + [
        trial("d", 1, retrieval__best=0.1)
    ]

    said = comparison.compare(trials, ["retrieval/best"], "t")["said"]["retrieval/best"]

    assert said == (
        "Best first: a 50.20, c 30.30, b 30.20, d 10.00. The intervals of these neighbours overlap: c and b. "
        "The intervals of these neighbours do not overlap: a and c. Without an interval, since one seed cannot tell: d."
    )


def test_less_is_better_for_perplexity_and_the_transfer_gap():
    trials = [trial("a", 1, perplexity__mean=9.0, classification__transfer_gap=0.2)]
    trials += [trial("b", 1, perplexity__mean=8.0, classification__transfer_gap=0.1)]
    compared = comparison.compare(trials, ["perplexity/mean", "classification/transfer_gap"], "t")

    assert all(sentence.startswith("Best first: b ") for sentence in compared["said"].values())
    assert [cell.split()[-1] for cell in comparison.tabulate(compared)[0][2:]] == ["↓", "↓"]


def test_values_and_deviations_are_shown_with_the_same_decimals():
    assert comparison.show("retrieval/best", 0.46375) == "46.38"
    assert comparison.show("retrieval/best_layer", 2.0) == "2.000"
    summary = {"mean": 264.31, "deviation": 6.85}
    assert comparison.show_spread("perplexity/mean", summary) == "264.3 ± 6.8"
    assert comparison.show("perplexity/mean", 12356.2) == "12,356"


def test_a_metric_nobody_has_is_left_out_and_refused_where_it_was_asked_for():
    trials = [trial("full", 1, retrieval__best=0.4)]

    assert comparison.compare(trials, ["retrieval/best", "mlqa/f1"], "t")["metrics"] == ["retrieval/best"]
    with pytest.raises(InputError, match="'retrieval/bset'; known are retrieval/best"):
        comparison.check_metrics(trials, ["retrieval/bset"])


def test_names_are_escaped_in_html_and_pipes_in_markdown(tmp_path):
    name = "<b>full|$x$</b>"
    comparison.write(tmp_path, comparison.compare([trial(name, 1, retrieval__best=0.4)], ["retrieval/best"], "<i>"))

    page = (tmp_path / "comparison.html").read_text()
    assert "<b>full" not in page and "&lt;b&gt;full|$x$&lt;/b&gt;" in page and "<i>" not in page
    assert "<script" not in page and "<link" not in page
    assert r"| <b>full\|$x$</b> |" in (tmp_path / "comparison.md").read_text()


def test_the_papers_numbers_stand_beside_ours_on_the_same_task():
    trials = [trial(v, 1, xnli__mean=0.7, retrieval__best=0.4) for v in ("full", "-TLM:universal", "own")]
    compared = comparison.compare(trials, comparison.choose(["retrieval/best"]), "t")

    rows = comparison.tabulate(compared)
    assert [cell.split()[0] for cell in rows[0][2:]] == ["retrieval/best", "xnli/mean", "paper"]
    assert [row[-1] for row in rows[1:]] == ["76.45", "–", "–"]


def test_the_papers_numbers_stand_apart_from_ours_on_other_tasks(tmp_path):
    compared = comparison.compare([trial("-XLCO", 1, retrieval__best=0.4)], comparison.choose(["retrieval/best"]), "t")
    comparison.write(tmp_path, compared)

    assert "paper" not in comparison.tabulate(compared)[0]
    assert comparison.tabulate_published(compared)[1] == ["-XLCO", "76.24", "67.43", "49.23"]
    ours, apart = (tmp_path / "comparison.md").read_text().split("## What the paper reports")
    assert "76.24" not in ours and "76.24" in apart and "arXiv 2007.07834" in apart


def test_the_published_ablations_agree_where_tables_6_and_7_meet():
    full, rest = published.ABLATIONS["full"], [row for name, row in published.ABLATIONS.items() if name != "full"]

    assert set(full) == set(published.METRICS)
    assert all(row[name] < full[name] for row in rest for name in row)


def test_metrics_for_a_server_are_flat_and_finite():
    trials = [trial("full", s, retrieval__best=s / 10) for s in (1, 3)] + [trial("-TLM", 1)]

    flat = comparison.flatten(comparison.compare(trials, ["retrieval/best"], "t"))

    assert flat["full/retrieval/best"] == 0.2 and flat["full/retrieval/best/deviation"] == pytest.approx(0.1 * 2**0.5)
    assert flat["-TLM/retrieval/best/n"] == 0 and "-TLM/retrieval/best" not in flat

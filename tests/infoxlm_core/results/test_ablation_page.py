"""The page of an ablation: every variant and trial is on it, escaped, and the paper's numbers where they belong."""

import json
import math

import pytest

from infoxlm_core.results import ablation_page, tables
from infoxlm_core.results.ablation import compare
from tests.toys.scores import trial


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_value_that_is_not_finite_does_not_count_and_leaves_valid_json(tmp_path, bad):
    trials = [trial("full", 1, retrieval__best=0.4), trial("full", 2, retrieval__best=bad)]
    compared = compare(trials, "t", ["retrieval/best"])
    ablation_page.write(tmp_path, compared)

    summary = json.loads((tmp_path / "comparison.json").read_text(), parse_constant=pytest.fail)["variants"]["full"]
    assert summary["metrics"]["retrieval/best"]["n"] == 1
    assert summary["metrics"]["retrieval/best"]["values"] == {"1": 0.4, "2": None}
    assert tables.lay_out(ablation_page.tabulate(compared))[1] == ["full", "2", "40.00 (n=1)"]


def test_a_trial_that_did_not_finish_is_named_and_not_counted(tmp_path):
    trials = [trial("full", 1, retrieval__best=0.4), trial("full", 2), trial("-XLCO", 1), trial("-XLCO", 2)]
    compared = compare(trials, "t", ["retrieval/best"])
    ablation_page.write(tmp_path, compared)

    assert list(compared.unfinished) == ["full seed 2", "-XLCO seed 1", "-XLCO seed 2"]
    assert tables.lay_out(ablation_page.tabulate(compared))[1:] == [
        ["full", "1 of 2", "40.00"],
        ["-XLCO", "0 of 2", "–"],
    ]
    for kind in ("md", "html"):
        assert "full seed 2, -XLCO seed 1, -XLCO seed 2" in (tmp_path / f"comparison.{kind}").read_text()


def test_nothing_finished_is_still_a_page(tmp_path):
    ablation_page.write(tmp_path, compare([trial("full", 1)], "t"))

    assert "full seed 1" in (tmp_path / "comparison.html").read_text()
    assert (tmp_path / "comparison.png").stat().st_size > 1000


def test_names_are_escaped_in_html_and_pipes_in_markdown(tmp_path):
    name = "<b>full|$x$</b>"
    ablation_page.write(tmp_path, compare([trial(name, 1, retrieval__best=0.4)], "<i>", ["retrieval/best"]))

    page = (tmp_path / "comparison.html").read_text()
    assert "<b>full" not in page and "&lt;b&gt;full|$x$&lt;/b&gt;" in page and "<i>" not in page
    assert "<script" not in page and "<link" not in page
    assert r"| <b>full\|$x$</b> |" in (tmp_path / "comparison.md").read_text()


def test_the_papers_numbers_stand_apart_from_ours_on_other_tasks(tmp_path):
    compared = compare([trial("-XLCO", 1, retrieval__best=0.4)], "t")
    ablation_page.write(tmp_path, compared)

    assert "paper" not in tables.lay_out(ablation_page.tabulate(compared))[0]
    assert tables.lay_out(*ablation_page.tabulate_published(compared))[1] == ["-XLCO", "76.24", "67.43", "49.23"]
    ours, apart = (tmp_path / "comparison.md").read_text().split("## What the paper reports")
    assert "76.24" not in ours and "76.24" in apart and "arXiv 2007.07834" in apart


def test_the_papers_numbers_stand_beside_ours_on_the_same_task():
    trials = [trial(v, 1, xnli__mean=0.7, retrieval__best=0.4) for v in ("full", "-TLM:universal", "own")]
    compared = compare(trials, "t")

    rows = tables.lay_out(ablation_page.tabulate(compared))
    assert [cell.split()[0] for cell in rows[0][2:]] == ["retrieval/best", "xnli/mean", "paper"]
    assert [row[-1] for row in rows[1:]] == ["76.45", "–", "–"]

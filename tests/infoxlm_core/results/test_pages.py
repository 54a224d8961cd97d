"""What people read: pages that ask nothing of the network, Markdown, model cards."""

import json
import math
import re
from dataclasses import replace

import pytest

from infoxlm_core.results import pages, tables
from infoxlm_core.results.evaluation import Evaluated, Evaluation
from infoxlm_core.results.summary import compare
from infoxlm_core.tasks.nearest import summarise
from infoxlm_core.tasks.task import Scores
from tests.toy_scores import CLASSIFICATION, RETRIEVAL, config, summed, trial


def make_model(share: float, **tasks) -> Evaluated:
    """A model with one layer that finds `share` of the translations at it, and half of that elsewhere."""
    part = {"all": [share / 2, share], "subset": [None, share / 4]}
    cells = {"mean": {code: {"from_pivot": part, "to_pivot": part} for code in ("de", "zh")}}
    found = summarise(cells["mean"], 1)
    details = {
        "best": {"layer": 1, "pooling": "mean"}, "contrast": None, "chance": 0.05, "cells": cells,
        "by_layer": {"mean": [share / 2, share], "cls": [0.0, 0.01]},
    }  # fmt: skip
    languages = found.pop("languages")
    retrieval = Scores("retrieval", languages, found, dict.fromkeys(languages, 20), "sha256:1", details=details)
    sizes = {"type": "xlm-roberta", "layers": 1, "hidden": 32, "vocabulary": 1234, "parameters": 56789}
    return Evaluated(sizes | {"contrast": (1, "mean")}, {"retrieval": retrieval, **tasks})


@pytest.fixture
def scores() -> Evaluation:
    counts = {"corpus": "web", "kind": "pairs", "file": "web.tsv", "read": 10, "kept": 7, "dropped": {"too_short": 3}}
    perplexity = {"en": {"perplexity": 100.0}, "de": {"perplexity": 146.8}}
    accuracy = {"de": {"accuracy": 0.6}, "en": {"accuracy": 0.8}}
    tasks = {
        "perplexity": Scores("perplexity", perplexity, {"perplexity": 123.4}, {}, "sha256:2"),
        "classification": Scores(
            "classification", accuracy, {"accuracy": 0.7}, {}, "sha256:3", {"accuracy": 0.2},
            details={"majority": 0.5, "rows": 9, "labels": ["x", "y"]},
        ),
    }  # fmt: skip
    curves = {"loss/mlm": [(1, 9.0), (2, 8.0)], "xlco/accuracy": [(1, 0.1), (2, 0.2)]}
    return Evaluation(
        model="InfoXLM",
        pivot="en",
        test_set="sha256:1",
        pairs={code: {"held_out": 30, "drawn": 20, "no_overlap": 5} for code in ("de", "zh")},
        models={"InfoXLM": replace(make_model(0.4321, **tasks), curves=curves), "<untrained>": make_model(0.1)},
        corpus={"files": [counts | {"language": "de"}, counts | {"language": "zh"}]},
        settings={"seed": 1},
    )


def test_the_report_shows_the_scores_and_escapes_names(scores, tmp_path):
    pages.write_evaluation(tmp_path, scores)

    page = (tmp_path / "report.html").read_text()
    assert "43.2" in page and "123.4" in page
    assert "<tr><td>too short</td><td>6</td></tr>" in page
    assert "&lt;untrained&gt;" in page and "<untrained>" not in page


def test_the_report_asks_nothing_of_the_network(scores, tmp_path):
    pages.write_evaluation(tmp_path, scores)

    page = (tmp_path / "report.html").read_text()
    assert "<script" not in page and "<link" not in page
    assert all(source.startswith("data:image/svg+xml;base64,") for source in re.findall(r'src="([^"]*)"', page))
    assert len(re.findall("<img", page)) == 5 == len(list((tmp_path / "figures").glob("*.png")))


def test_a_report_of_retrieval_alone_has_no_empty_parts(scores, tmp_path):
    pages.write_evaluation(tmp_path, replace(scores, models={"InfoXLM": make_model(0.4)}, corpus=None))

    page = (tmp_path / "report.html").read_text()
    assert "<h2>Retrieval</h2>" in page
    assert not re.search("<h2>(Perplexity|Classification|Training|Text)</h2>", page)
    assert {path.stem for path in (tmp_path / "figures").iterdir()} == {"retrieval_by_layer", "retrieval_by_language"}


def test_scores_can_be_read_back(scores, tmp_path):
    pages.write_evaluation(tmp_path, scores)

    found = json.loads((tmp_path / "scores.json").read_text())
    assert found["models"]["InfoXLM"]["tasks"]["retrieval"]["mean"]["mean"] == 0.4321
    assert (found["model"], found["pivot"], found["test_set"]) == ("InfoXLM", "en", "sha256:1")  # the registry reads


def test_the_model_card_opens_with_its_languages_and_lists_scores_and_counts(scores, tmp_path):
    pages.write_evaluation(tmp_path, scores)

    card = (tmp_path / "model_card.md").read_text()
    assert card.startswith('---\nlanguage:\n- "en"\n- "de"\n- "zh"\n')
    assert "hidden_states[1]" in card
    assert "| InfoXLM | 1 | mean | 43.2 | 43.2 | 43.2 | 10.8 | 43.2 | 43.2 |\n| <untrained> | 1 |" in card
    assert "| language | pairs |\n|---|---|\n| de | 7 |\n| zh | 7 |\n" in card


def test_the_cleaning_table_sums_lines_by_corpus_and_reason(scores):
    table = pages.tabulate_corpus(scores.corpus)

    assert table["by_corpus"] == {("web", "pairs"): {"read": 20, "kept": 14, "too_short": 6}}
    assert table["by_kind"] == {"pairs": {"read": 20, "kept": 14, "too_short": 6}}
    assert table["kept"] == {"de": {"pairs": 7}, "zh": {"pairs": 7}}


def test_everything_is_written_and_the_page_needs_nothing_else(written):
    output, _ = written

    names = {str(path.relative_to(output)) for path in output.rglob("*") if path.is_file()}
    assert {"suite.html", "suite.md", "suite.json", "model_card.md", "tables/xnli.csv", "tables/mlqa-f1.csv",
            "figures/tatoeba.png", "figures/xnli.svg", "figures/transfer-gap.png"} <= names  # fmt: skip
    page = (output / "suite.html").read_text()
    assert "<script" not in page and "<link" not in page and 'src="http' not in page
    assert json.loads((output / "suite.json").read_text(), parse_constant=pytest.fail)["model"] == "ours"
    for kind in ("html", "md"):
        text = (output / f"suite.{kind}").read_text()
        assert "peer xnli seed 1, peer xnli seed 2, peer mlqa seed 1" in text and "Not the paper" in text
        assert "XLM-R (reimplemented)" in text and "2007.07834" in text


def test_the_model_card_has_our_numbers_and_nobody_elses(written):
    output, _ = written

    card = (output / "model_card.md").read_text()

    assert card.startswith("## Evaluation") and "68.3 ± 2.4" in card and "75.0 ± 7.1" in card
    assert "mBERT" not in card


def test_a_suite_of_which_nothing_is_finished_is_still_a_page_and_says_so(tmp_path):
    planned = config(xnli=CLASSIFICATION | {"table": "xnli", "seeds": list(range(1, 21))}, pairs=RETRIEVAL)
    pages.write_suite(tmp_path, summed(planned, {}))

    text = (tmp_path / "suite.md").read_text()
    assert text.count("Nothing is finished.") == 2 and "ours xnli seed 12 and 9 more" in text
    assert "Nothing is finished" in (tmp_path / "suite.html").read_text()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_value_that_is_not_finite_does_not_count_and_leaves_valid_json(tmp_path, bad):
    trials = [trial("full", 1, retrieval__best=0.4), trial("full", 2, retrieval__best=bad)]
    compared = compare(trials, "t", ["retrieval/best"])
    pages.write_comparison(tmp_path, compared)

    summary = json.loads((tmp_path / "comparison.json").read_text(), parse_constant=pytest.fail)["variants"]["full"]
    assert summary["metrics"]["retrieval/best"]["n"] == 1
    assert summary["metrics"]["retrieval/best"]["values"] == {"1": 0.4, "2": None}
    assert tables.lay_out(tables.of_comparison(compared))[1] == ["full", "2", "40.00 (n=1)"]


def test_a_trial_that_did_not_finish_is_named_and_not_counted(tmp_path):
    trials = [trial("full", 1, retrieval__best=0.4), trial("full", 2), trial("-XLCO", 1), trial("-XLCO", 2)]
    compared = compare(trials, "t", ["retrieval/best"])
    pages.write_comparison(tmp_path, compared)

    assert list(compared.unfinished) == ["full seed 2", "-XLCO seed 1", "-XLCO seed 2"]
    assert tables.lay_out(tables.of_comparison(compared))[1:] == [["full", "1 of 2", "40.00"], ["-XLCO", "0 of 2", "–"]]
    for kind in ("md", "html"):
        assert "full seed 2, -XLCO seed 1, -XLCO seed 2" in (tmp_path / f"comparison.{kind}").read_text()


def test_nothing_finished_is_still_a_page(tmp_path):
    pages.write_comparison(tmp_path, compare([trial("full", 1)], "t"))

    assert "full seed 1" in (tmp_path / "comparison.html").read_text()
    assert (tmp_path / "comparison.png").stat().st_size > 1000


def test_names_are_escaped_in_html_and_pipes_in_markdown(tmp_path):
    name = "<b>full|$x$</b>"
    pages.write_comparison(tmp_path, compare([trial(name, 1, retrieval__best=0.4)], "<i>", ["retrieval/best"]))

    page = (tmp_path / "comparison.html").read_text()
    assert "<b>full" not in page and "&lt;b&gt;full|$x$&lt;/b&gt;" in page and "<i>" not in page
    assert "<script" not in page and "<link" not in page
    assert r"| <b>full\|$x$</b> |" in (tmp_path / "comparison.md").read_text()


def test_the_papers_numbers_stand_apart_from_ours_on_other_tasks(tmp_path):
    compared = compare([trial("-XLCO", 1, retrieval__best=0.4)], "t")
    pages.write_comparison(tmp_path, compared)

    assert "paper" not in tables.lay_out(tables.of_comparison(compared))[0]
    assert tables.lay_out(*tables.of_published_ablations(compared))[1] == ["-XLCO", "76.24", "67.43", "49.23"]
    ours, apart = (tmp_path / "comparison.md").read_text().split("## What the paper reports")
    assert "76.24" not in ours and "76.24" in apart and "arXiv 2007.07834" in apart

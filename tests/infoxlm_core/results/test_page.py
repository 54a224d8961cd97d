"""The page of a sweep: it needs no network, escapes names, and names unfinished trials."""

import json
import math
import re

import matplotlib
import pytest
from matplotlib.figure import Figure

from infoxlm_core.results import figures, page
from infoxlm_core.results.summaries.ablation import summarise_metrics
from infoxlm_core.results.summaries.suite import Summary, summarise_evaluation
from infoxlm_core.tasks.perplexity import Perplexity
from infoxlm_core.tasks.scores import Scores
from tests.toys.scores import CLASSIFICATION, RETRIEVAL, config, summed, trial

METRIC = "retrieval/best"


def summarise_ablation(shares_of_variant: dict[str, list[float | None]]) -> Summary:
    """Summarise variants from the retrieval of their seeds. None stands for an unfinished trial."""
    results = []
    for name, shares in shares_of_variant.items():
        for seed, share in enumerate(shares, 1):
            metrics = {} if share is None else {"retrieval__best": share}
            results.append(trial(name, seed, **metrics))
    return summarise_metrics("toy", results)


def read_cells(markdown: str) -> list[list[str]]:
    """Return the rows of the tables in Markdown, without headings."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in markdown.splitlines() if "|" in line]
    return rows[2:]


def test_suite_has_a_self_contained_page_and_files_beside_it(suite):
    output, _ = suite

    files = {str(path.relative_to(output)) for path in output.rglob("*") if path.is_file()}
    assert {"suite.html", "suite.md", "suite.json", "model_card.md", "tables/xnli.csv", "tables/mlqa-f1.csv",
            "tables/headlines.csv", "figures/tatoeba_by_layer.png", "figures/xnli.svg",
            "figures/transfer-gap.png"} <= files  # fmt: skip
    html = (output / "suite.html").read_text()
    assert "<script" not in html
    assert "<link" not in html
    assert all(source.startswith("data:image/svg+xml;base64,") for source in re.findall(r'src="([^"]*)"', html))
    assert json.loads((output / "suite.json").read_text(), parse_constant=pytest.fail)["model"] == "ours"


@pytest.mark.parametrize("suffix", ["html", "md"])
def test_page_of_a_suite_shows_unfinished_trials_the_papers_protocol_and_sources(suite, suffix):
    text = (suite[0] / f"suite.{suffix}").read_text()

    assert "peer xnli seed 1, peer xnli seed 2, peer mlqa seed 1" in text
    assert "InfoXLM paper: 5,010 rows in each of 15 languages" in text
    assert "XLM-R (reimplemented)" in text
    assert "2007.07834" in text
    assert "All seeds fine-tune the same pre-trained model" in text


def test_model_card_of_a_suite_has_only_our_numbers(suite):
    card = (suite[0] / "model_card.md").read_text()

    assert card.startswith("## Evaluation")
    assert "68.3 ± 2.4" in card
    assert "75.0 ± 7.1" in card
    assert "mBERT" not in card


def test_suite_without_a_finished_trial_has_a_page(tmp_path):
    planned = config(xnli=CLASSIFICATION | {"table": "xnli", "seeds": list(range(1, 21))}, pairs=RETRIEVAL)

    page.write_sweep_report(tmp_path, "suite", summed(planned, {}))

    markdown = (tmp_path / "suite.md").read_text()
    assert markdown.count("No trial has finished.") == 3  # summary and two tasks
    assert "ours xnli seed 12 and 9 more" in markdown


def test_ablation_has_a_page_that_names_variants_and_unfinished_trials(tmp_path):
    page.write_sweep_report(tmp_path, "comparison", summarise_ablation({"full": [0.4, None], "other": [None]}))

    assert not (tmp_path / "figures").exists()  # a single seed has no interval to draw
    for suffix in ("md", "html"):
        text = (tmp_path / f"comparison.{suffix}").read_text()
        assert "full seed 2, other seed 1" in text
        assert "what full is" in text
        assert "All seeds fine-tune the same pre-trained model" not in text


def test_ablation_shows_differences_to_the_first_variant_with_intervals(tmp_path):
    shares = {"full": [0.50, 0.56, 0.62], "-XLCO": [0.45, 0.52, 0.57], "unfinished": [None]}
    summary = summarise_ablation(shares)
    page.write_sweep_report(tmp_path, "comparison", summary)

    section = (tmp_path / "comparison.md").read_text().split("\n## ")[2]
    assert section.startswith("Differences between variants")
    assert "Bonferroni's correction for 2 comparisons" in section
    assert read_cells(section) == [["-XLCO", "-4.67 ± 0.58 (-6.74 … -2.60)"], ["unfinished", "–"]]
    assert "-6.74 … -2.60" in (tmp_path / "comparison.html").read_text()
    variants = json.loads((tmp_path / "comparison.json").read_text())["variants"]
    assert variants["-XLCO"]["differences"][METRIC]["mean"] == pytest.approx(-0.14 / 3)
    assert not variants["full"]["differences"]
    metrics = summary.name_metrics()
    assert metrics[f"-XLCO/{METRIC}/difference"] == pytest.approx(-0.14 / 3)
    assert metrics[f"-XLCO/{METRIC}/difference/low"] == pytest.approx(-0.0674, abs=5e-5)
    assert metrics[f"-XLCO/{METRIC}/difference/high"] == pytest.approx(-0.0260, abs=5e-5)
    assert f"full/{METRIC}/difference" not in metrics


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_values_that_are_not_finite_are_left_out_and_are_null_in_json(tmp_path, value):
    page.write_sweep_report(tmp_path, "comparison", summarise_ablation({"full": [0.4, 0.4, value]}))

    content = json.loads((tmp_path / "comparison.json").read_text(), parse_constant=pytest.fail)
    assert content["variants"]["full"]["metrics"][METRIC]["values"] == {"1": 0.4, "2": 0.4, "3": None}
    assert "40.00 ± 0.00 (n=2)" in (tmp_path / "comparison.md").read_text()


def test_names_are_escaped_in_html_and_markdown(tmp_path):
    page.write_sweep_report(tmp_path, "comparison", summarise_ablation({"<b>full|$x$</b>": [0.4, 0.4]}))

    html = (tmp_path / "comparison.html").read_text()
    assert "<b>full" not in html
    assert "&lt;b&gt;full|$x$&lt;/b&gt;" in html
    assert r"| <b>full\|$x$</b> |" in (tmp_path / "comparison.md").read_text()


def test_ablations_of_the_paper_have_their_own_table(tmp_path):
    page.write_sweep_report(tmp_path, "comparison", summarise_ablation({"-XLCO": [0.4], "own": [None]}))

    ours, paper = (tmp_path / "comparison.md").read_text().split("## What the paper reports")
    assert "76.24" not in ours
    assert "arXiv 2007.07834" in paper
    assert read_cells(paper) == [["-XLCO", "76.24", "67.43", "49.23"]]


def test_main_scores_are_explained_by_their_tasks():
    scores = Scores("perplexity", {"en": {"perplexity": 9.0}}, {"perplexity": 9.0}, {"en": 1}, "sha256:1")
    summary = summarise_evaluation("toy", {"ours": ""}, [(Perplexity(), None)], {"ours": {"perplexity": scores}})

    text = page.to_markdown(summary)

    assert "perplexity/mean: perplexity, averaged over languages; lower is better" in text


def draw_line_with_a_formula() -> Figure:
    figure = Figure()
    axes = figure.subplots()
    axes.plot([1, 3, 2])
    axes.set_title(r"en-$\frac{$")
    return figure


def test_equal_figures_have_equal_bytes_and_dollar_signs_are_text():
    drawings = {"line": draw_line_with_a_formula, "nothing": lambda: None}

    images = figures.render(drawings)

    assert list(images) == ["line"]
    assert images == figures.render(drawings)


@pytest.mark.parametrize("values", [(210.8, 12_356.0), (200.0, 430.0)])
def test_logarithmic_axis_has_plain_numbers(values):
    languages = {code: {"perplexity": value} for code, value in zip(("en", "de"), values, strict=True)}
    scores = Scores("perplexity", languages, {"perplexity": 1.0}, {"en": 1, "de": 1}, "sha256:1")
    summary = summarise_evaluation("toy", {"ours": ""}, [(Perplexity(), None)], {"ours": {"perplexity": scores}})

    with matplotlib.rc_context(figures._STYLE):
        figure = figures.draw_languages("perplexity", summary.tasks["perplexity"], {"ours": "black"})
        figure.canvas.draw()
        axis = figure.axes[0].yaxis
        labels = [label.get_text() for label in (*axis.get_ticklabels(), *axis.get_ticklabels(minor=True))]

    assert any(labels)
    assert not any("$" in label or "mathdefault" in label for label in labels)

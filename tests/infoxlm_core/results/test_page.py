"""The page of a sweep: it needs no network, escapes names, and says what is missing."""

import json
import math
import re

import matplotlib
import pytest
from matplotlib.figure import Figure

from infoxlm_core.results import figures, page
from infoxlm_core.results.summary import Summary, summarise_evaluation, summarise_metrics
from infoxlm_core.tasks.perplexity import Perplexity
from infoxlm_core.tasks.scores import Scores
from tests.toys.scores import CLASSIFICATION, RETRIEVAL, config, summed, trial


def ablation(**variants: list[dict[str, float]]) -> Summary:
    """Summarise variants from the metrics of their seeds."""
    results = []
    for name, seeds in variants.items():
        results += [trial(name, seed, **metrics) for seed, metrics in enumerate(seeds, 1)]
    return summarise_metrics("toy", results)


def test_a_suite_is_a_page_with_files_beside_it_and_needs_no_network(written):
    output, _ = written

    names = {str(path.relative_to(output)) for path in output.rglob("*") if path.is_file()}
    assert {"suite.html", "suite.md", "suite.json", "model_card.md", "tables/xnli.csv", "tables/mlqa-f1.csv",
            "tables/headlines.csv", "figures/tatoeba_by_layer.png", "figures/xnli.svg",
            "figures/transfer-gap.png"} <= names  # fmt: skip
    html = (output / "suite.html").read_text()
    assert "<script" not in html and "<link" not in html
    assert all(source.startswith("data:image/svg+xml;base64,") for source in re.findall(r'src="([^"]*)"', html))
    assert json.loads((output / "suite.json").read_text(), parse_constant=pytest.fail)["model"] == "ours"
    for text in (html, (output / "suite.md").read_text()):
        assert "peer xnli seed 1, peer xnli seed 2, peer mlqa seed 1" in text
        assert "InfoXLM paper: 5,010 rows in each of 15 languages" in text
        assert "XLM-R (reimplemented)" in text and "2007.07834" in text


def test_the_model_card_of_a_suite_has_only_our_numbers(written):
    output, _ = written

    card = (output / "model_card.md").read_text()

    assert card.startswith("## Evaluation") and "68.3 ± 2.4" in card and "75.0 ± 7.1" in card
    assert "mBERT" not in card


def test_a_suite_of_which_nothing_is_finished_has_a_page_that_says_so(tmp_path):
    planned = config(xnli=CLASSIFICATION | {"table": "xnli", "seeds": list(range(1, 21))}, pairs=RETRIEVAL)
    page.write(tmp_path, "suite", summed(planned, {}))

    text = (tmp_path / "suite.md").read_text()
    assert text.count("No trial has finished.") == 3 and "ours xnli seed 12 and 9 more" in text
    assert "No trial has finished." in (tmp_path / "suite.html").read_text()


def test_an_ablation_has_the_same_page_and_names_unfinished_trials(tmp_path):
    page.write(tmp_path, "comparison", ablation(full=[{"retrieval__best": 0.4}, {}], other=[{}]))

    assert (tmp_path / "figures").is_dir() is False  # a single seed has no interval to draw
    for kind in ("md", "html"):
        text = (tmp_path / f"comparison.{kind}").read_text()
        assert "full seed 2, other seed 1" in text and "what full is" in text


def test_an_ablation_shows_the_difference_to_the_first_variant_with_its_interval(tmp_path):
    shares = {"full": (0.50, 0.56, 0.62), "-XLCO": (0.45, 0.52, 0.57), "unfinished": ()}
    summary = ablation(**{name: [{"retrieval__best": share} for share in row] or [{}] for name, row in shares.items()})
    page.write(tmp_path, "comparison", summary)

    section = (tmp_path / "comparison.md").read_text().split("\n## ")[2]
    assert section.startswith("Differences between variants")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if "|" in line]
    assert rows[2:] == [["-XLCO", "-4.67 ± 0.58 (-6.74 … -2.60)"], ["unfinished", "–"]]
    assert "Bonferroni's correction for 2 comparisons" in section
    assert "-6.74 … -2.60" in (tmp_path / "comparison.html").read_text()
    variants = json.loads((tmp_path / "comparison.json").read_text())["variants"]
    assert variants["-XLCO"]["differences"]["retrieval/best"]["mean"] == pytest.approx(-0.14 / 3)
    assert not variants["full"]["differences"]
    logged = summary.name_metrics()
    assert logged["-XLCO/retrieval/best/difference"] == pytest.approx(-0.14 / 3)
    low, high = (logged[f"-XLCO/retrieval/best/difference/{bound}"] for bound in ("low", "high"))
    assert (low, high) == pytest.approx((-0.0674, -0.0260), abs=5e-5)
    assert "full/retrieval/best/difference" not in logged


def test_only_a_suite_says_that_its_seeds_share_one_pre_training(tmp_path, written):
    page.write(tmp_path, "comparison", ablation(full=[{"retrieval__best": 0.4}] * 2))

    sentence = "All seeds fine-tune the same pre-trained model"
    assert sentence in (written[0] / "suite.md").read_text()
    assert sentence not in (tmp_path / "comparison.md").read_text()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_values_that_are_not_finite_do_not_count_and_leave_valid_json(tmp_path, bad):
    summary = ablation(full=[{"retrieval__best": 0.4}, {"retrieval__best": 0.4}, {"retrieval__best": bad}])
    page.write(tmp_path, "comparison", summary)

    plain = json.loads((tmp_path / "comparison.json").read_text(), parse_constant=pytest.fail)
    assert plain["variants"]["full"]["metrics"]["retrieval/best"]["values"] == {"1": 0.4, "2": 0.4, "3": None}
    assert "40.00 ± 0.00 (n=2)" in (tmp_path / "comparison.md").read_text()


def test_names_are_escaped_in_html_and_pipes_in_markdown(tmp_path):
    page.write(tmp_path, "comparison", ablation(**{"<b>full|$x$</b>": [{"retrieval__best": 0.4}] * 2}))

    html = (tmp_path / "comparison.html").read_text()
    assert "<b>full" not in html and "&lt;b&gt;full|$x$&lt;/b&gt;" in html
    assert r"| <b>full\|$x$</b> |" in (tmp_path / "comparison.md").read_text()


def test_the_papers_ablations_have_a_table_of_their_own(tmp_path):
    page.write(tmp_path, "comparison", ablation(**{"-XLCO": [{"retrieval__best": 0.4}], "own": [{}]}))

    ours, paper = (tmp_path / "comparison.md").read_text().split("## What the paper reports")
    assert "76.24" not in ours and "arXiv 2007.07834" in paper
    assert [cell.strip() for cell in paper.splitlines()[-1].split("|")[1:-1]] == ["-XLCO", "76.24", "67.43", "49.23"]


def draw_line(title: str = "") -> Figure:
    figure = Figure()
    figure.subplots().plot([1, 3, 2])
    figure.axes[0].set_title(title)
    return figure


def test_equal_figures_have_equal_bytes_and_a_dollar_sign_is_text():
    drawings = {"line": lambda: draw_line(r"en-$\frac{$"), "nothing": lambda: None}

    assert list(figures.render(drawings)) == ["line"]
    assert figures.render(drawings) == figures.render(drawings)


@pytest.mark.parametrize("values", [(210.8, 12_356.0), (200.0, 430.0)])
def test_a_logarithmic_axis_has_plain_numbers(values):
    languages = {code: {"perplexity": value} for code, value in zip(("en", "de"), values, strict=True)}
    scores = Scores("perplexity", languages, {"perplexity": 1.0}, {"en": 1, "de": 1}, "sha256:1")
    summary = summarise_evaluation("toy", {"ours": ""}, [(Perplexity(), None)], {"ours": {"perplexity": scores}})

    with matplotlib.rc_context(figures._STYLE):
        figure = figures.draw_languages("perplexity", summary.tasks["perplexity"], {"ours": "black"})
        figure.canvas.draw()
        axis = figure.axes[0].yaxis
        labels = [label.get_text() for label in (*axis.get_ticklabels(), *axis.get_ticklabels(minor=True))]

    assert any(labels) and not any("$" in text or "mathdefault" in text for text in labels)

"""The report says what the scores say, in one file that asks nothing of the network."""

import json
import re
from pathlib import Path

import pytest

from infoxlm_core.results import figures, reports
from infoxlm_core.tasks.nearest import summarise


def make_model(share: float, **more) -> dict:
    """Scores of a model with one layer that finds `share` of the translations at it, and half of that elsewhere."""
    part = {"all": [share / 2, share], "subset": [None, share / 4]}
    cells = {"mean": {code: {"from_pivot": part, "to_pivot": part} for code in ("de", "zh")}}
    best = {"layer": 1, "pooling": "mean", **summarise(cells["mean"], 1)}
    retrieval = {"best": best, "contrast": None, "chance": 0.05, "cells": cells}
    sizes = {
        "type": "xlm-roberta",
        "layers": 1,
        "hidden": 32,
        "vocabulary": 1234,
        "parameters": 56789,
        "contrast": (1, "mean"),
    }
    by_layer = {"mean": [share / 2, share], "cls": [0.0, 0.01]}
    return {"encoder": sizes, "retrieval": retrieval | {"by_layer": by_layer}, **more}


@pytest.fixture(scope="module")
def scores() -> dict:
    dropped = {"corpus": "web", "kind": "pairs", "file": "web.tsv", "read": 10, "kept": 7, "dropped": {"too_short": 3}}
    return {
        "model": "InfoXLM",
        "pivot": "en",
        "pairs": {code: {"held_out": 30, "drawn": 20, "no_overlap": 5} for code in ("de", "zh")},
        "models": {
            "InfoXLM": make_model(
                0.4321,
                perplexity={"mean": 123.4, "languages": {"en": 100.0, "de": 146.8}},
                curves={"loss/mlm": [(1, 9.0), (2, 8.0)], "xlco/accuracy": [(1, 0.1), (2, 0.2)]},
                classification={
                    "mean": 0.7, "transfer_gap": 0.2, "majority": 0.5, "rows": 9, "labels": ["x", "y"],
                    "languages": {"de": 0.6, "en": 0.8},
                },
            ),
            "<untrained>": make_model(0.1),
        },
        "corpus": {"files": [dropped | {"language": "de"}, dropped | {"language": "zh"}]},
        "settings": {"seed": 1},
    }  # fmt: skip


@pytest.fixture(scope="module")
def written(scores, tmp_path_factory) -> Path:
    """The report of these scores: its figures take seconds."""
    directory = tmp_path_factory.mktemp("report")
    reports.write(directory, scores)
    return directory


def test_the_report_shows_the_scores_and_escapes_names(written):
    page = (written / "report.html").read_text()
    assert "43.2" in page and "123.4" in page
    assert "<tr><td>too short</td><td>6</td></tr>" in page
    assert "&lt;untrained&gt;" in page and "<untrained>" not in page


def test_the_report_asks_nothing_of_the_network(written):
    page = (written / "report.html").read_text()
    assert "<script" not in page and "<link" not in page
    assert all(source.startswith("data:image/svg+xml;base64,") for source in re.findall(r'src="([^"]*)"', page))
    assert len(re.findall("<img", page)) == len(figures.FIGURES) == len(list((written / "figures").glob("*.png")))


def test_a_report_of_retrieval_alone_has_no_empty_parts(scores, tmp_path):
    reports.write(tmp_path, scores | {"models": {"InfoXLM": make_model(0.4)}, "corpus": None})

    page = (tmp_path / "report.html").read_text()
    assert "<h2>Retrieval</h2>" in page
    assert not re.search("<h2>(Perplexity|Classification|Training|Text)</h2>", page)
    assert {path.stem for path in (tmp_path / "figures").iterdir()} == {"retrieval_by_layer", "retrieval_by_language"}


def test_scores_can_be_read_back(written):
    found = json.loads((written / "scores.json").read_text())
    assert found["models"]["InfoXLM"]["retrieval"]["best"]["mean"] == 0.4321


def test_the_model_card_opens_with_its_languages_and_lists_scores_and_counts(written):
    card = (written / "model_card.md").read_text()
    assert card.startswith('---\nlanguage:\n- "en"\n- "de"\n- "zh"\n')
    assert "hidden_states[1]" in card
    assert "| InfoXLM | 1 | mean | 43.2 | 43.2 | 43.2 | 10.8 | 43.2 | 43.2 |\n| <untrained> | 1 |" in card
    assert "| language | pairs |\n|---|---|\n| de | 7 |\n| zh | 7 |\n" in card


def test_the_cleaning_table_sums_lines_by_corpus_and_reason(scores):
    table = reports.tabulate_corpus(scores["corpus"])

    assert table["by_corpus"] == {("web", "pairs"): {"read": 20, "kept": 14, "too_short": 6}}
    assert table["by_kind"] == {"pairs": {"read": 20, "kept": 14, "too_short": 6}}
    assert table["kept"] == {"de": {"pairs": 7}, "zh": {"pairs": 7}}

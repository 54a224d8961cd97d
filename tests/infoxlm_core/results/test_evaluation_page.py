"""The page and the model card of an evaluation: they ask nothing of the network, and hold what was found."""

import json
import re
from dataclasses import replace

import pytest

from infoxlm_core.results import evaluation_page
from infoxlm_core.results.evaluation import Evaluated, Evaluation
from infoxlm_core.tasks.scores import Scores


def make_model(share: float, **tasks) -> Evaluated:
    """A model with one layer that finds `share` of the translations at it, and half of that elsewhere."""
    row = dict.fromkeys(("from_pivot", "to_pivot", "mean"), share) | {"no_overlap": share / 4}
    sizes = {"type": "xlm-roberta", "layers": 1, "hidden": 32, "vocabulary": 1234, "parameters": 56789}
    details = {
        "best": {"layer": 1, "pooling": "mean"}, "contrast": None, "chance": 0.05,
        "encoder": sizes | {"contrast": (1, "mean")},
        "by_layer": {"mean": [share / 2, share], "cls": [0.0, 0.01]},
    }  # fmt: skip
    languages = {"de": row, "zh": row}
    retrieval = Scores("retrieval", languages, row, dict.fromkeys(languages, 20), "sha256:1", details=details)
    return Evaluated({"retrieval": retrieval, **tasks})


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
    evaluation_page.write(tmp_path, scores)

    page = (tmp_path / "report.html").read_text()
    assert "43.2" in page and "123.4" in page
    assert "<tr><td>too short</td><td>6</td></tr>" in page
    assert "&lt;untrained&gt;" in page and "<untrained>" not in page


def test_the_report_asks_nothing_of_the_network(scores, tmp_path):
    evaluation_page.write(tmp_path, scores)

    page = (tmp_path / "report.html").read_text()
    assert "<script" not in page and "<link" not in page
    assert all(source.startswith("data:image/svg+xml;base64,") for source in re.findall(r'src="([^"]*)"', page))
    assert len(re.findall("<img", page)) == 5 == len(list((tmp_path / "figures").glob("*.png")))


def test_a_report_of_retrieval_alone_has_no_empty_parts(scores, tmp_path):
    evaluation_page.write(tmp_path, replace(scores, models={"InfoXLM": make_model(0.4)}, corpus=None))

    page = (tmp_path / "report.html").read_text()
    assert "<h2>Retrieval</h2>" in page
    assert not re.search("<h2>(Perplexity|Classification|Training|Text)</h2>", page)
    assert {path.stem for path in (tmp_path / "figures").iterdir()} == {"retrieval_by_layer", "retrieval_by_language"}


def test_scores_can_be_read_back(scores, tmp_path):
    evaluation_page.write(tmp_path, scores)

    found = json.loads((tmp_path / "scores.json").read_text())
    assert found["models"]["InfoXLM"]["tasks"]["retrieval"]["mean"]["mean"] == 0.4321
    assert (found["model"], found["pivot"], found["test_set"]) == ("InfoXLM", "en", "sha256:1")  # the registry reads


def test_the_model_card_opens_with_its_languages_and_lists_scores_and_counts(scores, tmp_path):
    evaluation_page.write(tmp_path, scores)

    card = (tmp_path / "model_card.md").read_text()
    assert card.startswith('---\nlanguage:\n- "en"\n- "de"\n- "zh"\n')
    assert "hidden_states[1]" in card
    assert "| InfoXLM | 1 | mean | 43.2 | 43.2 | 43.2 | 10.8 | 43.2 | 43.2 |\n| <untrained> | 1 |" in card
    assert "| language | pairs |\n|---|---|\n| de | 7 |\n| zh | 7 |\n" in card


def test_the_cleaning_table_sums_lines_by_corpus_and_reason(scores):
    table = evaluation_page.tabulate_corpus(scores.corpus)

    assert table["by_corpus"] == {("web", "pairs"): {"read": 20, "kept": 14, "too_short": 6}}
    assert table["by_kind"] == {"pairs": {"read": 20, "kept": 14, "too_short": 6}}
    assert table["kept"] == {"de": {"pairs": 7}, "zh": {"pairs": 7}}


def measured(mean: float, **languages: dict[str, float]) -> Scores:
    by_layer = {"mean": [0.1, mean], "cls": [0.2]}
    details = {"by_layer": by_layer, "best": {"pooling": "mean", "layer": 1}}
    return Scores("retrieval", languages, {"f1": mean}, counts={}, test_set="", details=details)


def test_a_language_that_a_floor_was_not_measured_in_stays_empty():
    ours, floor = measured(0.5, de={"f1": 0.4}, fr={"f1": 0.6}), measured(0.1, de={"f1": 0.1})

    table = evaluation_page.tabulate_scores("Found", {"ours": ours, "floor": floor}, {"F1": "f1"})

    assert [column.name for column in table.columns] == ["mean", "de", "fr"]
    assert [(line.name, line.cells, line.own) for line in table.lines] == [
        ("ours", (0.5, 0.4, 0.6), True),
        ("floor", (0.1, 0.1, None), False),
    ]


def test_the_best_layer_is_marked_in_its_pooling_and_shorter_rows_are_filled():
    table = evaluation_page.tabulate_layers({"ours": measured(0.5)})

    assert [(line.detail, line.cells, line.marked) for line in table.lines] == [
        ("mean of tokens", (0.1, 0.5), 1),
        ("[CLS]", (0.2, ""), None),
    ]


def test_counts_of_lines_have_their_reasons_as_headings():
    table = evaluation_page.tabulate_counts("corpus", ["too_long"], {"wiki": {"too_long": 1200, "kept": 3}})

    assert [column.name for column in table.columns] == ["too long"]
    assert table.columns[0].show(table.lines[0].cells[0], 0.0) == "1,200"

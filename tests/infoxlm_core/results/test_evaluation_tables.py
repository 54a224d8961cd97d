"""The tables of an evaluation: a row for every model, a column for every language."""

from infoxlm_core.results import evaluation_tables
from infoxlm_core.tasks.task import Scores


def scores(mean: float, **languages: dict[str, float]) -> Scores:
    by_layer = {"mean": [0.1, mean], "cls": [0.2]}
    details = {"by_layer": by_layer, "best": {"pooling": "mean", "layer": 1}}
    return Scores("retrieval", languages, {"f1": mean}, counts={}, test_set="", details=details)


def test_a_language_that_a_floor_was_not_measured_in_stays_empty():
    ours, floor = scores(0.5, de={"f1": 0.4}, fr={"f1": 0.6}), scores(0.1, de={"f1": 0.1})

    table = evaluation_tables.of_scores("Found", {"ours": ours, "floor": floor}, {"F1": "f1"})

    assert [column.name for column in table.columns] == ["mean", "de", "fr"]
    assert [(line.name, line.cells, line.own) for line in table.lines] == [
        ("ours", (0.5, 0.4, 0.6), True),
        ("floor", (0.1, 0.1, None), False),
    ]


def test_the_best_layer_is_marked_in_its_pooling_and_shorter_rows_are_filled():
    table = evaluation_tables.of_layers({"ours": scores(0.5)})

    assert [(line.detail, line.cells, line.marked) for line in table.lines] == [
        ("mean of tokens", (0.1, 0.5), 1),
        ("[CLS]", (0.2, ""), None),
    ]


def test_counts_of_lines_have_their_reasons_as_headings():
    table = evaluation_tables.of_counts("corpus", ["too_long"], {"wiki": {"too_long": 1200, "kept": 3}})

    assert [column.name for column in table.columns] == ["too long"]
    assert table.columns[0].show(table.lines[0].cells[0], 0.0) == "1,200"

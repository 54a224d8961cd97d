"""The tables of our pages: which published rows stand beside ours, how cells are shown."""

import pytest

from infoxlm_core.results import published, task_tables
from tests.toys.scores import CLASSIFICATION, config, labelled, summed


def test_published_rows_stand_below_ours_with_rule_and_source(written):
    _, found = written

    (table,) = task_tables.tabulate_task("xnli", found.tasks["xnli"], "ours")

    assert [line.name for line in table.ours] == ["ours"]
    assert [column.name for column in table.columns] == ["mean", "en", "fr", "de"]
    infoxlm = next(line for line in table.published if line.name == "InfoXLM")
    mean, english, *_ = infoxlm.cells
    assert (infoxlm.rule, english) == ("1 (5 runs)", pytest.approx(0.864)) and "2007.07834" in infoxlm.source
    assert mean == pytest.approx((0.864 + 0.806 + 0.789) / 3)  # over what is shown, not as printed
    assert any("published means cover only those shown" in note for note in table.notes)
    assert next(line for line in table.published if line.rule == "N").name == "mBERT"


def test_translate_train_all_stands_beside_its_own_rows():
    languages = list(published.tables()["xnli"].columns)
    settings = CLASSIFICATION["settings"] | {"train_languages": languages}
    planned = config(both={"settings": settings, "table": "xnli"})

    summary = summed(planned, {"ours both seed 1": labelled(0.8, 0.7)})
    (table,) = task_tables.tabulate_task("both", summary.tasks["both"], "ours")

    assert [line.name for line in table.published].count("InfoXLM") == 1
    assert next(line for line in table.published if line.name == "InfoXLM").cells[1] == pytest.approx(0.861)


def test_retrieval_has_the_papers_two_groups_and_the_others_apart(written):
    _, found = written
    built = {table.name: table for table in task_tables.tabulate_task("tatoeba", found.tasks["tatoeba"], "ours")}

    assert {name: tuple(column.name for column in table.columns) for name, table in built.items()} == {
        f"tatoeba-{group}-{direction}": ("mean", code)
        for group, code in (("14", "deu"), ("22", "afr"), ("other", "gle"))
        for direction in ("xx-en", "en-xx")
    }
    first = built["tatoeba-14-xx-en"]
    assert [(line.name, line.detail) for line in first.ours] == [
        ("ours", "mean of tokens, layer 7, best on this set"), ("peer", "mean of tokens, layer 7, best on this set"),
        ("ours", "[CLS], last layer"), ("peer", "[CLS], last layer"),
    ]  # fmt: skip
    assert "the layer was chosen on these same pairs" in first.notes[0]
    assert first.published and not built["tatoeba-22-en-xx"].published and not built["tatoeba-other-xx-en"].published

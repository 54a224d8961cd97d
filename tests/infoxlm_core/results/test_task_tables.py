"""Which published rows stand below ours, and how retrieval is divided into tables."""

import pytest

from infoxlm_core.results import published, task_tables
from tests.toys.scores import CLASSIFICATION, config, labelled, summed


def test_published_rows_of_the_same_setting_are_below_ours_with_rule_and_source(suite):
    _, summary = suite

    [table] = task_tables.tabulate_task("xnli", summary.tasks["xnli"], "ours")

    assert [line.name for line in table.ours] == ["ours"]
    assert [column.name for column in table.columns] == ["mean", "en", "fr", "de"]
    infoxlm = next(line for line in table.published if line.name == "InfoXLM")
    assert infoxlm.rule == "1 (5 runs)"
    assert "2007.07834" in infoxlm.source
    # The mean covers the languages that are shown, so it is not the printed one.
    assert infoxlm.cells == pytest.approx(((0.864 + 0.806 + 0.789) / 3, 0.864, 0.806, 0.789))
    assert any("published averages cover only the languages shown" in note for note in table.notes)
    assert next(line for line in table.published if line.rule == "N").name == "mBERT"


def test_translate_train_all_is_compared_with_its_own_published_rows():
    languages = list(published.tables()["xnli"].columns)
    settings = CLASSIFICATION["settings"] | {"train_languages": languages}
    planned = config(translated={"settings": settings, "table": "xnli"})
    summary = summed(planned, {"ours translated seed 1": labelled(0.8, 0.7)})

    [table] = task_tables.tabulate_task("translated", summary.tasks["translated"], "ours")

    [infoxlm] = [line for line in table.published if line.name == "InfoXLM"]
    assert infoxlm.cells[1] == pytest.approx(0.861)


def test_retrieval_has_a_table_for_each_group_of_the_paper_and_direction(suite):
    _, summary = suite

    tables = {table.name: table for table in task_tables.tabulate_task("tatoeba", summary.tasks["tatoeba"], "ours")}

    assert {name: tuple(column.name for column in table.columns) for name, table in tables.items()} == {
        f"tatoeba-{group}-{direction}": ("mean", code)
        for group, code in (("14", "deu"), ("22", "afr"), ("other", "gle"))
        for direction in ("xx-en", "en-xx")
    }
    table = tables["tatoeba-14-xx-en"]
    assert [(line.name, line.detail) for line in table.ours] == [
        ("ours", "mean of tokens, layer 7, best on this set"), ("peer", "mean of tokens, layer 7, best on this set"),
        ("ours", "[CLS], last layer"), ("peer", "[CLS], last layer"),
    ]  # fmt: skip
    assert "the layer was chosen on these same pairs" in table.notes[0]
    assert table.published
    assert not tables["tatoeba-22-en-xx"].published
    assert not tables["tatoeba-other-xx-en"].published

"""The published tables: what they print follows from their cells, but for what the specification names."""

from statistics import fmean

import pytest

from infoxlm_core import languages
from infoxlm_core.results import published
from infoxlm_core.tasks.scores import transfer_gap

SWAPPED = {("XLM without TLM", "N"): 70.7, ("XLM without TLM", "1"): 71.3}
"""The two zero-shot rows whose printed means are each other's, and what their cells give."""

WITH_MEAN = [
    (name, row)
    for name, table in published.tables().items()
    for row in table.rows
    if row.mean is not None and None not in row.cells.values()
]


def find(table: str, model: str, kind: str = "zero-shot", size: str = "base") -> published.PublishedRow:
    (row,) = [r for r in published.tables()[table].rows if (r.model, r.kind, r.size) == (model, kind, size)]
    return row


@pytest.mark.item("A21")
@pytest.mark.parametrize(("table", "row"), WITH_MEAN, ids=lambda x: x if isinstance(x, str) else f"{x.model} {x.rule}")
def test_a_printed_mean_follows_from_its_cells(table, row):
    wrong = table == "xnli" and row.kind == "zero-shot" and (row.model, row.rule) in SWAPPED
    expected = SWAPPED[row.model, row.rule] if wrong else 100 * row.mean

    assert 100 * fmean(row.cells.values()) == pytest.approx(expected, abs=0.05 + 1e-9)
    assert wrong == ("swapped" in row.note)


def test_most_printed_means_can_be_checked():
    assert len(WITH_MEAN) == 17 + 7 + 6 + 4 + 5 + 2


@pytest.mark.item("A21")
@pytest.mark.parametrize(
    ("table", "model", "gap"),
    [
        ("xnli", "mBERT", 16.9),
        ("xnli", "XLM-R (reimplemented)", 10.4),
        ("xnli", "InfoXLM", 10.9),
        ("mlqa/f1", "mBERT", 23.3),
        ("mlqa/f1", "XLM-R (reimplemented)", 17.6),
    ],
)
def test_the_transfer_gaps_follow_from_the_rows(table, model, gap):
    found = 100 * transfer_gap(find(table, model).cells)

    assert found == pytest.approx(gap, abs=0.05 + 1e-9)
    assert 100 * find("transfer_gap", model).cells[table.removesuffix("/f1")] == pytest.approx(gap)


def test_columns_are_the_papers_languages_by_the_names_that_our_scores_have():
    tables = published.tables()

    assert tables["tatoeba/14/xx_en"].columns == tables["tatoeba/14/en_xx"].columns == languages.COVERED
    assert tables["tatoeba/22/xx_en"].columns == languages.UNCOVERED
    assert set(tables["xnli"].columns) == {*languages.COVERED, "en"}
    assert tables["mlqa/f1"].columns == tables["mlqa/exact_match"].columns


def test_cells_are_shares_and_a_cell_that_nobody_can_read_is_not_zero():
    cells = [cell for table in published.tables().values() for row in table.rows for cell in row.cells.values()]

    assert all(cell is None or 0 < cell < 1 for cell in cells) and cells.count(None) > 20
    assert find("tatoeba/22/xx_en", "InfoXLM", "mean of tokens").cells["af"] is None


def test_every_row_says_where_it_is_from():
    assert all(row.source for table in published.tables().values() for row in table.rows)
    assert {row.rule for row in published.tables()["xnli"].rows} == {"1", "N", ""}
    assert find("xnli", "InfoXLM").runs == 5


def test_the_published_ablations_agree_where_tables_6_and_7_meet():
    full, rest = published.ablations()["full"], [row for name, row in published.ablations().items() if name != "full"]

    assert set(full) == set(published.METRICS)
    assert all(row[name] < full[name] for row in rest for name in row)

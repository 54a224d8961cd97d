"""The published tables: means and transfer gaps follow from their cells, except for two known misprints."""

from statistics import fmean

import pytest

from infoxlm_core import languages
from infoxlm_core.results import published
from infoxlm_core.tasks.scores import transfer_gap

SWAPPED_MEANS = {("XLM without TLM", "N"): 70.7, ("XLM without TLM", "1"): 71.3}
"""The two zero-shot rows that are printed with each other's means -> the mean of their cells."""
ROWS = [(name, row) for name, table in published.tables().items() for row in table.rows]
ROWS_WITH_MEAN = [(name, row) for name, row in ROWS if row.mean is not None and None not in row.cells.values()]


def find_row(table: str, model: str, kind: str = "zero-shot", size: str = "base") -> published.PublishedRow:
    [row] = [r for r in published.tables()[table].rows if (r.model, r.kind, r.size) == (model, kind, size)]
    return row


@pytest.mark.item("A21")
@pytest.mark.parametrize(("table", "row"), ROWS_WITH_MEAN)
def test_printed_mean_follows_from_the_cells(table, row):
    is_swapped = table == "xnli" and row.kind == "zero-shot" and (row.model, row.rule) in SWAPPED_MEANS
    expected = SWAPPED_MEANS[row.model, row.rule] if is_swapped else 100 * row.mean

    assert 100 * fmean(row.cells.values()) == pytest.approx(expected, abs=0.05 + 1e-9)
    assert is_swapped == ("swapped" in row.note)


def test_number_of_printed_means_that_can_be_checked():
    assert len(ROWS_WITH_MEAN) == 17 + 7 + 6 + 4 + 5 + 2


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
def test_printed_transfer_gap_follows_from_the_cells(table, model, gap):
    assert 100 * transfer_gap(find_row(table, model).cells) == pytest.approx(gap, abs=0.05 + 1e-9)
    assert 100 * find_row("transfer_gap", model).cells[table.removesuffix("/f1")] == pytest.approx(gap)


def test_columns_have_the_language_codes_of_our_scores():
    tables = published.tables()

    assert tables["tatoeba/14/xx_en"].columns == tables["tatoeba/14/en_xx"].columns == languages.COVERED
    assert tables["tatoeba/22/xx_en"].columns == languages.UNCOVERED
    assert set(tables["xnli"].columns) == {*languages.COVERED, "en"}
    assert tables["mlqa/f1"].columns == tables["mlqa/exact_match"].columns


def test_cells_are_shares_or_none_where_the_copy_is_not_legible():
    cells = [cell for _, row in ROWS for cell in row.cells.values()]

    assert all(cell is None or 0 < cell < 1 for cell in cells)
    assert cells.count(None) > 20
    assert find_row("tatoeba/22/xx_en", "InfoXLM", "mean of tokens").cells["af"] is None

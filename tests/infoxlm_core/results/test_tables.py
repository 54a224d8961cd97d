"""How tables are written as text and CSV."""

import csv
import math

import pytest

from infoxlm_core.results.tables import Column, Line, PageTable, format_like_mean, tabulate_counts, to_csv, to_text_rows


def test_csv_has_shares_from_0_to_1_and_tells_ours_from_published(suite):
    output, _ = suite

    ours, *published = csv.DictReader((output / "tables/xnli.csv").open())

    assert (ours["whose"], ours["model"], ours["de"]) == ("ours", "ours", "0.75")
    assert float(ours["de deviation"]) == pytest.approx(0.1 / math.sqrt(2), rel=1e-5)
    assert {row["whose"] for row in published} == {"published"}
    assert all(row["source"] for row in published)


def test_columns_that_no_row_needs_are_left_out():
    columns = (Column("de"),)
    short_table = PageTable("name", "", columns, (Line("ours", (0.5,)),))
    theirs = Line("theirs", (None,), source="paper")
    full_table = PageTable("name", "", columns, (Line("ours", (0.5,), "mean", "1"),), (theirs,))

    assert to_text_rows(short_table) == [["model", "de"], ["ours", "50.0"]]
    assert to_text_rows(full_table, ["paper"]) == [
        ["model", "details", "#M", "de", "from"], ["ours", "mean", "1", "50.0", "ours"], ["theirs", "", "", "–", "[1]"],
    ]  # fmt: skip


def test_deviation_has_the_decimals_of_its_mean():
    assert format_like_mean(264.31, mean=264.31) == "264.3"
    assert format_like_mean(6.85, mean=264.31) == "6.8"
    assert format_like_mean(12356.2, mean=12356.2) == "12,356"


def test_counts_are_whole_numbers_in_text_and_csv():
    table = tabulate_counts("corpus", ["too_long"], {"wiki": {"too_long": 1200, "kept": 3}})

    assert to_text_rows(table) == [["corpus", "too long"], ["wiki", "1,200"]]
    assert to_csv(table).splitlines()[1] == "ours,wiki,,,1200,,"

"""How tables are written."""

import csv
import math

import pytest

from infoxlm_core.results.tables import Column, Line, PageTable, count, four_digits, lay_out, tabulate_counts, to_csv


def test_tables_are_csv_with_shares_and_say_whose_a_row_is(written):
    output, _ = written

    rows = list(csv.DictReader((output / "tables/xnli.csv").open()))

    assert (rows[0]["whose"], rows[0]["model"], rows[0]["de"]) == ("ours", "ours", "0.75")
    assert float(rows[0]["de deviation"]) == pytest.approx(0.1 / math.sqrt(2), rel=1e-5)
    assert {row["whose"] for row in rows[1:]} == {"published"} and all(row["source"] for row in rows[1:])


def test_a_table_as_text_has_only_the_columns_that_some_row_needs():
    columns = (Column("de"),)

    plain = PageTable("it", "", columns, (Line("ours", (0.5,)),))
    full = PageTable("it", "", columns, (Line("ours", (0.5,), "mean", "1"),), (Line("theirs", (None,), source="s"),))

    assert lay_out(plain) == [["model", "de"], ["ours", "50.0"]]
    assert lay_out(full, ["s"]) == [
        ["model", "details", "#M", "de", "from"], ["ours", "mean", "1", "50.0", "ours"], ["theirs", "", "", "–", "[1]"],
    ]  # fmt: skip


def test_deviation_has_the_decimals_of_its_mean():
    assert (four_digits(264.31, 264.31), four_digits(6.85, 264.31)) == ("264.3", "6.8")
    assert four_digits(12356.2, 12356.2) == "12,356"


def test_counts_of_lines_have_their_reasons_as_headings():
    table = tabulate_counts("corpus", ["too_long"], {"wiki": {"too_long": 1200, "kept": 3}})

    assert lay_out(table) == [["corpus", "too long"], ["wiki", count(1200)]]
    assert to_csv(table).splitlines()[1].startswith("ours,wiki,,,1200,")

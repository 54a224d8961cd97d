"""Tables of text grow row by row and come back row by row."""

import pytest

from infoxlm_core.corpora import tables


def test_rows_come_back_in_order_beyond_one_group_and_a_table_without_rows_does_not_exist(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "ROW_GROUP", 3)
    rows = [(f"a {number}", f"b {number}") for number in range(7)]

    with tables.Tables(tmp_path, tables.of_text("text"), tables.of_text("source", "target")) as made:
        made.add("mono/x.parquet", ("alone",))
        for row in rows:
            made.add("pairs/x.parquet", row)

    assert list(tables.read_rows(tmp_path / "pairs/x.parquet")) == rows
    assert list(tables.read_rows(tmp_path / "mono/x.parquet")) == [("alone",)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mono", "pairs"]


def test_what_fails_in_the_middle_writes_no_more(tmp_path):
    def write() -> None:
        with tables.Tables(tmp_path, tables.of_text("text")) as made:
            made.add("x.parquet", ("half",))
            raise ValueError("in the middle")

    with pytest.raises(ValueError, match="in the middle"):
        write()

    assert not list(tmp_path.iterdir())

"""The tables of a prepared corpus: Parquet files of text, written and read row by row."""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

ROW_GROUP = 1 << 15  # rows
TRAINING = ("mono", "pairs")  # folders for rows of one language and of two
HELD_OUT = ("held_out_mono", "held_out")
LABELLED = ("text", "label", "language", "split")  # columns of labelled text


def read_rows(path: Path) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of one file."""
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(ROW_GROUP):
            yield from rows_of(batch)


def rows_of(table: pa.Table | pa.RecordBatch) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of a table as plain values."""
    return zip(*(column.to_pylist() for column in table.columns), strict=True)


def of_text(*columns: str) -> pa.Schema:
    """The schema of a table of text."""
    return pa.schema([(column, pa.string()) for column in columns])


def of_rows(schema: pa.Schema, rows: list[tuple[Any, ...]]) -> pa.Table:
    """A table of at least one row."""
    columns = zip(*rows, strict=True)
    return pa.table([pa.array(c, f.type) for c, f in zip(columns, schema, strict=True)], schema=schema)


class Tables:
    """Parquet files below a folder that grow row by row; one that gets no row does not exist."""

    def __init__(self, folder: Path, *schemas: pa.Schema):
        self.folder, self.schemas = folder, {len(schema): schema for schema in schemas}  # by width of a row
        self.rows: dict[str, list[tuple[Any, ...]]] = defaultdict(list)
        self.writers: dict[str, pq.ParquetWriter] = {}

    def add(self, name: str, row: tuple[Any, ...]) -> None:
        self.rows[name].append(row)
        if len(self.rows[name]) >= ROW_GROUP:
            self._flush(name)

    def _flush(self, name: str) -> None:
        rows, self.rows[name] = self.rows[name], []
        schema = self.schemas[len(rows[0])]
        if name not in self.writers:
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            self.writers[name] = pq.ParquetWriter(self.folder / name, schema, compression="zstd")
        self.writers[name].write_table(of_rows(schema, rows))

    def __enter__(self) -> "Tables":
        return self

    def __exit__(self, *failure: object) -> None:
        for name in [name for name, rows in self.rows.items() if rows and failure[0] is None]:
            self._flush(name)
        for writer in self.writers.values():
            writer.close()

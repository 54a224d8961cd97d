"""Tables of a prepared corpus: Parquet files of text that are read and written in bounded memory."""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from infoxlm_core import user_files
from infoxlm_core.corpora.lines import MAX_RATIO, limit_unpacked_bytes
from infoxlm_core.errors import DataCorrupt, InfoXLMError, InputError, one_line

ROW_GROUP = 1 << 15  # rows that are read into memory at a time
MAX_FRAME = 1 << 30  # bytes; larger tables are loaded whole only if their files are also large
MAX_BATCH = 64 << 20  # bytes of text in memory at a time
_POINTER_SIZE = 8  # bytes of a string reference; pandas stores one for each cell
TRAINING = ("mono", "pairs")  # directories of monolingual and bilingual rows
HELD_OUT = ("held_out_mono", "held_out")  # the same for text reserved for evaluation
LABELLED = ("text", "label", "language", "split")  # columns of the labelled table


@contextmanager
def translate_arrow_errors(path: Path, remedy: str, error_class: type[InfoXLMError] = InputError) -> Iterator[None]:
    """Translate Arrow's errors about a damaged Parquet file to `error_class`, with the path and the remedy."""
    try:
        yield
    except (pa.ArrowException, OSError, ValueError) as error:  # ValueError: invalid UTF-8 or a missing column
        message = f"{path} cannot be read ({one_line(error)}): {remedy}"
        raise user_files.translate_error(error, path) or error_class(message) from None


def read_frame(path: Path, columns: Sequence[str] | None, remedy: str) -> pd.DataFrame:
    """Read a Parquet file with pandas.

    Raises:
        InputError: the file is damaged, contains text that is not UTF-8, or unpacks to more than `MAX_FRAME` bytes and
            `MAX_RATIO` times its size.
    """
    user_files.check_readable(path)
    column_names = None if columns is None else list(columns)
    try:
        _check_unpacked_size(path, column_names)
        return pd.read_parquet(path, columns=column_names)
    except InputError:
        raise
    except Exception as error:  # pandas does not validate metadata, so any exception is possible
        message = f"{path} cannot be read ({one_line(error)}): {remedy}"
        raise user_files.translate_error(error, path) or InputError(message) from None


def _check_unpacked_size(path: Path, columns: list[str] | None) -> None:
    """Raise InputError if a Parquet file unpacks to more than `MAX_FRAME` bytes and `MAX_RATIO` times its size.

    A file stores repeated values once, so a small file may unpack to any size. This check unpacks one batch at a time.
    """
    max_bytes = max(MAX_FRAME, MAX_RATIO * path.stat().st_size)
    unpacked_bytes = 0
    text_columns = [field.name for field in pq.read_schema(path) if is_text(field.type)]
    with pq.ParquetFile(path, read_dictionary=text_columns) as file:
        for batch in file.iter_batches(ROW_GROUP, columns=columns):
            batch.validate(full=True)  # otherwise, invalid UTF-8 is found only when a cell is read
            for column in batch.columns:
                if is_text(_find_value_type(column.type)):
                    unpacked_bytes += int(_measure_cells(column).sum()) + _POINTER_SIZE * len(column)
                else:
                    unpacked_bytes += column.nbytes
            if unpacked_bytes > max_bytes:
                raise InputError(f"{path} unpacks to more than {max_bytes:,} bytes: split it into several files")


def count_rows(path: Path) -> int:
    """Return the row count of a table written by the pipeline. Raise DataCorrupt if the table cannot be read."""
    with translate_arrow_errors(path, "prepare the text again", DataCorrupt):
        return pq.read_metadata(path).num_rows


def read_text_columns(path: Path, columns: Sequence[str]) -> Iterator[tuple[str | None, ...]]:
    """Yield rows of text columns from a user's Parquet file. Missing texts are None.

    Repeated values are stored in memory only once.

    Raises:
        InputError: a column is not text, or the distinct values exceed the limit for the file size.
    """
    max_bytes = limit_unpacked_bytes(user_files.check_readable(path).stat().st_size)
    unpacked_bytes = 0
    _check_text_columns(path, columns)
    with pq.ParquetFile(path, read_dictionary=list(columns)) as file:
        for batch in file.iter_batches(ROW_GROUP, columns=list(columns)):
            sizes_of_columns = [_measure_cells(batch[column]) for column in columns]
            for column, column_sizes in zip(columns, sizes_of_columns, strict=True):
                unpacked_bytes += _count_distinct_bytes(batch[column], column_sizes)
            if unpacked_bytes > max_bytes:
                raise InputError(
                    f"{path}: DecompressionLimit: unpacks to over {MAX_RATIO} times its size: if the file is correct, "
                    "write it without compression"
                )
            # As Python values, repetitions need memory again, so convert rows in slices of about MAX_BATCH bytes.
            row_sizes = np.sum(sizes_of_columns, axis=0)
            slice_numbers = np.cumsum(row_sizes) // MAX_BATCH  # (rows,)
            _, first_rows = np.unique(slice_numbers, return_index=True)
            for start, end in itertools.pairwise([*first_rows, len(batch)]):
                yield from iterate_rows(batch.select(list(columns)).slice(start, end - start))


def _check_text_columns(path: Path, columns: Sequence[str]) -> None:
    """Raise InputError if a column of a Parquet file is not text. A column of type null counts as text without
    values."""
    schema = pq.read_schema(path)
    for column in columns:
        value_type = _find_value_type(schema.field(column).type)
        if not (is_text(value_type) or pa.types.is_null(value_type)):
            raise InputError(f"{path}: column {column} is {value_type!s:.80}, not text: write a string in each row")


def is_text(data_type: pa.DataType) -> bool:
    """Return whether a data type is text."""
    return pa.types.is_string(data_type) or pa.types.is_large_string(data_type) or pa.types.is_string_view(data_type)


def _find_value_type(data_type: pa.DataType) -> pa.DataType:
    """Return the type of a column's values, also if the column is dictionary-encoded."""
    return data_type.value_type if pa.types.is_dictionary(data_type) else data_type


def _count_distinct_bytes(column: pa.Array, cell_sizes: np.ndarray) -> int:
    """Return a column's size in bytes, counting repeated values once. `cell_sizes` has the bytes of each cell."""
    total_bytes = int(cell_sizes.sum())
    if not pa.types.is_dictionary(column.type):
        return total_bytes
    dictionary_bytes = int(_measure_cells(column.dictionary).sum())
    return min(total_bytes, dictionary_bytes)  # a dictionary may contain unused values


def _measure_cells(column: pa.Array) -> np.ndarray:
    """Return the size of each cell in bytes (rows,)."""
    if pa.types.is_null(column.type):
        return np.zeros(len(column), np.int64)
    if pa.types.is_dictionary(column.type):
        sizes = pc.binary_length(column.dictionary).take(column.indices)
    else:
        sizes = pc.binary_length(column)
    return pc.fill_null(sizes, 0).to_numpy(zero_copy_only=False).astype(np.int64)


def iterate_rows(table: pa.Table | pa.RecordBatch) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of a table as Python values."""
    columns = [column.to_pylist() for column in table.columns]
    return zip(*columns, strict=True)


def make_text_schema(*columns: str) -> pa.Schema:
    """Return the schema of a table of text columns."""
    return pa.schema([(column, pa.string()) for column in columns])


def make_table(schema: pa.Schema, rows: Sequence[tuple[Any, ...]]) -> pa.Table:
    """Return a table of the rows, of which there must be at least one."""
    columns = zip(*rows, strict=True)
    arrays = [pa.array(values, field.type) for values, field in zip(columns, schema, strict=True)]
    return pa.table(arrays, schema=schema)

"""Find and read labelled text. File names in a directory follow one of these public test sets:

XTREME     train-en.tsv  dev-ar.tsv  test-ar.tsv           no header: text, text_pair, label
XNLI       xnli.dev.tsv  xnli.test.tsv                     language, gold_label, …, sentence1, sentence2, …
XNLI-MT    multinli.train.fr.tsv                           premise, hypo, label
           xnli.test.en.tsv                                as XNLI; the language is that of the original
PAWS-X     fr/translated_train.tsv  fr/dev_2k.tsv          id, sentence1, sentence2, label
SIB-200    deu_Latn/train.tsv                              index_id, category, text
"""

import csv
import logging
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from infoxlm_core import user_files
from infoxlm_core.corpora import tables
from infoxlm_core.errors import InputError, one_line
from infoxlm_core.languages import is_known
from infoxlm_core.tasks.task import SPLITS

logger = logging.getLogger(__name__)
SUFFIXES = (".csv", ".tsv", ".parquet")
HEADERS: Sequence[Mapping[str, str]] = (  # for each public set: name in `table.COLUMNS` -> column name in the set
    {"text": "sentence1", "text_pair": "sentence2", "label": "gold_label"},
    {"text": "premise", "text_pair": "hypo", "label": "label"},
    {"text": "premise", "text_pair": "hypothesis", "label": "label"},  # XNLI on the Hub
    {"text": "sentence1", "text_pair": "sentence2", "label": "label"},
    {"text": "text", "label": "category"},
)
_SPLIT = f"(?P<split>{'|'.join(SPLITS)})"
_LANGUAGE = "(?P<language>[a-z]{2,3}(?:[-_][A-Za-z]{2,4})?)"
_WITH_LANGUAGE = re.compile(rf"(?:.*\.)?{_SPLIT}[.-]{_LANGUAGE}")  # train-en, multinli.train.fr
_WITHOUT_LANGUAGE = re.compile(rf"(?:.*[._-])?{_SPLIT}(?:[._-].*)?")  # xnli.dev, translated_train, dev_2k


class LabelledFile(NamedTuple):
    """A labelled file, with the split and language in its name. A value that the name lacks is None."""

    path: Path
    split: str | None
    language: str | None


def find_labelled_files(path: Path) -> list[LabelledFile]:
    """Find labelled files: the path itself or, in a directory, every file whose name contains a split.

    Raises:
        InputError: the path does not exist, its format is not supported, or no file name in the directory has a split.
    """
    if not path.exists():
        raise InputError(f"{path}: no such file or directory. Check the path.")
    if path.is_file():
        if path.suffix not in SUFFIXES:
            raise InputError(f"{path}: give labelled text as .csv, .tsv or .parquet, or a directory (data).")
        return [_parse_name(path)]
    files = []
    for file in user_files.list_tree(path):
        is_hidden = any(name.startswith(".") for name in file.relative_to(path).parts)  # .git, ._train-en.tsv
        if is_hidden or file.suffix not in SUFFIXES or not file.is_file():
            continue
        labelled_file = _parse_name(file)
        if labelled_file.split:
            files.append(labelled_file)
        else:
            logger.warning("%s: ignored, because its name contains no split (train, dev, test)", file)
    if not files:
        raise InputError(
            f"{path}: no labelled text in this directory. Use the layout of XTREME (train-en.tsv), XNLI "
            "(xnli.dev.tsv), XNLI-MT (multinli.train.fr.tsv), PAWS-X (fr/translated_train.tsv) or SIB-200 "
            "(deu_Latn/train.tsv)."
        )
    return files


def _parse_name(path: Path) -> LabelledFile:
    """Read the split from a file name, and the language from the name of the file or its directory."""
    with_language = _WITH_LANGUAGE.fullmatch(path.stem)
    if with_language:
        return LabelledFile(path, SPLITS[with_language["split"]], with_language["language"])
    without_language = _WITHOUT_LANGUAGE.fullmatch(path.stem)
    if not without_language:
        return LabelledFile(path, None, None)
    directory = path.parent.name
    language = directory if re.fullmatch(_LANGUAGE, directory) and is_known(directory) else None
    return LabelledFile(path, SPLITS[without_language["split"]], language)


def read_columns(path: Path, column_names: Collection[str]) -> pd.DataFrame:
    """Read a file as strings. The index has line numbers, or for Parquet, row numbers from 1.

    The first line is a header if it contains one of `column_names`, or all columns of a public set. Without a header,
    the columns are numbered.

    Raises:
        InputError: the file is not readable, or its rows differ in the number of fields.
    """
    try:
        if path.suffix == ".parquet":
            return _read_parquet(path)
        return _read_text(path, column_names)
    except csv.Error as error:
        raise InputError(
            f"{path}: not readable ({one_line(error)}). Quote the text, and put each sentence into one cell."
        ) from None
    except (ValueError, OSError, pa.ArrowException) as error:
        raise InputError(f"{path}: not readable ({one_line(error)}). Save it as UTF-8 or copy it again.") from None


def _read_parquet(path: Path) -> pd.DataFrame:
    """Read the text and number columns. Skip columns of lists, and columns of bytes in an unknown encoding."""
    schema = pq.read_schema(user_files.check_readable(path))
    if len(set(schema.names)) < len(schema.names):
        raise InputError(f"{path}: two columns have the same name. Rename one.")
    columns = [field.name for field in schema if not pa.types.is_nested(field.type) and not _is_bytes(field.type)]
    table = tables.read_frame(path, columns, "save it as UTF-8").astype("string")
    return table.set_axis(range(1, len(table) + 1))


def _is_bytes(data_type: pa.DataType) -> bool:
    """Return whether a column contains bytes, plain or dictionary-encoded."""
    if pa.types.is_dictionary(data_type):
        data_type = data_type.value_type
    return (
        pa.types.is_binary(data_type) or pa.types.is_large_binary(data_type) or pa.types.is_fixed_size_binary(data_type)
    )


def _read_text(path: Path, column_names: Collection[str]) -> pd.DataFrame:
    """Read a CSV or TSV file as `read_columns` describes."""
    cells = _read_cells(path)
    first_row = cells.iloc[0].tolist() if len(cells) else []
    if not _is_header(first_row, column_names):
        return cells
    for name in first_row:
        if first_row.count(name) > 1:
            raise InputError(f"{path}:1: column {name!r:.80} occurs twice. Rename one.")
    return cells[1:].set_axis(first_row, axis="columns")


def _read_cells(path: Path) -> pd.DataFrame:
    """Read all lines of a CSV or TSV file. The index has line numbers, and the columns are numbered.

    Raises:
        InputError: the rows differ in the number of fields.
    """
    # Public TSV files use quotation marks as ordinary characters.
    options: Any = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if path.suffix == ".tsv" else {}
    rows: list[list[str]] = []
    line_numbers = []
    with user_files.check_readable(path).open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, **options)
        for row in reader:
            if rows and len(row) != len(rows[0]):
                lengths = f"{len(row)} fields, but the first row has {len(rows[0])}"
                raise InputError(f"{path}:{reader.line_num}: {lengths}. Quote the text (CSV) or remove its tabs (TSV).")
            rows.append(row)
            line_numbers.append(reader.line_num)
    num_columns = len(rows[0]) if rows else 0
    return pd.DataFrame(rows, columns=range(num_columns), index=line_numbers, dtype="string")


def _is_header(first_row: Sequence[str], column_names: Collection[str]) -> bool:
    """Return whether a row contains one of the column names, or all columns of a public set."""
    if not set(column_names).isdisjoint(first_row):
        return True
    return any(set(header.values()) <= set(first_row) for header in HEADERS)

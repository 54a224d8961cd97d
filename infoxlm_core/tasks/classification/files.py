"""Files of labelled text: what a folder's file names say about split and language, and what a header says of columns.

XTREME     train-en.tsv  dev-ar.tsv  test-ar.tsv           no header: text, text_pair, label
XNLI       xnli.dev.tsv  xnli.test.tsv                     language, gold_label, …, sentence1, sentence2, …
XNLI-MT    multinli.train.fr.tsv                           premise, hypo, label
PAWS-X     fr/translated_train.tsv  fr/dev_2k.tsv          id, sentence1, sentence2, label
SIB-200    deu_Latn/train.tsv                              index_id, category, text
"""

import csv
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from infoxlm_core import outside
from infoxlm_core.corpora import tables
from infoxlm_core.errors import InputError, one_line
from infoxlm_core.languages import is_known

logger = logging.getLogger(__name__)
# what files and columns call a split -> what we call it
SPLITS = {"train": "train", "dev": "dev", "valid": "dev", "validation": "dev", "test": "test"}
SUFFIXES = (".csv", ".tsv", ".parquet")
HEADERS: Sequence[Mapping[str, str]] = (  # our column -> theirs
    {"text": "sentence1", "text_pair": "sentence2", "label": "gold_label"},
    {"text": "premise", "text_pair": "hypo", "label": "label"},
    {"text": "premise", "text_pair": "hypothesis", "label": "label"},  # XNLI on the Hub
    {"text": "sentence1", "text_pair": "sentence2", "label": "label"},
    {"text": "text", "label": "category"},
)
_SPLIT = f"(?P<split>{'|'.join(SPLITS)})"
_LANGUAGE = "(?P<language>[a-z]{2,3}(?:[-_][A-Za-z]{2,4})?)"
_WITH_LANGUAGE = re.compile(rf"(?:.*\.)?{_SPLIT}[.-]{_LANGUAGE}")  # train-en, multinli.train.fr
_WITHOUT = re.compile(rf"(?:.*[._-])?{_SPLIT}(?:[._-].*)?")  # xnli.dev, translated_train, dev_2k


class Place(NamedTuple):
    """A file, and what its name says."""

    path: Path
    split: str | None
    language: str | None


def find(path: Path) -> list[Place]:
    """The file itself, or those of a folder in one of the layouts above; InputError if there is none."""
    if not path.exists():
        raise InputError(f"{path}: no such file or folder: give data that are there")
    if path.is_dir():
        # what is hidden is not part of the data: .git, .ipynb_checkpoints, ._train-en.tsv
        inside = [p for p in outside.below(path) if not any(x.startswith(".") for x in p.relative_to(path).parts)]
        places = [_place(p) for p in inside if p.suffix in SUFFIXES and p.is_file()]
        for stranger in [place.path for place in places if not place.split]:
            logger.warning("%s: its name says no split (train, dev, test): left out", stranger)
        if not (places := [place for place in places if place.split]):
            raise InputError(
                f"{path}: no labelled text in this folder: it must look like XTREME (train-en.tsv), XNLI "
                "(xnli.dev.tsv), XNLI-MT (multinli.train.fr.tsv), PAWS-X (fr/translated_train.tsv) or SIB-200 "
                "(deu_Latn/train.tsv)"
            )
        return places
    if path.suffix not in SUFFIXES:
        raise InputError(f"{path}: give labelled text as .csv, .tsv or .parquet, or a folder (data)")
    return [_place(path)]


def _place(path: Path) -> Place:
    if found := _WITH_LANGUAGE.fullmatch(path.stem):
        return Place(path, SPLITS[found["split"]], found["language"])
    found, folder = _WITHOUT.fullmatch(path.stem), re.fullmatch(_LANGUAGE, path.parent.name)
    split = SPLITS[found["split"]] if found else None
    language = folder["language"] if found and folder and is_known(folder["language"]) else None
    return Place(path, split, language)


def read(path: Path, names: Sequence[str]) -> pd.DataFrame:
    """Read a file: strings; the index says the line (of Parquet the row, from 1), columns are named by the header.

    The first row of text is a header if it holds one of `names`, or all columns of a known header; without one columns
    have numbers.

    Raises:
        InputError: it is not readable, or a row has another number of fields than the first.
    """
    try:
        if path.suffix == ".parquet":
            table = _read_parquet(path)
            return table.set_axis(range(1, len(table) + 1))
        return _read_text(path, names)
    except csv.Error as error:
        raise InputError(
            f"{path}: not readable ({one_line(error)}): quote the text, and give one sentence a cell"
        ) from None
    except (ValueError, OSError, pa.ArrowException) as error:
        raise InputError(f"{path}: not readable ({one_line(error)}): save it as UTF-8") from None


def _read_parquet(path: Path) -> pd.DataFrame:
    """Columns of text and numbers; others, which are no labels and no text, are left out."""
    schema = pq.read_schema(outside.look(path))
    if len(set(schema.names)) < len(schema.names):
        raise InputError(f"{path}: two columns have one name: name them apart")
    plain = [field.name for field in schema if not pa.types.is_nested(field.type) and not is_bytes(field.type)]
    return tables.read_frame(path, plain, "save it as UTF-8").astype("string")


def is_bytes(kind: pa.DataType) -> bool:
    """Whether the values of a column are bytes: nobody says in which encoding."""
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind)


def _read_text(path: Path, names: Sequence[str]) -> pd.DataFrame:
    kind: Any = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if path.suffix == ".tsv" else {}  # tabs: no quotes
    rows: list[list[str]] = []
    lines = []
    with outside.look(path).open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, **kind)
        for row in reader:
            if rows and len(row) != len(rows[0]):
                raise InputError(
                    f"{path}:{reader.line_num}: {len(row)} fields, the first row has {len(rows[0])}: quote the text"
                )
            rows.append(row)
            lines.append(reader.line_num)
    first = rows[0] if rows else []
    header = not set(names).isdisjoint(first) or any(set(known.values()) <= set(first) for known in HEADERS)
    if header and (twice := [name for name in first if first.count(name) > 1]):
        raise InputError(f"{path}:1: column {twice[0]!r:.80} stands twice: name the columns apart")
    columns: list[Any] = first if header else list(range(len(first)))
    return pd.DataFrame(rows[header:], columns=columns, index=lines[header:], dtype="string")

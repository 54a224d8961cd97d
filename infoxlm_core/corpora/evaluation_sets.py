"""Test sets whose sentences stay out of training text: every text in a file, whatever its layout is.

    NAME.json      every text of it, paragraphs also sentence by sentence      SQuAD, MLQA, XQuAD, TyDiQA
    NAME.parquet   every cell of a column of text                              XNLI and others on the Hub, a held_out/
    NAME.csv       every cell
    any other      every line, cut at tabs; may be compressed                  Tatoeba, FLORES, XNLI, XTREME, PAWS-X
                   words with tags, a line each, as sentences                  WikiANN, XTREME's panx

Codes and labels among the texts cost a training line that says just that, and nothing else.
"""

import csv
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from infoxlm_core import manifests, outside
from infoxlm_core.corpora import lines, tables
from infoxlm_core.errors import EncodingError, InputError, one_line

DIGITS = 16  # of a SHA-256 by which a file is known
SHORTEST = 20  # characters of a part of a paragraph that is looked for by itself: "Yes." is no sentence of a test
_END = re.compile(r"(?<=[.!?。！？।؟])\s*")
_TAGGED = re.compile(r"(?:[a-z]{2,3}:)?(?P<word>\S+)\t(?:O|[BI]-\S+)")
_REMEDY = "give a test set as JSON, Parquet, CSV or lines of text"


def files(path: Path) -> list[Path]:
    """The file itself, or those below a folder that are not hidden; InputError if there is none."""
    if not path.exists():
        raise InputError(f"{path}: no such file or folder: check preparation.evaluation_sets")
    found = [path] if not path.is_dir() else [one for one in sorted(path.rglob("*")) if not one.is_dir()]
    shown = [one for one in found if one == path or not any(part[0] == "." for part in one.relative_to(path).parts)]
    if not shown:
        raise InputError(f"{path}: an empty folder: check preparation.evaluation_sets")
    return shown


def digest(file: Path) -> str:
    """What a file is known by, wherever it lies and whatever it is called."""
    return manifests.file_sha256(file)[:DIGITS]


def read(file: Path) -> Iterator[str]:
    """Yield every text of a file; InputError if it cannot be read."""
    outside.look(file)
    try:
        match file.suffix:
            case ".json":
                yield from _sentences(outside.read_json(file, Any, _REMEDY))
            case ".parquet":
                kinds = {field.name: field.type for field in pq.read_schema(file)}
                columns = [name for name, kind in kinds.items() if tables.is_text(kind)]
                yield from (cell for row in tables.read_text(file, columns) for cell in row if cell)
            case ".csv":
                with file.open(encoding="utf-8-sig", newline="") as opened:
                    yield from (cell for row in csv.reader(opened) for cell in row)
            case _:
                yield from _cells(file)
    except (csv.Error, UnicodeDecodeError, pa.ArrowException) as error:
        raise InputError(f"{file} cannot be read ({one_line(error)}): {_REMEDY}, in UTF-8") from None


def _cells(file: Path) -> Iterator[str]:
    """What stands between tabs; of words with tags the sentences."""
    words: list[str] = []
    for number, text, reason in lines.read(file):
        if reason == "invalid_utf8":  # then the text says where
            raise EncodingError(f"{text}: not UTF-8 from this byte on: convert the file")
        if reason:
            raise InputError(f"{file}:{number} is {reason.replace('_', ' ')}: {_REMEDY}")
        if tagged := _TAGGED.fullmatch(text):
            words.append(tagged["word"])
            continue
        yield " ".join(words)
        words = []
        yield from text.split("\t")
    yield " ".join(words)


def _sentences(value: Any) -> Iterable[str]:
    """All texts of a JSON value, and the sentences of long ones."""
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            yield value
            parts = _END.split(value)
            yield from (part for part in parts if SHORTEST <= len(part) < len(value))
        elif isinstance(value, dict | list):
            waiting += value.values() if isinstance(value, dict) else value

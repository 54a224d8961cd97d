"""Test sets whose sentences stay out of training text: every text in a file, whatever its layout is.

    NAME.json      every text of it                                            SQuAD, MLQA, XQuAD, TyDiQA
    NAME.jsonl     every text of each line
    NAME.parquet   every text of its columns, of lists and of records, too     XNLI and others on the Hub, a held_out/
    NAME.csv       every cell
    any other      every line, cut at tabs, with and without its markup        Tatoeba, FLORES, XNLI, XTREME, PAWS-X
                   words with tags, a line each, as sentences                  WikiANN, XTREME's panx

Paragraphs are taken sentence by sentence, too; all but Parquet may be compressed. Codes and labels among the texts cost
a training line that says just that, and nothing else.
"""

import codecs
import csv
import io
import re
from collections.abc import Iterator
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
_MARKUP = re.compile(r"<[^<>]*>")
ROWS = 1024  # of a table that are held at a time
_ARCHIVES = (".zip", ".tar", ".tgz", ".7z", ".whl")
_REMEDY = "give a test set as JSON, Parquet, CSV or lines of text"


def files(path: Path) -> list[Path]:
    """The file itself, or those below a folder that are not hidden; InputError if there is none."""
    if not path.exists():
        raise InputError(f"{path}: no such file or folder: check preparation.evaluation_sets")
    found = [path] if not path.is_dir() else [one for one in outside.list_tree(path) if not one.is_dir()]
    shown = [one for one in found if one == path or not any(part[0] == "." for part in one.relative_to(path).parts)]
    if not shown:
        raise InputError(f"{path}: an empty folder: check preparation.evaluation_sets")
    return shown


def digest(file: Path) -> str:
    """What a file is known by, wherever it lies and whatever it is called."""
    return manifests.file_sha256(file)[:DIGITS]


def read(file: Path) -> Iterator[str]:
    """Yield every text of a file, and its sentences; InputError if it cannot be read, or its texts cannot be found."""
    try:
        for text in _texts(outside.check_readable(file)):
            yield text
            parts = _END.split(text)
            yield from (part for part in parts if SHORTEST <= len(part) < len(text))
    except (csv.Error, UnicodeDecodeError, pa.ArrowException) as error:
        raise InputError(f"{file} cannot be read ({one_line(error)}): {_REMEDY}, in UTF-8") from None


def _texts(file: Path) -> Iterator[str]:
    packed = file.suffix in lines.COMPRESSED
    suffix = (file.with_suffix("") if packed else file).suffix.lower()
    if suffix in _ARCHIVES or (packed and suffix == ".parquet"):
        raise InputError(f"{file} is packed, its texts would not be found: unpack it")
    match suffix:
        case ".json":
            with lines.unpack(file) as opened:
                content = opened.read(outside.MAX_JSON + 1)
            if len(content) > outside.MAX_JSON:
                raise InputError(f"{file} has more than {outside.MAX_JSON:,} bytes: give several files")
            yield from _strings(outside.parse_json(content.removeprefix(codecs.BOM_UTF8), Any, file, _REMEDY))
        case ".jsonl" | ".ndjson":
            for number, text in _lines(file):
                yield from _strings(outside.parse_json(text, Any, f"{file}:{number}", _REMEDY) if text.strip() else "")
        case ".parquet":
            with tables.reading(file, _REMEDY):
                yield from _columns(file)
        case ".csv":
            with lines.unpack(file) as opened:
                for row in csv.reader(io.TextIOWrapper(opened, encoding="utf-8-sig", newline="")):
                    yield from row
        case _:
            yield from _cells(file)


def _columns(file: Path) -> Iterator[str]:
    """The texts of a table, wherever they are in it; InputError if no column holds any."""
    kinds = {field.name: field.type for field in pq.read_schema(file)}
    plain = [name for name, kind in kinds.items() if tables.is_text(kind)]
    others = [name for name, kind in kinds.items() if pa.types.is_nested(kind) or pa.types.is_dictionary(kind)]
    if not (plain or others):
        raise InputError(f"{file} has no column of text: give the test set's texts as strings")
    yield from (cell for row in tables.read_text(file, plain) for cell in row if cell)
    if others:
        with pq.ParquetFile(file) as opened:
            for batch in opened.iter_batches(ROWS, columns=others):
                yield from _strings(batch.to_pylist())


def _lines(file: Path) -> Iterator[tuple[int, str]]:
    for number, text, reason in lines.read(file):
        if reason == "invalid_utf8":  # then the text says where
            raise EncodingError(f"{text}: not UTF-8 from this byte on: convert the file")
        if reason:
            raise InputError(f"{file}:{number} is {reason.replace('_', ' ')}: {_REMEDY}")
        yield number, text


def _cells(file: Path) -> Iterator[str]:
    """What stands between tabs; of words with tags the sentences."""
    words: list[str] = []
    for _, text in _lines(file):
        if tagged := _TAGGED.fullmatch(text):
            words.append(tagged["word"])
            continue
        yield " ".join(words)
        words = []
        yield from text.split("\t")
        if "<" in text:
            yield from _MARKUP.sub(" ", text).split("\t")
    yield " ".join(words)


def _strings(value: Any) -> Iterator[str]:
    """All texts of a JSON value."""
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict | list):
            waiting += value.values() if isinstance(value, dict) else value

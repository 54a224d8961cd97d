"""Read all texts of test sets in any file layout, for removing their sentences from the training text.

    NAME.json      every string                                                SQuAD, MLQA, XQuAD, TyDiQA
    NAME.jsonl     every string of each line
    NAME.parquet   every string, also in lists and records                     XNLI and others on the Hub, a held_out/
    NAME.csv       every cell
    other names    every line, split at tabs, with and without markup          Tatoeba, FLORES, XNLI, XTREME, PAWS-X
                   lines of a word and its tag are joined to sentences         WikiANN, XTREME's panx

Paragraphs are also split into sentences. All files except Parquet may be compressed. The strings include codes and
labels, which remove only training lines that contain nothing else.
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

from infoxlm_core import manifests, user_files
from infoxlm_core.corpora import lines, tables
from infoxlm_core.errors import InputError, one_line

DIGITS = 16  # hexadecimal digits of the SHA-256 digest that identifies a file
MIN_SENTENCE_LENGTH = 20  # characters; shorter sentences, such as "Yes.", may occur in any text
_SENTENCE_END = re.compile(r"(?<=[.!?。！？।؟])\s*")
_WORD_AND_TAG = re.compile(r"(?:[a-z]{2,3}:)?(?P<word>\S+)\t(?:O|[BI]-\S+)")
_MARKUP = re.compile(r"<[^<>]*>")
ROWS = 1024  # rows of a table in memory at a time
_ARCHIVES = (".zip", ".tar", ".tgz", ".7z", ".whl")
_REMEDY = "give a test set as JSON, Parquet, CSV or lines of text"


def list_files(path: Path) -> list[Path]:
    """Return all visible files below a directory, or the file itself.

    Raises:
        InputError: no file exists, or a link leads to another directory, whose texts would remain in the training text.
    """
    if not path.exists():
        raise InputError(f"{path}: no such file or directory: check preparation.evaluation_sets")
    if not path.is_dir():
        return [path]
    visible_files = []
    for file in user_files.list_tree(path):
        is_hidden = any(name.startswith(".") for name in file.relative_to(path).parts)
        if is_hidden:
            continue
        if not file.is_dir():
            visible_files.append(file)
        elif file.is_symlink():  # `list_tree` does not follow it, because links may form loops
            raise InputError(
                f"{file} is a link to a directory: list the directory itself in preparation.evaluation_sets"
            )
    if not visible_files:
        raise InputError(f"{path}: empty directory: check preparation.evaluation_sets")
    return visible_files


def digest(file: Path) -> str:
    """Return a short digest that identifies a file by its content."""
    return manifests.file_sha256(file)[:DIGITS]


def read_texts(file: Path) -> Iterator[str]:
    """Yield every text of a file, followed by the text's sentences. Raise InputError if the file cannot be read."""
    try:
        for text in _read_file(user_files.check_readable(file)):
            yield text
            for sentence in _SENTENCE_END.split(text):
                if MIN_SENTENCE_LENGTH <= len(sentence) < len(text):
                    yield sentence
    except (csv.Error, UnicodeDecodeError, pa.ArrowException) as error:
        raise InputError(f"{file} cannot be read ({one_line(error)}): {_REMEDY}, in UTF-8") from None


def _read_file(file: Path) -> Iterator[str]:
    """Yield every text of a file. The suffix determines the format."""
    is_compressed = file.suffix in lines.COMPRESSED
    uncompressed_name = file.with_suffix("") if is_compressed else file
    suffix = uncompressed_name.suffix.lower()
    if suffix in _ARCHIVES or (is_compressed and suffix == ".parquet"):  # Parquet cannot be read as a stream
        raise InputError(f"{file} is packed, and its texts cannot be read: unpack it")
    if suffix == ".json":
        return _find_strings(_parse_json_file(file))
    if suffix in (".jsonl", ".ndjson"):
        return _read_json_lines(file)
    if suffix == ".parquet":
        return _read_columns(file)
    if suffix == ".csv":
        return _read_csv(file)
    return _read_cells(file)


def _parse_json_file(file: Path) -> Any:
    """Parse a JSON file, which may be compressed."""
    with lines.unpack(file) as stream:
        content = stream.read(user_files.MAX_JSON + 1)
    if len(content) > user_files.MAX_JSON:
        raise InputError(f"{file} has more than {user_files.MAX_JSON:,} bytes: give several files")
    return user_files.parse_json(content.removeprefix(codecs.BOM_UTF8), Any, file, _REMEDY)


def _read_json_lines(file: Path) -> Iterator[str]:
    """Yield the strings in the JSON value of each line."""
    for number, line in enumerate(lines.read_valid_texts(file), start=1):
        value = user_files.parse_json(line, Any, f"{file}:{number}", _REMEDY) if line.strip() else ""
        yield from _find_strings(value)


def _read_csv(file: Path) -> Iterator[str]:
    """Yield the cells of a CSV file."""
    with lines.unpack(file) as stream:
        for row in csv.reader(io.TextIOWrapper(stream, encoding="utf-8-sig", newline="")):
            yield from row


def _read_columns(file: Path) -> Iterator[str]:
    """Yield the strings in all columns of a Parquet file. Raise InputError if no column can contain text."""
    with tables.translate_arrow_errors(file, _REMEDY):
        text_columns = []
        nested_columns = []  # lists and records may contain strings
        for field in pq.read_schema(file):
            if tables.is_text(field.type):
                text_columns.append(field.name)
            elif pa.types.is_nested(field.type) or pa.types.is_dictionary(field.type):
                nested_columns.append(field.name)
        if not (text_columns or nested_columns):
            raise InputError(f"{file} has no column of text: give the test set's texts as strings")
        for row in tables.read_text_columns(file, text_columns):
            yield from (cell for cell in row if cell)
        if nested_columns:
            with pq.ParquetFile(file) as table:
                for batch in table.iter_batches(ROWS, columns=nested_columns):
                    yield from _find_strings(batch.to_pylist())


def _read_cells(file: Path) -> Iterator[str]:
    """Yield the tab-separated cells of each line, with and without markup.

    Consecutive lines of a word and its tag, such as `Berlin<tab>B-LOC`, are joined to a sentence.
    """
    words: list[str] = []
    for text in lines.read_valid_texts(file):
        word_and_tag = _WORD_AND_TAG.fullmatch(text)
        if word_and_tag:
            words.append(word_and_tag["word"])
            continue
        yield " ".join(words)
        words = []
        yield from text.split("\t")
        if "<" in text:
            yield from _MARKUP.sub(" ", text).split("\t")
    yield " ".join(words)


def _find_strings(value: Any) -> Iterator[str]:
    """Yield all strings in a JSON value, at any depth."""
    pending = [value]  # recursion could exceed Python's limit
    while pending:
        value = pending.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict | list):
            pending += value.values() if isinstance(value, dict) else value

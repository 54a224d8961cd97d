"""Read the text files and calibration pairs for mining, and write the mined pairs."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO, NamedTuple
from xml.sax.saxutils import escape

import pyarrow as pa
import pyarrow.parquet as pq

from infoxlm_core import languages, manifests
from infoxlm_core.config import CorpusSource
from infoxlm_core.corpora import formats, lines
from infoxlm_core.errors import InputError

LanguagePair = tuple[str, str]
SUFFIXES = (".tsv", ".tmx", ".parquet")  # suffixes of output files
_INVALID_IN_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_TMX_HEADER = """\
<?xml version="1.0" encoding="UTF-8"?>
<tmx version="1.4">
<header creationtool="infoxlm" creationtoolversion="1" segtype="sentence" o-tmf="text" adminlang="en" \
srclang="{source}" datatype="plaintext"/>
<body>
"""


class DistinctLines(NamedTuple):
    """The distinct lines of a file."""

    texts: list[str]
    numbers: list[int]  # line number of each text's first occurrence, counted from 1
    dropped: dict[str, int]  # number of dropped lines by reason: duplicate, empty, invalid_utf8, too_long


class MinedPair(NamedTuple):
    """A line of the first file and its match in the second file."""

    margin: float
    source_line: int  # counted from 1
    target_line: int
    source: str
    target: str


def read_distinct(path: Path) -> DistinctLines:
    """Read the distinct lines of a plain or compressed file. Raise InputError if there are fewer than two."""
    line_number_by_text: dict[str, int] = {}
    dropped: Counter[str] = Counter()
    for line_number, line, problem in lines.read_lines(path):
        text = line.strip()
        if problem:
            dropped[problem] += 1
        elif not text:
            dropped["empty"] += 1
        elif text in line_number_by_text:
            dropped["duplicate"] += 1
        else:
            line_number_by_text[text] = line_number
    if len(line_number_by_text) < 2:
        raise InputError(f"{path} has {len(line_number_by_text)} distinct lines of text. Give one sentence per line.")
    return DistinctLines(list(line_number_by_text), list(line_number_by_text.values()), dict(dropped))


def infer_languages(paths: tuple[Path, Path]) -> LanguagePair:
    """Infer the languages of two files from their names, such as news.en and de.txt.gz.

    Raises:
        InputError: a name does not contain exactly one language, or both names contain the same language.
    """
    codes = []
    for path in paths:
        known_codes = [word for word in path.name.split(".") if languages.is_known(word)]
        if len(known_codes) != 1:
            raise InputError(f"{path}: its name must contain one language: rename it, or give --languages (en,de)")
        codes.append(languages.two_letters(known_codes[0]))
    return check_languages(codes)


def check_languages(codes: Sequence[str]) -> LanguagePair:
    """Return the codes as a pair. Raise InputError unless the codes are two different languages."""
    if len(codes) != 2 or not all(languages.is_known(code) for code in codes) or codes[0] == codes[1]:
        raise InputError(f"languages {', '.join(codes)}: give two different ones, such as --languages en,de")
    return codes[0], codes[1]


def check_output(path: Path) -> None:
    """Raise InputError if the path's suffix is not an output format, or its directory does not exist."""
    if path.suffix not in SUFFIXES:
        raise InputError(f"{path}: {path.suffix!r} is not an output format: use {', '.join(SUFFIXES)}")
    if not path.parent.is_dir():
        raise InputError(f"{path}: no such directory {path.parent}: create it, or give another path")


def read_pairs(path: Path, codes: LanguagePair) -> list[tuple[str, str]]:
    """Read a file's distinct translation pairs. A .tsv file has the pairs in its first two columns.

    Args:
        path: the file, whose suffix determines the format.
        codes: languages of the first and second sentence of each pair.

    Raises:
        InputError: the file is missing or damaged, or its suffix is unknown.
    """
    pair_format = formats.infer_format(path)
    if pair_format == "gettext":
        raise InputError(
            f"{path}: message catalogs are not supported for pairs: give a file such as memory.tmx or pairs.tsv"
        )
    corpus = CorpusSource.parse({"name": "pairs", "format": pair_format, "path": str(path), "languages": codes})
    first_language = codes[0]
    pairs: dict[tuple[str, str], None] = {}  # used as an ordered set
    for row in formats.read_pairs(corpus, codes, first_language, [path]):
        source, target = row.texts
        pairs[source.strip(), target.strip()] = None
    return list(pairs)


def write_pairs(path: Path, codes: LanguagePair, pairs: Iterable[MinedPair]) -> None:
    """Write mined pairs in the format of the file's suffix.

    A .tsv file has columns for the margin, line numbers and texts, and no header. A .tmx file has a translation unit
    for each pair, with the margin as a property. A .parquet file names its text columns by language.
    """
    with manifests.open_atomically(path) as file:
        if path.suffix == ".tsv":
            _write_tsv(file, pairs)
        elif path.suffix == ".tmx":
            _write_tmx(file, codes, pairs)
        else:
            _write_parquet(file, codes, pairs)


def _write_tsv(file: IO[bytes], pairs: Iterable[MinedPair]) -> None:
    """Write a line per pair. Spaces replace the tabs in texts."""
    for pair in pairs:
        source = pair.source.replace("\t", " ")
        target = pair.target.replace("\t", " ")
        file.write(f"{pair.margin:.5f}\t{pair.source_line}\t{pair.target_line}\t{source}\t{target}\n".encode())


def _write_tmx(file: IO[bytes], codes: LanguagePair, pairs: Iterable[MinedPair]) -> None:
    """Write a translation unit per pair. Spaces replace characters that XML does not allow."""
    file.write(_TMX_HEADER.format(source=codes[0]).encode())
    for pair in pairs:
        file.write(f'<tu><prop type="x-margin">{pair.margin:.5f}</prop>'.encode())
        for code, text in zip(codes, (pair.source, pair.target), strict=True):
            segment = escape(_INVALID_IN_XML.sub(" ", text))
            file.write(f'<tuv xml:lang="{code}"><seg>{segment}</seg></tuv>'.encode())
        file.write(b"</tu>\n")
    file.write(b"</body>\n</tmx>\n")


def _write_parquet(file: IO[bytes], codes: LanguagePair, pairs: Iterable[MinedPair]) -> None:
    """Write a row per pair. The columns are the fields of `MinedPair`, named by language."""
    source, target = codes
    types = [pa.float32(), pa.int64(), pa.int64(), pa.string(), pa.string()]
    names = ["margin", f"{source}_line", f"{target}_line", source, target]
    rows = [dict(zip(names, pair, strict=True)) for pair in pairs]
    schema = pa.schema(list(zip(names, types, strict=True)))
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), file, compression="zstd")

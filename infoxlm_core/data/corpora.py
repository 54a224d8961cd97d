"""Read a corpus as rows: every line, message or translation unit of a file is one row, kept or dropped for a reason.

Formats differ, rows do not: one language is a monolingual line, two are a translation pair that begins with the pivot.
One line of a file `x.tsv` walks through like this:

    b"Hello\\tHallo\\r\\n"  ->  Row(("en", "de"), ("Hello", "Hallo"), "x.tsv", 1)
"""

import io
import lzma
import re
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from gettext import c2py
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import IO, NamedTuple
from xml.etree.ElementTree import Element, ParseError

import numpy as np
import polib
import pyarrow as pa
import pyarrow.parquet as pq
from defusedxml import DefusedXmlException
from defusedxml.ElementTree import iterparse

from infoxlm_core.config import CorpusSource
from infoxlm_core.errors import CorpusTooSmall, InputError, ParallelMismatch

MAX_LINE = 1 << 20  # bytes; longer lines are skipped without holding them in memory
MAX_RATIO = 100  # of unpacked to packed size, above which a file is a bomb
MAX_CATALOG = 64 << 20  # bytes
WINDOW = 1000  # pairs
MIN_CORRELATION = 0.4
NEVER = 9  # rank of a locale that is not read
IDENTIFIER = re.compile(r"[\w.:-]*_[\w.:-]*")  # label_foo: a key, no English text

Members = dict[str, Callable[[], bytes]]  # the files of a folder or archive: name and reader


class Row(NamedTuple):
    """One line (one language) or one pair (the pivot's first), and where it stands (gettext: the n-th message)."""

    languages: tuple[str, ...]
    texts: tuple[str, ...]
    file: str
    line: int
    dropped: str | None = None
    """Why the row cannot be used at all; its texts then mean nothing, but for `invalid_utf8`: file:line:byte."""


def read(source: CorpusSource, languages: Sequence[str], pivot: str, paths: Sequence[Path]) -> Iterator[Row]:
    """Yield the rows of one corpus, in the order of its files.

    Args:
        source: the corpus, as configured.
        languages: languages of the run; others are passed over.
        pivot: the language that every pair contains.
        paths: the local files of `source`, one for each of its paths.

    Raises:
        InputError: a file is missing, damaged or not of its format.
        CorpusTooSmall: a file is empty.
        ParallelMismatch: the sides of parallel text differ in number of lines, or do not belong together.
    """
    for path in paths:
        if source.format != "gettext" and not path.is_file():
            raise InputError(f"{path}: no such file (corpus {source.name}): check its path")
        if path.is_file() and not path.stat().st_size:
            raise CorpusTooSmall(f"{path} (corpus {source.name}) is empty: have=0 need=1 bytes")
    wanted = [language for language in (source.languages or languages) if language in {*languages, pivot}]
    if unknown := set(source.languages) - set(wanted):
        raise InputError(f"corpus {source.name}: {', '.join(sorted(unknown))} is not among the run's languages")
    if len(source.languages) > 1 and pivot not in wanted:
        raise InputError(f"corpus {source.name}: no side of its pairs is the pivot {pivot}: name it in languages")
    match source.format:
        case "text":
            return (Row((wanted[0],), (text,), paths[0].name, n, why) for n, text, why in _lines(paths[0]))
        case "tsv":
            return _read_tsv(source, pivot, paths[0])
        case "moses":
            return _read_moses(source.languages, pivot, paths)
        case "tmx":
            return _read_tmx(wanted, pivot, paths[0])
        case "parquet":
            return _read_parquet(wanted, pivot, paths[0])
        case "gettext":
            return _read_gettext(wanted, pivot, paths[0])


# ---------------------------------------------------------------- bytes and lines


class _Unpacked(io.RawIOBase):
    """Bytes of a file that may be compressed; refuses damaged files and bombs."""

    def __init__(self, path: Path):
        self.path, self.size, self.count = path, path.stat().st_size, 0
        self.stream = lzma.open(path) if path.suffix == ".xz" else pa.input_stream(str(path))  # noqa: SIM115

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        try:
            chunk = self.stream.read(len(buffer))
        except (OSError, EOFError, lzma.LZMAError) as error:
            raise InputError(f"{self.path} is damaged ({error}): fetch it again") from None
        buffer[: len(chunk)] = chunk
        self.count += len(chunk)
        if self.count > MAX_RATIO * self.size + MAX_LINE:
            raise InputError(f"{self.path}: DecompressionLimit: unpacks to over {MAX_RATIO} times its size: refused")
        return len(chunk)


def _unpack(path: Path) -> IO[bytes]:
    try:
        return io.BufferedReader(_Unpacked(path), MAX_LINE)
    except OSError as error:
        raise InputError(f"{path} cannot be opened ({error}): check it") from None


def _lines(path: Path) -> Iterator[tuple[int, str, str | None]]:
    """Yield (number from 1, text, reason to drop). Only \\n ends a line, so that numbers agree with `wc -l`."""
    with _unpack(path) as file:
        number = 0
        while line := file.readline(MAX_LINE):
            number += 1
            if len(line) == MAX_LINE and line[-1:] != b"\n":
                while (rest := file.readline(MAX_LINE)) and rest[-1:] != b"\n":
                    pass
                yield number, "", "too_long"
                continue
            line = line.removesuffix(b"\n").removesuffix(b"\r")
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            try:
                yield number, line.decode(), None
            except UnicodeDecodeError as error:
                yield number, f"{path}:{number}:{error.start + 1}", "invalid_utf8"


# ---------------------------------------------------------------- parallel lines


def _read_tsv(source: CorpusSource, pivot: str, path: Path) -> Iterator[Row]:
    """Columns are divided by tabs and nothing else: quotation marks are text."""
    columns = source.columns or range(len(source.languages))
    order = sorted(zip(source.languages, columns, strict=True), key=lambda item: item[0] != pivot)
    languages = tuple(language for language, _ in order)

    def rows() -> Iterator[Row]:
        for number, text, reason in _lines(path):
            cells = text.split("\t")
            if reason is None and max(columns) >= len(cells):
                reason = "missing_column"
            texts = (text,) if reason else tuple(cells[column] for _, column in order)
            yield Row(languages, texts, path.name, number, reason)

    return _check_alignment(rows(), path.name) if len(languages) == 2 else rows()


def _read_moses(languages: Sequence[str], pivot: str, paths: Sequence[Path]) -> Iterator[Row]:
    if paths[0].samefile(paths[1]):
        raise InputError(f"{paths[0]} is given as both sides of parallel text: give one file for each language")
    sides = sorted(zip(languages, paths, strict=True), key=lambda side: side[0] != pivot)
    names = tuple(language for language, _ in sides)
    file = " ".join(path.name for _, path in sides)
    counts = [sum(1 for _ in _lines(path)) for _, path in sides]
    if counts[0] != counts[1]:
        found = " ".join(f"{name}={count}" for name, count in zip(names, counts, strict=True))
        raise ParallelMismatch(f"{file}: different numbers of lines, {found}: align the files again")

    def rows() -> Iterator[Row]:
        for (number, source, why), (_, target, why_too) in zip(*(_lines(path) for _, path in sides), strict=True):
            texts = (source, target) if why or not why_too else (target, source)  # the damaged one tells where
            yield Row(names, texts, file, number, why or why_too)

    return _check_alignment(rows(), file)


def _check_alignment(rows: Iterable[Row], file: str) -> Iterator[Row]:
    """Pass rows on; raise ParallelMismatch where the lengths of the two sides have nothing to do with each other.

    A shift by one line leaves every length ratio plausible, but the correlation over a window falls to about 0.
    """
    lengths: list[tuple[int, int]] = []
    for row in rows:
        yield row
        if row.dropped is None and all(row.texts):
            lengths.append((len(row.texts[0].encode()), len(row.texts[1].encode())))
        if len(lengths) == 2 * WINDOW:
            _check_window(lengths[:WINDOW], row.line - WINDOW, file)
            del lengths[:WINDOW]
    if len(lengths) >= WINDOW // 2:  # fewer say little
        for start in range(0, len(lengths), WINDOW):  # the last window reaches back, so that it is a full one
            last = max(0, min(start, len(lengths) - WINDOW))
            _check_window(lengths[last : last + WINDOW], row.line - len(lengths) + last + WINDOW, file)


def _check_window(lengths: list[tuple[int, int]], line: int, file: str) -> None:
    sides = np.log(np.array(lengths, dtype=float)).T
    if sides.std(axis=1).min() < 0.25:  # lines of nearly equal length say nothing
        return
    correlation = np.corrcoef(sides)[0, 1]
    if correlation < MIN_CORRELATION:
        raise ParallelMismatch(
            f"{file}: the sides do not belong together in the {len(lengths)} pairs up to about line {line}: "
            f"correlation of lengths {correlation:.2f}, need {MIN_CORRELATION}: align the files again"
        )


# ---------------------------------------------------------------- TMX and Parquet


def _read_tmx(languages: Sequence[str], pivot: str, path: Path) -> Iterator[Row]:
    number, parents = 0, []
    try:
        with _unpack(path) as file:
            for event, element in iterparse(file, events=("start", "end")):
                if event == "start":
                    parents.append(element)
                    continue
                parents.pop()
                if element.tag != "tu":
                    continue
                number += 1
                texts: dict[str, str] = {}
                for variant in element.iter("tuv"):
                    name = variant.get("{http://www.w3.org/XML/1998/namespace}lang") or variant.get("lang") or ""
                    texts.setdefault(re.split("[-_]", name.lower())[0], _segment(variant.find("seg")))
                found = [language for language in languages if language != pivot and language in texts]
                if pivot not in texts or not found:
                    yield Row((pivot, "und"), ("", ""), path.name, number, "missing_side")
                else:
                    for language in found:
                        yield Row((pivot, language), (texts[pivot], texts[language]), path.name, number)
                parents[-1].clear()  # or memory grows with the file
    except (ParseError, DefusedXmlException) as error:
        raise InputError(f"{path}: no valid TMX after unit {number} ({error}): export it again") from None


def _segment(segment: Element | None) -> str:
    """Text of a segment without the native codes of the program that it comes from (<ph>, <bpt>, ...)."""
    if segment is None:
        return ""
    parts = [segment.text or ""]
    for child in segment:
        parts += [_segment(child) if child.tag in ("hi", "sub") else "", child.tail or ""]
    return "".join(parts)


def _read_parquet(languages: Sequence[str], pivot: str, path: Path) -> Iterator[Row]:
    try:
        file = pq.ParquetFile(path)
        found = [language for language in languages if language in file.schema_arrow.names]
        if not found:
            raise InputError(f"{path} has no column for {', '.join(languages)}: name its columns by language")
        others = [language for language in found if language != pivot]
        groups = [(pivot, other) for other in others] if pivot in found and others else [(name,) for name in found]
        number = 0
        for batch in file.iter_batches(columns=found):
            for values in batch.to_pylist():
                number += 1
                for group in groups:
                    yield Row(group, tuple(str(values[name] or "") for name in group), path.name, number)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is no readable Parquet file ({error}): write it again") from None


# ---------------------------------------------------------------- gettext


def _read_gettext(languages: Sequence[str], pivot: str, path: Path) -> Iterator[Row]:
    members = _catalogs(path)
    domains: dict[tuple[str, str], dict[str, dict[str, str]]] = defaultdict(lambda: defaultdict(dict))
    for name in sorted(members):  # .po after .mo, which it replaces: it also tells fuzzy messages and default texts
        *root, locale, _, file = PurePosixPath(name).parts
        language = re.split("[-_.@]", locale.lower())[0]
        if language in {*languages, pivot} and _rank(locale, language) < NEVER:
            domains["/".join(root), file[:-3]][language][locale] = name
    for key in sorted(domains):
        own, rank, _ = _choose(domains[key].get(pivot, {}), pivot, members)
        english = {(e.msgctxt, e.msgid): e.msgstr for e in own if _problem(e) is None} if rank <= 1 else {}
        for language in languages:
            if language == pivot:
                continue
            entries, _, name = _choose(domains[key].get(language, {}), language, members)
            for number, entry in enumerate(entries, start=1):
                source = _default(entry.comment) or english.get((entry.msgctxt, entry.msgid)) or entry.msgid
                reason = _problem(entry)
                if reason is None and source == entry.msgid and IDENTIFIER.fullmatch(source):
                    reason = "no_source_text"
                yield Row((pivot, language), (source, entry.msgstr), name, number, reason)


def _choose(variants: dict[str, str], language: str, members: Members) -> tuple[list[polib.POEntry], int, str]:
    """Messages, rank and name of the one locale that is read of a language; of equal ones that with most messages."""
    best = min((_rank(locale, language) for locale in variants), default=NEVER)
    found = [(_entries(variants[name], members), variants[name]) for name in variants if _rank(name, language) == best]
    if not found:
        return [], best, ""
    entries, name = max(found, key=lambda item: sum(_problem(entry) is None for entry in item[0]))
    return entries, best, name


def _catalogs(path: Path) -> Members:
    """Name and reader of every catalog `…/<locale>/LC_MESSAGES/<domain>.po` in a folder, wheel or zip."""
    if path.is_dir():
        files = chain(path.rglob("LC_MESSAGES/*.po"), path.rglob("LC_MESSAGES/*.mo"))
        found: Members = {str(p.relative_to(path)): p.read_bytes for p in sorted(files)}
    else:
        try:
            archive = zipfile.ZipFile(path)
        except (zipfile.BadZipFile, OSError) as error:
            raise InputError(f"{path} is no folder, wheel or zip of gettext catalogs ({error})") from None
        infos = [info for info in archive.infolist() if re.search(r"[^/]/LC_MESSAGES/[^/]+\.[mp]o$", info.filename)]
        for info in infos:
            if info.file_size > min(MAX_CATALOG, MAX_RATIO * info.compress_size + MAX_LINE):
                raise InputError(f"{path}: DecompressionLimit: {info.filename} has {info.file_size} bytes: refused")
        found = {info.filename: partial(archive.read, info) for info in infos}
    if not found:
        raise InputError(f"{path} holds no catalog <locale>/LC_MESSAGES/<domain>.po or .mo")
    return found


def _rank(locale: str, language: str) -> int:
    """Order among the locales of one language, down to NEVER. `zh` means simplified characters."""
    variant = re.sub(r"^[a-z]+[-_.@]?", "", locale.lower())
    if language == "zh":
        return {"hans": 0, "cn": 0, "": 1}.get(variant, NEVER)
    return {"": 0, language: 1, "us": 1}.get(variant, 2)  # de, then de_DE, en_US, then de_Formal, de_AT …


def _entries(name: str, members: Members) -> list[polib.POEntry]:
    """Messages of one catalog; of plural forms, `msgstr` becomes the one for n = 1, which goes with the message id."""
    try:
        content = members[name]()
        if name.endswith(".mo"):
            catalog = polib.mofile(content)
        else:
            catalog = polib.pofile(content.decode(polib.detect_encoding(content, binary_mode=True)))
        rule = re.search(r"plural\s*=([^;]+)", catalog.metadata.get("Plural-Forms", ""))
        singular = c2py(rule[1].strip())(1) if rule else 0
    except Exception as error:  # polib raises whatever its parser trips over
        raise InputError(f"{name} is no readable gettext catalog ({error}): check it with msgfmt -c") from None
    for entry in catalog:
        if entry.msgid_plural:
            entry.msgstr = entry.msgstr_plural.get(singular, "")
    return list(catalog)


def _problem(entry: polib.POEntry) -> str | None:
    if entry.obsolete or "fuzzy" in (entry.flags or ()):
        return "obsolete" if entry.obsolete else "fuzzy"
    return None if entry.msgstr else "empty"


def _default(comment: str | None) -> str:
    """English text that stands in the comment of a message with a symbolic id: `Default: "…"`, over several lines."""
    if not comment or not comment.startswith('Default: "'):
        return ""
    lines = [line.strip() for line in comment.removeprefix("Default:").splitlines()]
    return "".join(line[1:-1] for line in lines if len(line) > 2 and line[0] == line[-1] == '"').replace('\\"', '"')

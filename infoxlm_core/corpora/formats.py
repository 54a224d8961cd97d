"""Read a corpus as rows: every line, message or translation unit of a file is one row, kept or dropped for a reason.

Formats differ, rows do not: one language is a monolingual line, two are a translation pair that begins with the pivot.
One line of a file `x.tsv` walks through like this:

    b"Hello\\tHallo\\r\\n"  ->  Row(("en", "de"), ("Hello", "Hallo"), "x.tsv", 1)
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from xml.etree.ElementTree import Element, ParseError

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from defusedxml import DefusedXmlException
from defusedxml.ElementTree import iterparse

from infoxlm_core import outside
from infoxlm_core.config import CorpusSource
from infoxlm_core.corpora import catalogs, lines, tables
from infoxlm_core.corpora.lines import Row
from infoxlm_core.errors import CorpusTooSmall, InputError, ParallelMismatch, one_line

Lengths = tuple[int, int, int]  # line, bytes of its two sides
WINDOW = 1000  # pairs
MIN_CORRELATION = 0.4
FEWEST = 50  # pairs that tell anything
UNRELATED = 0.15  # correlation of so few pairs, below which they are no translations
MAX_SHIFT = 3  # lines
SHIFTED = 0.15  # by which a correlation with lines further down or up is higher than by chance
MAX_DEPTH = 100  # of elements in a TMX segment


def read(source: CorpusSource, languages: Sequence[str], pivot: str, paths: Sequence[Path]) -> Iterator[Row]:
    """Yield the rows of one corpus, in the order of its files; languages that are not of the run are passed over.

    `paths` are the local files of `source`, one for each of its paths.

    Raises:
        InputError: a file is missing, damaged or not of its format.
        CorpusTooSmall: a file is empty.
        ParallelMismatch: the sides of parallel text differ in number of lines, or do not belong together.
    """
    wanted = _check(source, languages, pivot, paths)
    match source.format:
        case "text":
            return (Row((wanted[0],), (text,), paths[0].name, n, why) for n, text, why in lines.read(paths[0]))
        case "tsv":
            return _read_tsv(source, pivot, paths[0])
        case "moses":
            return _read_moses(source.languages, pivot, paths)
        case "tmx":
            return _read_tmx(wanted, pivot, paths[0])
        case "parquet":
            return _read_parquet(wanted, pivot, paths[0])
        case "gettext":
            return catalogs.read(wanted, pivot, paths[0])


def _check(source: CorpusSource, languages: Sequence[str], pivot: str, paths: Sequence[Path]) -> list[str]:
    """Refuse a corpus that cannot be read; return the languages that are read from it."""
    for path in paths:
        if source.format != "gettext" and not path.is_file():
            found = "is no file" if path.exists() else "no such file"
            raise InputError(f"{path}: {found} (corpus {source.name}): check its path")
        if path.is_file() and not path.stat().st_size:
            raise CorpusTooSmall(f"{path} (corpus {source.name}) is empty: have=0 need=1 bytes")
    wanted = [language for language in (source.languages or languages) if language in {*languages, pivot}]
    if unknown := set(source.languages) - set(wanted):
        raise InputError(f"corpus {source.name}: {', '.join(sorted(unknown))} is not among the run's languages")
    if len(source.languages) > 1 and pivot not in wanted:
        raise InputError(f"corpus {source.name}: no side of its pairs is the pivot {pivot}: name it in languages")
    return wanted


# ---------------------------------------------------------------- parallel lines


def _read_tsv(source: CorpusSource, pivot: str, path: Path) -> Iterator[Row]:
    """Columns are divided by tabs and nothing else: quotation marks are text."""
    columns = source.columns or range(len(source.languages))
    order = sorted(zip(source.languages, columns, strict=True), key=lambda item: item[0] != pivot)
    languages = tuple(language for language, _ in order)

    def rows() -> Iterator[Row]:
        for number, text, reason in lines.read(path):
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
    counts = [sum(1 for _ in lines.read(path)) for _, path in sides]
    if counts[0] != counts[1]:
        found = " ".join(f"{name}={count}" for name, count in zip(names, counts, strict=True))
        raise ParallelMismatch(f"{file}: different numbers of lines, {found}: align the files again")

    def rows() -> Iterator[Row]:
        for (number, source, why), (_, target, why_too) in zip(*(lines.read(path) for _, path in sides), strict=True):
            texts = (source, target) if why or not why_too else (target, source)  # the damaged one tells where
            yield Row(names, texts, file, number, why or why_too)

    return _check_alignment(rows(), file)


def _check_alignment(rows: Iterable[Row], file: str) -> Iterator[Row]:
    """Pass rows on; raise ParallelMismatch where the lengths of the two sides have nothing to do with each other.

    A shift by one line leaves every length ratio plausible, but the correlation over a window falls to about 0, or to
    that of neighbours, and with the lines that belong together it is higher. A long window tells sides that hardly
    belong together, a short one a block of the file that does not.
    """
    pairs: list[Lengths] = []
    short = WINDOW // 10  # of a small file, of which every pair counts
    for row in rows:
        yield row
        if row.dropped is None and all(row.texts):
            pairs.append((row.line, len(row.texts[0].encode()), len(row.texts[1].encode())))
        if len(pairs) == 2 * WINDOW:
            short = WINDOW // 5
            _check_window(pairs[:WINDOW], MIN_CORRELATION, file)
            _check_blocks(pairs[: WINDOW + short], short, file)
            del pairs[:WINDOW]
    if len(pairs) >= WINDOW // 2:  # fewer say little of a correlation that is low
        for start in range(0, len(pairs), WINDOW):  # the last window reaches back, so that it is a full one
            last = max(0, min(start, len(pairs) - WINDOW))
            _check_window(pairs[last : last + WINDOW], MIN_CORRELATION, file)
    _check_blocks(pairs, WINDOW // 5 if len(pairs) >= WINDOW else short, file)


def _check_blocks(pairs: list[Lengths], size: int, file: str) -> None:
    """Look at short windows that overlap by half, the last one a full one."""
    last = max(0, len(pairs) - size)
    for start in [*range(0, last, size // 2), last]:
        block = pairs[start : start + size]
        if len(block) >= FEWEST:
            _check_window(block, UNRELATED, file)
            _check_shift(block, file)


def _check_window(pairs: list[Lengths], least: float, file: str) -> None:
    correlation = _correlate(*_logarithms(pairs))
    if correlation is not None and correlation < least:
        raise ParallelMismatch(
            f"{file}: the sides do not belong together in the {len(pairs)} pairs from line {pairs[0][0]} to "
            f"{pairs[-1][0]}: correlation of lengths {correlation:.2f}, need {least}: align the files again"
        )


def _check_shift(pairs: list[Lengths], file: str) -> None:
    """Refuse pairs whose sides agree better with those of a line that stands some lines further down or up."""
    source, target = _logarithms(pairs)
    source, end = source[MAX_SHIFT:-MAX_SHIFT], len(target) - MAX_SHIFT
    found = {n: _correlate(source, target[MAX_SHIFT + n : end + n]) for n in range(-MAX_SHIFT, MAX_SHIFT + 1)}
    known = {shift: value for shift, value in found.items() if value is not None}
    best = max(known, key=lambda shift: known[shift], default=0)
    if 0 in known and known[best] > known[0] + SHIFTED:
        raise ParallelMismatch(
            f"{file}: the sides do not belong together from line {pairs[0][0]} to {pairs[-1][0]}: correlation of "
            f"lengths {known[0]:.2f}, and {known[best]:.2f} with lines that stand {abs(best)} "
            f"{'further down' if best > 0 else 'further up'}: align the files again"
        )


def _logarithms(pairs: list[Lengths]) -> np.ndarray:
    """(2, N) of lengths."""
    return np.log(np.array(pairs, dtype=float)[:, 1:].T)


def _correlate(source: np.ndarray, target: np.ndarray) -> float | None:
    """Correlation of (N,) and (N,); None of lines of nearly equal length, which says nothing."""
    deviations = source.std(), target.std()
    if min(deviations) < 0.25:
        return None
    product = ((source - source.mean()) * (target - target.mean())).mean()
    return float(product / (deviations[0] * deviations[1]))


# ---------------------------------------------------------------- TMX and Parquet


def _read_tmx(languages: Sequence[str], pivot: str, path: Path) -> Iterator[Row]:
    number, parents = 0, []
    try:
        with lines.unpack(path) as file:
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
    except (ParseError, DefusedXmlException, LookupError, ValueError) as error:  # the last two: encoding, nesting
        raise InputError(f"{path}: no valid TMX after unit {number} ({error}): export it again") from None


def _segment(segment: Element | None, depth: int = 0) -> str:
    """Text of a segment without the native codes of the program that it comes from (<ph>, <bpt>, ...)."""
    if segment is None:
        return ""
    if depth > MAX_DEPTH:
        raise ValueError(f"a segment is nested {depth} deep")
    parts = [segment.text or ""]
    for child in segment:
        parts += [_segment(child, depth + 1) if child.tag in ("hi", "sub") else "", child.tail or ""]
    return "".join(parts)


def _read_parquet(languages: Sequence[str], pivot: str, path: Path) -> Iterator[Row]:
    try:
        found = [language for language in languages if language in pq.read_schema(outside.check_readable(path)).names]
        if not found:
            raise InputError(f"{path} has no column for {', '.join(languages)}: name its columns by language")
        others = [language for language in found if language != pivot]
        groups = [(pivot, other) for other in others] if pivot in found and others else [(name,) for name in found]
        for number, cells in enumerate(tables.read_text(path, found), start=1):
            values = dict(zip(found, cells, strict=True))
            for group in groups:
                yield Row(group, tuple(values[name] or "" for name in group), path.name, number)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is no readable Parquet file ({one_line(error)}): write it again") from None

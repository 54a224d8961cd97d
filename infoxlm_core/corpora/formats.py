"""Read corpora in all formats: every line, message or translation unit of a file becomes a row.

A row with one language is a monolingual line. A row with two languages is a translation pair whose first side is the
pivot's. Some rows have a reason to drop them. A line of a file `x.tsv` becomes:

    b"Hello\\tHallo\\r\\n"  ->  Row(("en", "de"), ("Hello", "Hallo"), "x.tsv", 1)
"""

import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet as pq

from infoxlm_core import user_files
from infoxlm_core.config import CorpusSource
from infoxlm_core.corpora import catalogs, lines, tables, translation_units
from infoxlm_core.corpora.lines import AnyPath, Line, Row
from infoxlm_core.errors import CorpusTooSmall, InputError, ParallelMismatch

WINDOW = 1000  # pairs of a long window
BLOCK = WINDOW // 5  # pairs of a short window
SMALL_BLOCK = WINDOW // 10  # pairs of a short window in a file with fewer than `WINDOW` pairs
MIN_CORRELATION = 0.4  # smallest correlation of the lengths in a long window
MIN_BLOCK = 50  # smallest number of pairs of the last short window; correlations of fewer pairs are not significant
MIN_BLOCK_CORRELATION = 0.15  # smallest correlation of the lengths in a short window
MAX_SHIFT = 3  # lines
MIN_SHIFT_GAIN = 0.15  # lines count as shifted if a shift increases the correlation by more
MIN_DEVIATION = 0.25  # smallest standard deviation of log lengths for a significant correlation


FORMATS_OF_TRANSLATIONS = {
    ".tmx": "tmx",
    ".xlf": "xliff",
    ".xliff": "xliff",
    ".tsv": "tsv",
    ".jsonl": "jsonl",
    ".parquet": "parquet",
    ".whl": "gettext",
    ".zip": "gettext",
}
"""Mapping from the suffix of a translation file to its format."""


class LocalCorpus(NamedTuple):
    """A corpus on this machine."""

    source: CorpusSource
    languages: list[str]  # languages to read
    pivot: str  # language that is a side of every pair
    paths: Sequence[Path]  # local copies of `source.paths`


class PairLengths(NamedTuple):
    """Lengths of the two sides of a translation pair, and its position."""

    file: str
    line: int
    source_bytes: int
    target_bytes: int


def infer_format(path: Path) -> str:
    """Infer the format of a translation file from its suffix. A directory counts as gettext catalogs.

    Raises:
        InputError: the suffix is not one of `FORMATS_OF_TRANSLATIONS`.
    """
    if path.is_dir():
        return "gettext"
    suffixes = [suffix for suffix in path.suffixes if suffix not in lines.COMPRESSED]
    suffix = suffixes[-1].lower() if suffixes else ""
    if suffix not in FORMATS_OF_TRANSLATIONS:
        raise InputError(
            f"{path}: the format of its translations is unknown: "
            f"give a {', '.join(FORMATS_OF_TRANSLATIONS)} file, or a directory of gettext catalogs"
        )
    return FORMATS_OF_TRANSLATIONS[suffix]


def read_pairs(source: CorpusSource, languages: Sequence[str], pivot: str, paths: Sequence[Path]) -> Iterator[Row]:
    """Yield the translation pairs of a corpus that have text on both sides. Arguments: see `read_rows`."""
    for row in read_rows(source, languages, pivot, paths):
        if row.dropped is None and len(row.texts) == 2 and all(text.strip() for text in row.texts):
            yield row


def read_rows(source: CorpusSource, languages: Sequence[str], pivot: str, paths: Sequence[Path]) -> Iterator[Row]:
    """Return the rows of a corpus in the order of its files.

    Args:
        source: config of the corpus.
        languages: languages of the run. Text in other languages is skipped.
        pivot: language that is a side of every pair.
        paths: local copies of `source.paths`.

    Raises:
        InputError: a file is missing, damaged or in a different format.
        CorpusTooSmall: a file is empty.
        ParallelMismatch: the sides of parallel text have different numbers of lines, or are not translations.
    """
    _check_files(source, paths)
    corpus = LocalCorpus(source, _select_languages(source, languages, pivot), pivot, paths)
    if source.text_field:
        return _read_documents(corpus)
    rows = READERS[source.format](corpus)
    # Moses text, and often TSV, is made from two files. A line that one of them lacks shifts all following pairs.
    if source.format in ("tsv", "moses") and len(source.languages) == 2:
        return _check_alignment(rows)
    return rows


def _check_files(source: CorpusSource, paths: Sequence[Path]) -> None:
    """Raise InputError if a path does not lead to a file, and CorpusTooSmall if the file is empty."""
    for path in paths:
        if source.format != "gettext" and not path.is_file():
            problem = "not a file" if path.exists() else "no such file"
            raise InputError(f"{path}: {problem} (corpus {source.name}): check its path")
        if path.is_file() and not path.stat().st_size:
            raise CorpusTooSmall(f"{path} (corpus {source.name}) is empty: replace it")


def _select_languages(source: CorpusSource, languages: Sequence[str], pivot: str) -> list[str]:
    """Return the languages to read from a corpus. By default, these are the run's languages.

    Raises:
        InputError: the corpus has a language outside the run, or its pairs lack the pivot.
    """
    if not source.languages:
        return list(languages)
    unknown = set(source.languages) - {*languages, pivot}
    if unknown:
        raise InputError(f"corpus {source.name}: {', '.join(sorted(unknown))} is not among the run's languages")
    if len(source.languages) > 1 and pivot not in source.languages:
        raise InputError(f"corpus {source.name}: no side of its pairs is the pivot {pivot}: name it in languages")
    return list(source.languages)


def _read_text(corpus: LocalCorpus) -> Iterator[Row]:
    """Yield the lines of a text file. If documents are compared, each row has its document's first line number."""
    (path,) = corpus.paths
    first_line = 1  # first line of the document
    for line in lines.read_lines(path):
        row_line = first_line if corpus.source.compares_documents else line.number
        yield Row((corpus.languages[0],), (line.text,), path.name, row_line, line.dropped)
        if line.dropped is None and not line.text.strip():  # an empty line ends a document
            first_line = line.number + 1


def _read_gettext(corpus: LocalCorpus) -> Iterator[Row]:
    return catalogs.read_rows(corpus.languages, corpus.pivot, corpus.paths[0])


# ---------------------------------------------------------------- documents


def _read_documents(corpus: LocalCorpus) -> Iterator[Row]:
    """Yield the lines of all documents in a JSON Lines or Parquet file."""
    path = corpus.paths[0]
    field = corpus.source.text_field
    documents = _read_json_texts(path, field) if corpus.source.format == "jsonl" else _read_parquet_texts(path, field)
    for document in documents:
        # Users report that MADLAD-400 separates lines by a backslash and an "n". Split at these two characters only if
        # the text is a single line: other texts that contain them nearly always have several lines.
        separator = "\n" if "\n" in document.text else "\\n"
        for text in document.text.split(separator):
            yield Row((corpus.languages[0],), (text,), path.name, document.number, document.dropped)


def _read_json_texts(path: Path, field: str) -> Iterator[Line]:
    """Yield the text and line number of each document in a JSON Lines file.

    The field is `content` in OSCAR, and `text` in other corpora. Sources: `Document` in the crate oscar-io (OSCAR 22.01
    and 23.01), and MADLAD-400's files data-v1p5/*/*.jsonl.gz.
    """
    for line in lines.read_lines(path):
        if line.dropped or not line.text.strip():  # cleaning drops empty lines
            yield line
            continue
        position = f"{path}:{line.number}"
        document = user_files.parse_json(line.text, dict[str, Any], position, "write a JSON object on each line")
        remedy = f"set text_field to one of its keys ({', '.join(document):.200})"
        text = user_files.validate(document.get(field), str, f"{position}: {field}", remedy)
        yield Line(line.number, text)


def _read_parquet_texts(path: Path, field: str) -> Iterator[Line]:
    """Yield the text and row number of each document in a Parquet file.

    CulturaX has the columns text, timestamp, url and source.
    """
    with tables.translate_arrow_errors(path, "write it again"):
        column_names = pq.read_schema(user_files.check_readable(path)).names
        if field not in column_names:
            remedy = f"set text_field to one of its columns ({', '.join(column_names):.200})"
            raise InputError(f"{path} has no column {field}: {remedy}")
        for number, (text,) in enumerate(tables.read_text_columns(path, [field]), start=1):
            yield Line(number, text or "")


# ---------------------------------------------------------------- parallel lines


def _read_tsv(corpus: LocalCorpus) -> Iterator[Row]:
    """Yield the rows of a tab-separated file. Quotation marks are part of the text.

    CCMatrix has the columns score, source and target. NLLB (allenai/nllb) has source, target and score, followed by
    language probabilities and the sentences' origin.
    """
    path = corpus.paths[0]
    source = corpus.source
    columns_of_languages = source.columns or range(len(source.languages))
    sides = _order_sides(corpus)
    languages = tuple(source.languages[side] for side in sides)
    text_columns = [columns_of_languages[side] for side in sides]
    last_column = max(*text_columns, source.score_column or 0)
    for line in lines.read_lines(path):
        cells = line.text.split("\t")
        reason = line.dropped
        if reason is None and last_column >= len(cells):
            reason = "missing_column"
        if reason is not None:
            yield Row(languages, (line.text,), path.name, line.number, reason)
            continue
        if source.score_column is not None:
            reason = _check_score(source, cells[source.score_column], f"{path}:{line.number}")
        texts = tuple(cells[column] for column in text_columns)
        yield Row(languages, texts, path.name, line.number, reason)


def _check_score(source: CorpusSource, score: str, position: str) -> str | None:
    """Return "low_score" if a pair's score is below the corpus's minimum, otherwise None."""
    try:
        is_high_enough = float(score) >= (source.minimum_score or 0)  # False for nan
    except ValueError:
        raise InputError(
            f"{position}: the score {score!r:.40} is not a number: check score_column, or remove minimum_score"
        ) from None
    return None if is_high_enough else "low_score"


def _order_sides(corpus: LocalCorpus) -> list[int]:
    """Return the indices of the config's languages in the order of a row's sides. The pivot comes first."""
    languages = corpus.source.languages
    pivot_indices = [index for index, language in enumerate(languages) if language == corpus.pivot]
    other_indices = [index for index, language in enumerate(languages) if language != corpus.pivot]
    return pivot_indices + other_indices


def _read_moses(corpus: LocalCorpus) -> Iterator[Row]:
    """Yield the pairs of two line-aligned files, or of a zip file that contains them."""
    languages = tuple(corpus.source.languages[side] for side in _order_sides(corpus))
    files = _open_moses_files(corpus)
    file_names = f"{files[0].name} {files[1].name}"
    # Count before reading, so that no row of mismatched files is used.
    line_counts = [sum(1 for _ in lines.read_lines(file)) for file in files]
    if len(set(line_counts)) > 1:
        columns = (*languages, "scores")  # `scores` is read only if the config sets `minimum_score`
        counts = " ".join(f"{column}={count}" for column, count in zip(columns, line_counts, strict=False))
        raise ParallelMismatch(f"{file_names}: different numbers of lines, {counts}: align the files again")
    readers = [lines.read_lines(file) for file in files]
    for source_line, target_line, *score_lines in zip(*readers, strict=True):
        number = source_line.number
        texts = (source_line.text, target_line.text)
        reason = source_line.dropped or target_line.dropped
        if target_line.dropped and not source_line.dropped:
            texts = (target_line.text, source_line.text)  # the first text may be a position, see `Row.dropped`
        if score_lines and reason is None:
            reason = _check_score(corpus.source, score_lines[0].text, f"{files[2]}:{number}")
        yield Row(languages, texts, file_names, number, reason)


def _open_moses_files(corpus: LocalCorpus) -> list[AnyPath]:
    """Return the pivot's file, the other language's file and, if `minimum_score` is set, the scores file."""
    sides = _order_sides(corpus)
    if len(corpus.paths) == 2:
        first_path, second_path = corpus.paths
        if first_path.samefile(second_path):
            raise InputError(f"{first_path} is named for both sides of parallel text: name a file for each language")
        return [corpus.paths[side] for side in sides]
    suffixes = [corpus.source.languages[side] for side in sides]
    if corpus.source.minimum_score is not None:
        suffixes.append("scores")
    path = corpus.paths[0]
    archive = lines.open_zip(path, expected_kind="a Moses zip file of OPUS, nor a list of two paths")
    return [_find_moses_file(archive, path, suffix) for suffix in suffixes]


def _find_moses_file(archive: zipfile.ZipFile, path: Path, suffix: str) -> zipfile.Path:
    """Return the only file in a Moses archive with a suffix, which is a language or `scores`.

    An archive from OPUS contains README, LICENSE, CCMatrix.de-en.de, CCMatrix.de-en.en and perhaps
    CCMatrix.de-en.scores.
    """
    # Some corpora use suffixes such as zh_CN or pt_br. README and LICENSE may exist in several languages.
    pattern = re.compile(rf"(?!(.*/)?(README|LICENSE)\.).*\.{suffix}([_-]\w+)?", re.IGNORECASE)
    names = [name for name in archive.namelist() if pattern.fullmatch(name)]
    if len(names) != 1:
        raise InputError(
            f"{path} has {len(names)} files whose names end in .{suffix}, expected 1 (its files: "
            f"{', '.join(archive.namelist()):.200}): give a Moses zip file of OPUS, or a list of two paths"
        )
    return zipfile.Path(archive, names[0])


def _check_alignment(rows: Iterable[Row]) -> Iterator[Row]:
    """Yield rows of parallel text. Raise ParallelMismatch if the lengths of the two sides do not correlate.

    If a side's lines are shifted, each length ratio remains plausible, but the correlation of the lengths falls to
    about 0. Long windows detect sides that hardly correspond. Short windows detect shifted blocks: their correlation
    rises if the shift is undone.
    """
    pairs: list[PairLengths] = []
    for row in rows:
        yield row
        if row.dropped is None and all(row.texts):
            source, target = row.texts
            pairs.append(PairLengths(row.file, row.line, len(source.encode()), len(target.encode())))
        if len(pairs) == 2 * WINDOW:
            _check_correlation(pairs[:WINDOW], MIN_CORRELATION)
            _check_blocks(pairs[: WINDOW + BLOCK], BLOCK)  # includes blocks that begin in this window
            del pairs[:WINDOW]  # keep one window, so that the last window of the file is never short
    if len(pairs) >= WINDOW // 2:  # low correlations of fewer pairs are not significant
        for window in _list_windows(pairs, WINDOW, step=WINDOW):
            _check_correlation(window, MIN_CORRELATION)
    _check_blocks(pairs, BLOCK if len(pairs) >= WINDOW else SMALL_BLOCK)


def _list_windows(pairs: list[PairLengths], size: int, step: int) -> Iterator[list[PairLengths]]:
    """Yield windows of `size` pairs, one every `step` pairs. The last window ends with the last pair."""
    last_start = max(0, len(pairs) - size)
    for start in [*range(0, last_start, step), last_start]:
        yield pairs[start : start + size]


def _check_blocks(pairs: list[PairLengths], block_size: int) -> None:
    """Check short windows that overlap by half."""
    for block in _list_windows(pairs, block_size, step=block_size // 2):
        if len(block) >= MIN_BLOCK:
            _check_correlation(block, MIN_BLOCK_CORRELATION)
            _check_shift(block)


def _check_correlation(pairs: list[PairLengths], min_correlation: float) -> None:
    """Raise ParallelMismatch if the lengths of the sides correlate too little for translations."""
    source, target = _log_lengths(pairs)
    correlation = _correlate(source, target)
    if correlation is not None and correlation < min_correlation:
        raise ParallelMismatch(
            f"{pairs[0].file}: the sides do not belong together in the {len(pairs)} pairs from line {pairs[0].line} to "
            f"{pairs[-1].line}: correlation of lengths {correlation:.2f}, need {min_correlation}: align the files again"
        )


def _check_shift(pairs: list[PairLengths]) -> None:
    """Raise ParallelMismatch if shifting the target by a few lines increases the correlation of the lengths."""
    source, target = _log_lengths(pairs)
    first = MAX_SHIFT  # skip the first and last lines, which lack a target line for some shifts
    end = len(pairs) - MAX_SHIFT
    correlations: dict[int, float] = {}
    for shift in range(-MAX_SHIFT, MAX_SHIFT + 1):
        correlation = _correlate(source[first:end], target[first + shift : end + shift])
        if correlation is not None:
            correlations[shift] = correlation
    if 0 not in correlations:  # the lengths vary too little
        return
    best_shift = max(correlations, key=correlations.__getitem__)
    if correlations[best_shift] > correlations[0] + MIN_SHIFT_GAIN:
        direction = "further down" if best_shift > 0 else "further up"
        raise ParallelMismatch(
            f"{pairs[0].file}: the sides do not belong together from line {pairs[0].line} to {pairs[-1].line}: the "
            f"correlation of their lengths is {correlations[0]:.2f}, but {correlations[best_shift]:.2f} with the "
            f"target lines {abs(best_shift)} {direction}: align the files again"
        )


def _log_lengths(pairs: list[PairLengths]) -> np.ndarray:
    """Return the log lengths (2, N) of both sides."""
    lengths = np.array([(pair.source_bytes, pair.target_bytes) for pair in pairs], dtype=float)
    return np.log(lengths.T)


def _correlate(source: np.ndarray, target: np.ndarray) -> float | None:
    """Return the correlation of two arrays (N,), or None if an array varies too little for a significant result."""
    if min(source.std(), target.std()) < MIN_DEVIATION:
        return None
    return float(np.corrcoef(source, target)[0, 1])


# ---------------------------------------------------------------- texts by language


def _read_units(corpus: LocalCorpus) -> Iterator[Row]:
    """Yield a pair for each translation in a TMX or XLIFF file."""
    path = corpus.paths[0]
    for number, unit in enumerate(translation_units.read_units(path, corpus.source.format), start=1):
        if unit.dropped:
            yield _make_dropped_row(corpus, number, unit.dropped)
            continue
        pairs = list(_make_pairs(corpus, unit.texts, number))
        if not pairs:
            pairs = [_make_dropped_row(corpus, number, "missing_side")]
        yield from pairs


def _make_dropped_row(corpus: LocalCorpus, number: int, reason: str) -> Row:
    """Return an empty row for a unit without a pair, so that the report counts the unit. `und`: unknown language."""
    return Row((corpus.pivot, "und"), ("", ""), corpus.paths[0].name, number, reason)


def _make_pairs(corpus: LocalCorpus, text_by_language: Mapping[str, str], number: int) -> Iterator[Row]:
    """Yield pairs of the pivot's text and its translation into each language of the corpus."""
    pivot = corpus.pivot
    if pivot not in text_by_language:
        return
    for language in corpus.languages:
        if language != pivot and language in text_by_language:
            texts = (text_by_language[pivot], text_by_language[language])
            yield Row((pivot, language), texts, corpus.paths[0].name, number)


def _read_jsonl(corpus: LocalCorpus) -> Iterator[Row]:
    """Yield the pairs of each line in a JSON Lines file, or single sentences if the line has no pair with the pivot."""
    path = corpus.paths[0]
    for number, line in enumerate(lines.read_valid_texts(path), start=1):
        if not line.strip():
            yield _make_dropped_row(corpus, number, "empty")
            continue
        text_by_language = _parse_translation(corpus, line, f"{path}:{number}")
        yield from _make_rows(corpus, text_by_language, number) or [_make_dropped_row(corpus, number, "missing_side")]


def _make_rows(corpus: LocalCorpus, text_by_language: Mapping[str, str], number: int) -> list[Row]:
    """Return the pairs with the pivot's text, or each text as a sentence if there is no pair."""
    pairs = list(_make_pairs(corpus, text_by_language, number))
    if pairs:
        return pairs
    return [Row((language,), (text,), corpus.paths[0].name, number) for language, text in text_by_language.items()]


def _parse_translation(corpus: LocalCorpus, line: str, position: str) -> dict[str, str]:
    """Parse a JSON object and return its texts by language."""
    remedy = "write an object with a key for each language on each line"
    record = user_files.parse_json(line, dict[str, Any], position, remedy)
    translation = record.get("translation", record)  # nested in data sets of the Hugging Face hub
    values = user_files.validate(translation, dict[str, Any], f"{position}: translation", remedy)
    text_by_language = {}
    for language in corpus.languages:
        text = values.get(language)
        if text is not None:
            remedy = "write the text of this language"
            text_by_language[language] = user_files.validate(text, str, f"{position}: {language}", remedy)
    return text_by_language


def _read_parquet(corpus: LocalCorpus) -> Iterator[Row]:
    """Yield the pairs of a table with one column per language, or single sentences if the pivot has no column."""
    path = corpus.paths[0]
    with tables.translate_arrow_errors(path, "write it again"):
        column_names = pq.read_schema(user_files.check_readable(path)).names
        languages = [language for language in corpus.languages if language in column_names]
        if not languages:
            expected_columns = ", ".join(corpus.languages)
            raise InputError(
                f"{path} has no column for {expected_columns}: name its columns by language, or set text_field"
            )
        for number, cells in enumerate(tables.read_text_columns(path, languages), start=1):
            text_by_language = {language: text or "" for language, text in zip(languages, cells, strict=True)}
            yield from _make_rows(corpus, text_by_language, number)


READERS: dict[str, Callable[[LocalCorpus], Iterator[Row]]] = {
    "text": _read_text,
    "tsv": _read_tsv,
    "moses": _read_moses,
    "tmx": _read_units,
    "xliff": _read_units,
    "jsonl": _read_jsonl,
    "parquet": _read_parquet,
    "gettext": _read_gettext,
}
"""Readers by format."""

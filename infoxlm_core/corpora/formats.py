"""Corpus formats: every line, message or translation unit of a file becomes a row, some with a reason to drop it.

A row of one language is a monolingual line. A row of two languages is a translation pair that begins with the pivot.
A line of a file `x.tsv` becomes:

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
from infoxlm_core.corpora.lines import AnyPath, Row
from infoxlm_core.errors import CorpusTooSmall, InputError, ParallelMismatch

PairLengths = tuple[int, int, int]  # number of the line, and the UTF-8 bytes of its two sides
WINDOW = 1000  # pairs
MIN_CORRELATION = 0.4  # of the lengths in a window
MIN_BLOCK = 50  # pairs of a short window; the correlation of fewer pairs is not significant
MIN_BLOCK_CORRELATION = 0.15  # of the lengths in a short window
MAX_SHIFT = 3  # lines
MIN_SHIFT_GAIN = 0.15  # increase of the correlation by a shift, above which the lines are shifted
MIN_DEVIATION = 0.25  # of the logarithms of lengths; a correlation of texts of about the same length proves nothing


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
"""The format of files of translations with these suffixes."""


class LocalCorpus(NamedTuple):
    """A corpus on this machine."""

    source: CorpusSource
    languages: list[str]  # those to read
    pivot: str
    paths: Sequence[Path]  # local copies of `source.paths`


def infer_format(path: Path) -> str:
    """Return the format of a file of translations, from its suffix. A folder contains gettext catalogs.

    Raises:
        InputError: the suffix is not one of `FORMATS_OF_TRANSLATIONS`.
    """
    suffixes = [suffix for suffix in path.suffixes if suffix not in lines.COMPRESSED]
    suffix = suffixes[-1].lower() if suffixes else ""
    if path.is_dir():
        return "gettext"
    if suffix not in FORMATS_OF_TRANSLATIONS:
        raise InputError(
            f"{path}: its name does not tell the format of its translations: "
            f"give a file {', '.join(FORMATS_OF_TRANSLATIONS)}, or a folder of gettext catalogs"
        )
    return FORMATS_OF_TRANSLATIONS[suffix]


def read_pairs(source: CorpusSource, languages: Sequence[str], pivot: str, paths: Sequence[Path]) -> Iterator[Row]:
    """Yield the translation pairs of a corpus with text on both sides. Arguments and errors are those of `read`."""
    for row in read(source, languages, pivot, paths):
        if row.dropped is None and len(row.texts) == 2 and all(text.strip() for text in row.texts):
            yield row


def read(source: CorpusSource, languages: Sequence[str], pivot: str, paths: Sequence[Path]) -> Iterator[Row]:
    """Yield the rows of a corpus in the order of its files.

    Args:
        source: the corpus as the config describes it.
        languages: the languages of the run; text in other languages is skipped.
        pivot: the language that every pair contains.
        paths: the local copies of `source.paths`.

    Raises:
        InputError: a file is missing, damaged or not of its format.
        CorpusTooSmall: a file is empty.
        ParallelMismatch: the sides of parallel text differ in number of lines, or are not translations.
    """
    corpus = LocalCorpus(source, _check_corpus(source, languages, pivot, paths), pivot, paths)
    read_rows = _read_documents if source.text_field else READERS[source.format]
    return read_rows(corpus)


def _check_corpus(source: CorpusSource, languages: Sequence[str], pivot: str, paths: Sequence[Path]) -> list[str]:
    """Return the languages to read from a corpus. Raise InputError or CorpusTooSmall if it cannot be read."""
    for path in paths:
        if source.format != "gettext" and not path.is_file():
            problem = "not a file" if path.exists() else "no such file"
            raise InputError(f"{path}: {problem} (corpus {source.name}): check its path")
        if path.is_file() and not path.stat().st_size:
            raise CorpusTooSmall(f"{path} (corpus {source.name}) is empty (have=0 need=1 bytes): replace it")
    selected = [language for language in source.languages or languages if language in {*languages, pivot}]
    unknown = set(source.languages) - set(selected)
    if unknown:
        raise InputError(f"corpus {source.name}: {', '.join(sorted(unknown))} is not among the run's languages")
    if len(source.languages) > 1 and pivot not in selected:
        raise InputError(f"corpus {source.name}: no side of its pairs is the pivot {pivot}: name it in languages")
    return selected


def _read_text(corpus: LocalCorpus) -> Iterator[Row]:
    """Yield the lines of a text file. If documents are compared, a row has the line on which its document begins."""
    (path,) = corpus.paths
    first_line = 1  # of the document
    for number, text, reason in lines.read(path):
        row_line = first_line if corpus.source.compares_documents else number
        yield Row((corpus.languages[0],), (text,), path.name, row_line, reason)
        if reason is None and not text.strip():
            first_line = number + 1


def _read_gettext(corpus: LocalCorpus) -> Iterator[Row]:
    return catalogs.read(corpus.languages, corpus.pivot, corpus.paths[0])


# ---------------------------------------------------------------- documents


def _read_documents(corpus: LocalCorpus) -> Iterator[Row]:
    """Yield a row for each line of the documents in a JSON Lines or Parquet file."""
    path = corpus.paths[0]
    read_texts = _read_json_texts if corpus.source.format == "jsonl" else _read_parquet_texts
    for number, text, reason in read_texts(path, corpus.source.text_field):
        # Users of MADLAD-400 report a backslash and an "n" where a line ends (its authors do not mention it). In other
        # text, these characters are hardly ever the only line end.
        separator = "\n" if "\n" in text else "\\n"
        for line in text.split(separator):
            yield Row((corpus.languages[0],), (line,), path.name, number, reason)


def _read_json_texts(path: Path, field: str) -> Iterator[tuple[int, str, str | None]]:
    """Yield the number, the text and the reason to drop each document. OSCAR names the field `content`, others `text`.

    Sources: `Document` of the crate oscar-io (OSCAR 22.01 and 23.01); the files data-v1p5/*/*.jsonl.gz of MADLAD-400.
    """
    for number, line, reason in lines.read(path):
        text = line
        if reason is None:
            position = f"{path}:{number}"
            document = user_files.parse_json(line, dict[str, Any], position, "write a JSON object on each line")
            remedy = f"set text_field to one of its keys ({', '.join(document):.200})"
            text = user_files.validate(document.get(field), str, f"{position}: {field}", remedy)
        yield number, text, reason


def _read_parquet_texts(path: Path, field: str) -> Iterator[tuple[int, str, None]]:
    """Yield the number and the text of each document. CulturaX has the columns text, timestamp, url and source."""
    with tables.reading(path, "write it again"):
        column_names = pq.read_schema(user_files.check_readable(path)).names
        if field not in column_names:
            remedy = f"set text_field to one of its columns ({', '.join(column_names):.200})"
            raise InputError(f"{path} has no column {field}: {remedy}")
        for number, (text,) in enumerate(tables.read_text(path, [field]), start=1):
            yield number, text or "", None


# ---------------------------------------------------------------- parallel lines


def _read_tsv(corpus: LocalCorpus) -> Iterator[Row]:
    """Yield the rows of a file whose columns are separated by tabs. Quotation marks are part of the text.

    Files of CCMatrix have the columns score, source and target. Files of NLLB (allenai/nllb) have source, target and
    score, then probabilities of the languages and the origin of the sentences.
    """
    path = corpus.paths[0]
    source = corpus.source
    columns_of_languages = source.columns or range(len(source.languages))
    order = _order_sides(corpus)
    row_languages = tuple(source.languages[index] for index in order)
    text_columns = [columns_of_languages[index] for index in order]
    last_column = max(*text_columns, source.score_column or 0)

    def rows() -> Iterator[Row]:
        for number, text, reason in lines.read(path):
            cells = text.split("\t")
            if reason is None and last_column >= len(cells):
                reason = "missing_column"
            if reason is not None:
                yield Row(row_languages, (text,), path.name, number, reason)
                continue
            if source.score_column is not None:
                reason = _check_score(source, cells[source.score_column], f"{path}:{number}")
            texts = tuple(cells[column] for column in text_columns)
            yield Row(row_languages, texts, path.name, number, reason)

    if len(row_languages) == 2:
        return _check_alignment(rows(), path.name)
    return rows()


def _check_score(source: CorpusSource, score: str, position: str) -> str | None:
    """Return "low_score" if the score of a pair is below the corpus's minimum, otherwise None."""
    try:
        is_high_enough = float(score) >= (source.minimum_score or 0)  # False for nan
    except ValueError:
        raise InputError(
            f"{position}: the score {score!r:.40} is not a number: check score_column, or remove minimum_score"
        ) from None
    return None if is_high_enough else "low_score"


def _order_sides(corpus: LocalCorpus) -> list[int]:
    """Return the indices of the config's languages in the order of a row's sides, the pivot first."""
    languages = corpus.source.languages
    pivot_indices = [index for index, language in enumerate(languages) if language == corpus.pivot]
    other_indices = [index for index, language in enumerate(languages) if language != corpus.pivot]
    return pivot_indices + other_indices


def _read_moses(corpus: LocalCorpus) -> Iterator[Row]:
    """Yield the pairs of two files, each with a sentence on each line. A zip file may contain both."""
    languages = tuple(corpus.source.languages[index] for index in _order_sides(corpus))
    files = _open_moses_files(corpus)
    file_names = f"{files[0].name} {files[1].name}"
    line_counts = [sum(1 for _ in lines.read(file)) for file in files]
    if len(set(line_counts)) > 1:
        columns = (*languages, "scores")
        counts = " ".join(f"{column}={count}" for column, count in zip(columns, line_counts, strict=False))
        raise ParallelMismatch(f"{file_names}: different numbers of lines, {counts}: align the files again")

    def rows() -> Iterator[Row]:
        readers = [lines.read(file) for file in files]
        for source_line, target_line, *score_lines in zip(*readers, strict=True):
            number, source_text, source_reason = source_line
            _, target_text, target_reason = target_line
            texts = (source_text, target_text)
            if target_reason and not source_reason:
                texts = (target_text, source_text)  # if a side is invalid UTF-8, the first text is its position
            reason = source_reason or target_reason
            for _, score, _ in score_lines:
                reason = reason or _check_score(corpus.source, score, f"{files[2]}:{number}")
            yield Row(languages, texts, file_names, number, reason)

    return _check_alignment(rows(), file_names)


def _open_moses_files(corpus: LocalCorpus) -> list[AnyPath]:
    """Return the files of both languages, the pivot's first, and the file of the scores if `minimum_score` is set.

    A zip file of OPUS contains README, LICENSE, CCMatrix.de-en.de, CCMatrix.de-en.en and perhaps CCMatrix.de-en.scores.
    """
    order = _order_sides(corpus)
    if len(corpus.paths) == 2:
        first_path, second_path = corpus.paths
        if first_path.samefile(second_path):
            raise InputError(f"{first_path} is named for both sides of parallel text: name a file for each language")
        return [corpus.paths[index] for index in order]
    path = corpus.paths[0]
    archive = lines.open_zip(path, "a Moses zip file of OPUS, nor a list of two paths")
    suffixes = [corpus.source.languages[index] for index in order]
    if corpus.source.minimum_score is not None:
        suffixes.append("scores")
    files: list[AnyPath] = []
    for suffix in suffixes:
        # Some corpora name their languages zh_CN or pt_br. README and LICENSE may exist in several languages.
        pattern = re.compile(rf"(?!(.*/)?(README|LICENSE)\.).*\.{suffix}([_-]\w+)?", re.IGNORECASE)
        names = [name for name in archive.namelist() if pattern.fullmatch(name)]
        if len(names) != 1:
            raise InputError(
                f"{path} has {len(names)} files whose names end in .{suffix}, expected 1 (its files: "
                f"{', '.join(archive.namelist()):.200}): give a Moses zip file of OPUS, or a list of two paths"
            )
        files.append(zipfile.Path(archive, names[0]))
    return files


def _check_alignment(rows: Iterable[Row], file: str) -> Iterator[Row]:
    """Yield the rows. Raise ParallelMismatch where the lengths of the two sides are not correlated.

    If the lines of a side are shifted, each length ratio remains plausible, but the correlation of the lengths falls to
    about 0. It rises again if the shift is undone. A long window detects sides that hardly correspond. A short window
    detects a shifted block.
    """
    pairs: list[PairLengths] = []
    block_size = WINDOW // 10  # rows of a short window in a small file
    for row in rows:
        yield row
        if row.dropped is None and all(row.texts):
            pairs.append((row.line, len(row.texts[0].encode()), len(row.texts[1].encode())))
        if len(pairs) == 2 * WINDOW:
            block_size = WINDOW // 5
            _check_window(pairs[:WINDOW], MIN_CORRELATION, file)
            _check_blocks(pairs[: WINDOW + block_size], block_size, file)
            del pairs[:WINDOW]
    if len(pairs) >= WINDOW // 2:  # in fewer pairs a low correlation is not significant
        for next_start in range(0, len(pairs), WINDOW):
            start = max(0, min(next_start, len(pairs) - WINDOW))  # the last window has its full length, too
            _check_window(pairs[start : start + WINDOW], MIN_CORRELATION, file)
    if len(pairs) >= WINDOW:
        block_size = WINDOW // 5
    _check_blocks(pairs, block_size, file)


def _check_blocks(pairs: list[PairLengths], size: int, file: str) -> None:
    """Check windows of `size` pairs that overlap by half. The last window ends with the last pair."""
    last_start = max(0, len(pairs) - size)
    for start in [*range(0, last_start, size // 2), last_start]:
        block = pairs[start : start + size]
        if len(block) >= MIN_BLOCK:
            _check_window(block, MIN_BLOCK_CORRELATION, file)
            _check_shift(block, file)


def _check_window(pairs: list[PairLengths], min_correlation: float, file: str) -> None:
    """Raise ParallelMismatch if the correlation of the sides' lengths is too low for translations."""
    source, target = _log_lengths(pairs)
    correlation = _correlate(source, target)
    if correlation is not None and correlation < min_correlation:
        raise ParallelMismatch(
            f"{file}: the sides do not belong together in the {len(pairs)} pairs from line {pairs[0][0]} to "
            f"{pairs[-1][0]}: correlation of lengths {correlation:.2f}, need {min_correlation}: align the files again"
        )


def _check_shift(pairs: list[PairLengths], file: str) -> None:
    """Raise ParallelMismatch if the lengths correlate better when the target is shifted by a few lines."""
    source, target = _log_lengths(pairs)
    inner_source = source[MAX_SHIFT:-MAX_SHIFT]  # only these lines have a target line for every shift
    end = len(target) - MAX_SHIFT
    correlations: dict[int, float] = {}
    for shift in range(-MAX_SHIFT, MAX_SHIFT + 1):
        correlation = _correlate(inner_source, target[MAX_SHIFT + shift : end + shift])
        if correlation is not None:
            correlations[shift] = correlation
    if 0 not in correlations:
        return
    best_shift = max(correlations, key=correlations.__getitem__)
    if correlations[best_shift] > correlations[0] + MIN_SHIFT_GAIN:
        direction = "further down" if best_shift > 0 else "further up"
        raise ParallelMismatch(
            f"{file}: the sides do not belong together from line {pairs[0][0]} to {pairs[-1][0]}: the correlation of "
            f"their lengths is {correlations[0]:.2f}, but {correlations[best_shift]:.2f} with the target lines "
            f"{abs(best_shift)} {direction}: align the files again"
        )


def _log_lengths(pairs: list[PairLengths]) -> np.ndarray:
    """Return the logarithms of the lengths of both sides, (2, N)."""
    return np.log(np.array(pairs, dtype=float)[:, 1:].T)


def _correlate(source: np.ndarray, target: np.ndarray) -> float | None:
    """Return the correlation of (N,) and (N,), or None if the lengths hardly vary, which proves nothing."""
    if min(source.std(), target.std()) < MIN_DEVIATION:
        return None
    return float(np.corrcoef(source, target)[0, 1])


# ---------------------------------------------------------------- texts by language


def _read_units(corpus: LocalCorpus) -> Iterator[Row]:
    """Yield a pair for each translation of a unit into a language of the corpus."""
    path = corpus.paths[0]
    for number, unit in enumerate(translation_units.read(path, corpus.source.format), start=1):
        if unit.dropped:
            yield _make_dropped_row(corpus, number, unit.dropped)
            continue
        pairs = list(_make_pairs(corpus, unit.texts, number))
        yield from pairs or [_make_dropped_row(corpus, number, "missing_side")]


def _make_dropped_row(corpus: LocalCorpus, number: int, reason: str) -> Row:
    """Return a row without text, so that the report counts a unit without a pair. `und` is an unknown language."""
    return Row((corpus.pivot, "und"), ("", ""), corpus.paths[0].name, number, reason)


def _make_pairs(corpus: LocalCorpus, texts: Mapping[str, str], number: int) -> Iterator[Row]:
    """Yield a pair for each language of the corpus into which the pivot's text is translated."""
    pivot = corpus.pivot
    if pivot in texts:
        for language in corpus.languages:
            if language != pivot and language in texts:
                yield Row((pivot, language), (texts[pivot], texts[language]), corpus.paths[0].name, number)


def _read_jsonl(corpus: LocalCorpus) -> Iterator[Row]:
    """Yield the pairs in each line of a JSON Lines file, or its sentences if it has no pair with the pivot."""
    path = corpus.paths[0]
    for number, line in enumerate(lines.read_complete(path), start=1):
        remedy = "write an object with a key for each language on each line"
        values = user_files.parse_json(line, dict[str, Any], f"{path}:{number}", remedy)
        translation = values.get("translation", values)  # in data sets of the Hugging Face hub
        values = user_files.validate(translation, dict[str, Any], f"{path}:{number}: translation", remedy)
        texts = {}
        for language in corpus.languages:
            if values.get(language) is not None:
                position = f"{path}:{number}: {language}"
                texts[language] = user_files.validate(
                    values[language], str, position, "write the text of this language"
                )
        rows = list(_make_pairs(corpus, texts, number))
        if not rows:
            rows = [Row((language,), (text,), path.name, number) for language, text in texts.items()]
        yield from rows or [_make_dropped_row(corpus, number, "missing_side")]


def _read_parquet(corpus: LocalCorpus) -> Iterator[Row]:
    """Yield the pairs of a table that has a column for each language. Without a pivot column, yield its sentences."""
    path = corpus.paths[0]
    pivot = corpus.pivot
    with tables.reading(path, "write it again"):
        column_names = pq.read_schema(user_files.check_readable(path)).names
        columns = [language for language in corpus.languages if language in column_names]
        if not columns:
            languages = ", ".join(corpus.languages)
            raise InputError(f"{path} has no column for {languages}: name its columns by language, or set text_field")
        translations = [language for language in columns if language != pivot]
        languages_of_rows: list[tuple[str, ...]] = [(language,) for language in columns]
        if pivot in columns and translations:
            languages_of_rows = [(pivot, language) for language in translations]
        for number, cells in enumerate(tables.read_text(path, columns), start=1):
            text_of_language = dict(zip(columns, cells, strict=True))
            for row_languages in languages_of_rows:
                texts = tuple(text_of_language[language] or "" for language in row_languages)
                yield Row(row_languages, texts, path.name, number)


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
"""The reader of each format."""

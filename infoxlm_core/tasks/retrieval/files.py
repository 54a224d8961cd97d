"""Read folders of aligned sentences: for each language, sentences of the pivot and their translations.

    LASER's Tatoeba      tatoeba.deu-eng.deu  tatoeba.deu-eng.eng     (Moses: any NAME.xx-yy.xx and NAME.xx-yy.yy)
    XTREME               de-en.de  de-en.en                           refused if its English side is sorted
    a table              en-de.tsv                                    two columns, in the order of the name
    FLORES, NTREX, own   deu_Latn.dev  newstest2019-ref.deu.txt  de.txt     one file a language
    a prepared corpus    held_out/en-de/*.parquet                     columns source and target

Line i of one file must translate line i of the other. No line is cleaned or dropped, and other files are ignored.
"""

import logging
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from infoxlm_core import languages, user_files
from infoxlm_core.corpora import evaluation_sets, lines, tables
from infoxlm_core.errors import InputError, ParallelMismatch, one_line

logger = logging.getLogger(__name__)

AlignedSentences = tuple[list[str], list[str]]  # sentences of the pivot, and their translations
Pairs = list[tuple[str, str]]  # (sentence of the pivot, its translation)
_CODE = r"[a-z]{2,3}(?:[-_][A-Z][A-Za-z]{1,3})?"  # de, deu, deu_Latn, zho-CN
_SINGLE_FILE = re.compile(rf"(?:newstest2019-(?:ref|src)\.)?(?P<code>{_CODE})\.(?:txt|dev|devtest|test)")
_PAIR = re.compile("[a-z]{2,3}-[a-z]{2,3}")
_PAIR_FILE = re.compile(rf"(?P<pair>(?:.+\.)?(?P<a>{_CODE})-(?P<b>{_CODE}))\.(?P<side>{_CODE})")
_LAYOUTS = "NAME.de-en.de and NAME.de-en.en, en-de.tsv, de.txt and en.txt, or held_out/en-de/*.parquet"
_HELD_OUT_REMEDY = "Give a prepared corpus with held_out/en-xx/NAME.parquet."
SORTED_LINES = 20  # so many lines are never in alphabetical order by chance


def read_aligned(folder: Path, pivot: str, requested: str | Iterable[str] = "all") -> dict[str, AlignedSentences]:
    """Return the aligned sentences by language code, with the codes of the files in the order of the paper's tables.

    Args:
        folder: in one of the layouts above.
        pivot: the language that all others are aligned with.
        requested: which languages to read; see `languages.choose`.

    Raises:
        InputError: there is no such set, a language is missing, or a line is empty.
        ParallelMismatch: two aligned files have different numbers of lines.
        EncodingError: a file is not UTF-8.
    """
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder. Give one with {_LAYOUTS}.")
    if (folder / "held_out").is_dir():
        corpus_pivot, pairs = read_held_out(folder)
        if not _is_same_language(corpus_pivot, pivot):
            raise InputError(
                f"{folder}/held_out has pairs of {corpus_pivot}, not of {pivot}. Set pivot: {corpus_pivot}."
            )
        selected_codes = languages.choose(pairs, requested, f"{folder}/held_out")
        return {code: _split_columns(pairs[code]) for code in selected_codes}
    files = sorted(path for path in folder.iterdir() if path.is_file())
    readers = _find_pairs(files, pivot) or _find_single_files(files, pivot, folder)
    if not readers:
        raise InputError(f"{folder} has no aligned files of {pivot} and another language. Give {_LAYOUTS}.")
    selected_codes = languages.choose(readers, requested, str(folder))
    return {code: readers[code]() for code in selected_codes}  # other files may be large, so they are not read


def list_test_files(data: Path) -> list[Path]:
    """Return the files of an aligned test set, or the held-out files of a prepared corpus."""
    if (data / "held_out").is_dir():
        return evaluation_sets.list_files(data / "held_out")
    set_files = []
    for file in evaluation_sets.list_files(data):
        if _SINGLE_FILE.fullmatch(file.name) or _PAIR_FILE.fullmatch(file.name):
            set_files.append(file)
    return set_files


def _is_same_language(code: str, language: str) -> bool:
    """Return whether two codes, such as deu_Latn and de, are of the same language."""
    return languages.two_letters(code) == languages.two_letters(language)


def _find_pairs(files: Sequence[Path], pivot: str) -> dict[str, Callable[[], AlignedSentences]]:
    """Return for each language a function that reads its sentences: from a table, or from two files with the pivot."""
    paths: dict[str, Path] = {}
    readers: dict[str, Callable[[], AlignedSentences]] = {}
    for path in files:
        match = _PAIR_FILE.fullmatch(path.name)
        if not match:
            continue
        pivot_is_first = _is_same_language(match["a"], pivot)
        pivot_is_second = _is_same_language(match["b"], pivot)
        if pivot_is_first == pivot_is_second:
            continue
        pivot_code = match["a"] if pivot_is_first else match["b"]
        language = match["b"] if pivot_is_first else match["a"]
        if match["side"] == "tsv":
            reader = partial(_read_table, path, pivot_is_second=pivot_is_second)
        elif match["side"] in (pivot_code, language):
            pivot_path = path.with_name(f"{match['pair']}.{pivot_code}")
            translation_path = path.with_name(f"{match['pair']}.{language}")
            for expected_path in (pivot_path, translation_path):
                if not expected_path.is_file():
                    raise InputError(f"{path}: {expected_path.name} is missing beside it. Give both files.")
            if path == pivot_path:  # the pair is added once, with the file of its translations
                continue
            has_xtreme_name = match["pair"] == f"{language}-{pivot_code}"  # XTREME's names have the pivot last
            reader = partial(_read_aligned_files, pivot_path, translation_path, refuse_sorted=has_xtreme_name)
        else:
            continue
        _add_path(paths, language, path)
        readers[language] = reader
    return readers


def _add_path(paths: dict[str, Path], code: str, path: Path) -> None:
    """Record the file of a language. Raise InputError if the folder has another file of the same language."""
    if code in paths:
        raise InputError(f"{path.parent} has {code} twice ({paths[code].name}, {path.name}). Keep one set per folder.")
    paths[code] = path


def _find_single_files(files: Sequence[Path], pivot: str, folder: Path) -> dict[str, Callable[[], AlignedSentences]]:
    """Return for each language except the pivot a function that reads its file beside that of the pivot."""
    paths: dict[str, Path] = {}
    for path in files:
        match = _SINGLE_FILE.fullmatch(path.name)
        if match:
            _add_path(paths, match["code"], path)
    if not paths:
        return {}
    (pivot_code,) = languages.choose(paths, [pivot], str(folder))
    pivot_path = paths[pivot_code]
    readers: dict[str, Callable[[], AlignedSentences]] = {}
    for code, path in paths.items():
        if not _is_same_language(code, pivot):
            readers[code] = partial(_read_aligned_files, pivot_path, path)
    return readers


def _read_aligned_files(pivot_path: Path, translation_path: Path, refuse_sorted: bool = False) -> AlignedSentences:
    """Read two files of which line i of one translates line i of the other.

    Args:
        pivot_path: the pivot's sentences.
        translation_path: their translations.
        refuse_sorted: refuse a pivot file in alphabetical order, whose lines are not those of the translations.
    """
    sentences = _read_lines(pivot_path)
    translations = _read_lines(translation_path)
    if len(sentences) != len(translations):
        raise ParallelMismatch(
            f"{pivot_path} has {len(sentences)} lines, {translation_path} {len(translations)}. "
            "Line i must translate line i."
        )
    if refuse_sorted and len(sentences) >= SORTED_LINES:
        stripped_sentences = [sentence.strip() for sentence in sentences]
        if stripped_sentences == sorted(stripped_sentences):
            raise ParallelMismatch(
                f"{pivot_path} is in alphabetical order, by which XTREME hides which line translates which. "
                "Give LASER's files (data/tatoeba/v1)."
            )
    return sentences, translations


def _read_lines(path: Path) -> list[str]:
    """Read a file of one sentence per line. Raise InputError if a line is empty or too long."""
    sentences = []
    for line_number, text in enumerate(lines.read_complete(path), 1):
        if not text.strip():
            raise InputError(f"{path}:{line_number} is empty. Give one sentence a line.")
        sentences.append(text)
    if not sentences:
        raise InputError(f"{path} is empty. Give one sentence a line.")
    return sentences


def _read_table(path: Path, pivot_is_second: bool) -> AlignedSentences:
    """Read a table of two columns, and return the column of the pivot first."""
    rows = [tuple(line.split("\t")) for line in _read_lines(path)]
    for line_number, cells in enumerate(rows, 1):
        if len(cells) != 2 or not all(cell.strip() for cell in cells):
            raise InputError(
                f"{path}:{line_number} is not two sentences separated by one tab: {' | '.join(cells)!r:.100}"
            )
    first_column, second_column = _split_columns(rows)
    return (second_column, first_column) if pivot_is_second else (first_column, second_column)


def _split_columns(rows: Sequence[tuple[str, ...]]) -> AlignedSentences:
    first_column, second_column = zip(*rows, strict=True)
    return list(first_column), list(second_column)


def read_held_out(corpus: Path) -> tuple[str, dict[str, Pairs]]:
    """Return the pivot of a prepared corpus and its held-out pairs by language.

    Raises:
        InputError: there are none, or a file is not one that `prepare_corpus` writes.
    """
    pairs: dict[str, Pairs] = {}
    pivots = set()
    for path in sorted((corpus / "held_out").glob("*/*.parquet")):
        pivot, _, language = path.parent.name.partition("-")
        pivots.add(pivot)
        pairs.setdefault(language, []).extend(_read_pairs(path))
    empty_languages = [language for language, rows in pairs.items() if not rows]
    for language in empty_languages:
        logger.warning("no held-out pairs of %s: it is not evaluated", language)
        del pairs[language]
    if not pairs:
        raise InputError(f"{corpus} has no held-out pairs. {_HELD_OUT_REMEDY}")
    if len(pivots) > 1:
        names = ", ".join(sorted(pivots))
        raise InputError(f"{corpus}/held_out has pairs of several pivots ({names}). {_HELD_OUT_REMEDY}")
    return pivots.pop(), pairs


def _read_pairs(path: Path) -> Pairs:
    """Read the pairs of one held-out file. Raise InputError if a pair lacks its source or target."""
    try:
        schema = pq.read_schema(user_files.check_readable(path))
        has_columns = {"source", "target"} <= set(schema.names)
        if not has_columns or not _PAIR.fullmatch(path.parent.name):
            raise InputError(
                f"{path} does not have columns source and target of a pair such as en-de. {_HELD_OUT_REMEDY}"
            )
        rows = list(tables.read_text(path, ("source", "target")))
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read ({one_line(error)}). {_HELD_OUT_REMEDY}") from error
    pairs = []
    for row_number, (source, target) in enumerate(rows, 1):
        if not source or not source.strip() or not target or not target.strip():
            raise InputError(f"{path}: row {row_number} has no source or no target text. {_HELD_OUT_REMEDY}")
        pairs.append((str(source), str(target)))
    return pairs

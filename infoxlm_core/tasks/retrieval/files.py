"""Files of aligned sentences: a folder has, for each language, sentences of the pivot and their translations.

    LASER's Tatoeba      tatoeba.deu-eng.deu  tatoeba.deu-eng.eng     (Moses: any NAME.xx-yy.xx and NAME.xx-yy.yy)
    XTREME               de-en.de  de-en.en                           refused if its English side is sorted
    a table              en-de.tsv                                    two columns, in the order of the name
    FLORES, NTREX, own   deu_Latn.dev  newstest2019-ref.deu.txt  de.txt     one file a language
    a prepared corpus    held_out/en-de/*.parquet                     columns source and target

Nothing is cleaned: a set in which line i does not translate line i is refused. Other files in the folder are ignored.
"""

import logging
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from infoxlm_core import languages, outside
from infoxlm_core.corpora import evaluation_sets, lines, tables
from infoxlm_core.errors import EncodingError, InputError, ParallelMismatch, one_line

logger = logging.getLogger(__name__)

Sides = tuple[list[str], list[str]]  # sentences of the pivot, and their translations
Pairs = list[tuple[str, str]]  # (sentence of the pivot, its translation)
_CODE = r"[a-z]{2,3}(?:[-_][A-Z][A-Za-z]{1,3})?"  # de, deu, deu_Latn, zho-CN
_SINGLE_FILE = re.compile(rf"(?:newstest2019-(?:ref|src)\.)?(?P<code>{_CODE})\.(?:txt|dev|devtest|test)")
_PAIR = re.compile("[a-z]{2,3}-[a-z]{2,3}")
_PAIR_FILE = re.compile(rf"(?P<pair>(?:.+\.)?(?P<a>{_CODE})-(?P<b>{_CODE}))\.(?P<side>{_CODE})")
_LAYOUTS = "NAME.de-en.de and NAME.de-en.en, en-de.tsv, de.txt and en.txt, or held_out/en-de/*.parquet"
_HELD_OUT_REMEDY = "Give a prepared corpus with held_out/en-xx/NAME.parquet."
SORTED_LINES = 20  # so many lines are not in alphabetical order by chance


def read_aligned(folder: Path, pivot: str, requested: str | Iterable[str] = "all") -> dict[str, Sides]:
    """Read an aligned set. Keys are the files' language codes, sorted as in the paper's tables.

    Args:
        folder: in one of the layouts above.
        pivot: the language that all others are aligned with.
        requested: which languages to read; see `languages.choose`.

    Raises:
        InputError: there is no such set, a language is missing, or a line is empty.
        ParallelMismatch: two sides have different numbers of lines.
        EncodingError: a file is not UTF-8.
    """
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder. Give one with {_LAYOUTS}.")
    if (folder / "held_out").is_dir():
        corpus_pivot, pairs = read_held_out(folder)
        if not _is_same(corpus_pivot, pivot):
            raise InputError(
                f"{folder}/held_out has pairs of {corpus_pivot}, not of {pivot}. Set pivot: {corpus_pivot}."
            )
        return {code: _unzip(pairs[code]) for code in languages.choose(pairs, requested, f"{folder}/held_out")}
    files = sorted(path for path in folder.iterdir() if path.is_file())
    readers = _find_pairs(files, pivot) or _find_single_files(files, pivot, folder)
    if not readers:
        raise InputError(f"{folder} has no aligned files of {pivot} and another language. Give {_LAYOUTS}.")
    return {code: readers[code]() for code in languages.choose(readers, requested, str(folder))}


def list_test_files(data: Path) -> list[Path]:
    """List the files of an aligned set; of a prepared corpus only the held-out ones, not its training text."""
    if (data / "held_out").is_dir():
        return evaluation_sets.list_files(data / "held_out")
    return [
        file
        for file in evaluation_sets.list_files(data)
        if _SINGLE_FILE.fullmatch(file.name) or _PAIR_FILE.fullmatch(file.name)
    ]


def _is_same(code: str, language: str) -> bool:
    return languages.two_letters(code) == languages.two_letters(language)


def _find_pairs(files: Sequence[Path], pivot: str) -> dict[str, Callable[[], Sides]]:
    """Find tables, and files of two sides, whose names are pairs with the pivot; return a reader for each language."""
    paths: dict[str, Path] = {}
    readers: dict[str, Callable[[], Sides]] = {}
    for path in files:
        match = _PAIR_FILE.fullmatch(path.name)
        if not match or _is_same(match["a"], pivot) == _is_same(match["b"], pivot):
            continue
        pivot_code, other = match["a"], match["b"]
        if not _is_same(pivot_code, pivot):
            pivot_code, other = other, pivot_code
        if match["side"] == "tsv":
            reader = partial(_read_table, path, swapped=pivot_code == match["b"])
        elif match["side"] in (pivot_code, other):
            pivot_file = path.with_name(f"{match['pair']}.{pivot_code}")
            other_file = path.with_name(f"{match['pair']}.{other}")
            for side in (pivot_file, other_file):
                if not side.is_file():
                    raise InputError(f"{path}: {side.name} is missing beside it. Give both sides.")
            if path == pivot_file:  # the pair is added once, when its other file is listed
                continue
            xtreme = match["pair"] == f"{other}-{pivot_code}"  # XTREME's names have the pivot last
            reader = partial(_read_sides, pivot_file, other_file, may_be_sorted=xtreme)
        else:
            continue
        _add(paths, other, path)
        readers[other] = reader
    return readers


def _add(paths: dict[str, Path], code: str, path: Path) -> None:
    if code in paths:
        raise InputError(f"{path.parent} has {code} twice ({paths[code].name}, {path.name}). Keep one set per folder.")
    paths[code] = path


def _find_single_files(files: Sequence[Path], pivot: str, folder: Path) -> dict[str, Callable[[], Sides]]:
    """Find files of one language each; return a reader for each language but the pivot."""
    paths: dict[str, Path] = {}
    for path in files:
        if match := _SINGLE_FILE.fullmatch(path.name):
            _add(paths, match["code"], path)
    if not paths:
        return {}
    (pivot_code,) = languages.choose(paths, [pivot], str(folder))
    sentences = _read_lines(
        paths[pivot_code]
    )  # the same list for all languages, so that its sentences are embedded once
    return {
        code: partial(_read_sides, paths[pivot_code], path, sentences=sentences)
        for code, path in paths.items()
        if not _is_same(code, pivot)
    }


def _read_sides(pivot: Path, other: Path, may_be_sorted: bool = False, sentences: list[str] | None = None) -> Sides:
    """Read two files that are translations line by line; `may_be_sorted`: refuse a pivot in alphabetical order."""
    sentences, translations = sentences or _read_lines(pivot), _read_lines(other)
    if len(sentences) != len(translations):
        raise ParallelMismatch(
            f"{pivot} has {len(sentences)} lines, {other} {len(translations)}. Line i must translate line i."
        )
    stripped = [sentence.strip() for sentence in sentences]
    if may_be_sorted and len(stripped) >= SORTED_LINES and stripped == sorted(stripped):
        raise ParallelMismatch(
            f"{pivot} is in alphabetical order, by which XTREME hides which line translates which. Give LASER's files "
            "(data/tatoeba/v1)."
        )
    return sentences, translations


def _read_lines(path: Path) -> list[str]:
    sentences = []
    for number, text, reason in lines.read(path):
        if reason == "invalid_utf8":  # then `text` is the position of the first invalid byte
            raise EncodingError(f"{text}: not UTF-8 from this byte on. Convert the file.")
        if reason or not text.strip():
            raise InputError(f"{path}:{number} is {'too long' if reason else 'empty'}. Give one sentence a line.")
        sentences.append(text)
    if not sentences:
        raise InputError(f"{path} is empty. Give one sentence a line.")
    return sentences


def _read_table(path: Path, swapped: bool) -> Sides:
    """Read two columns divided by a tab; `swapped` if the second one is the pivot's."""
    rows = [tuple(line.split("\t")) for line in _read_lines(path)]
    for number, cells in enumerate(rows, 1):
        if len(cells) != 2 or not all(cell.strip() for cell in cells):
            raise InputError(f"{path}:{number} is not two sentences divided by one tab: {' | '.join(cells)!r:.100}")
    first, second = _unzip(rows)
    return (second, first) if swapped else (first, second)


def _unzip(rows: Sequence[tuple[str, ...]]) -> Sides:
    first, second = zip(*rows, strict=True)
    return list(first), list(second)


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
    for language in [language for language, rows in pairs.items() if not rows]:
        logger.warning("no held-out pairs of %s: it is not evaluated", language)
        del pairs[language]
    if not pairs:
        raise InputError(f"{corpus} has no held-out pairs. {_HELD_OUT_REMEDY}")
    if len(pivots) > 1:
        names = ", ".join(sorted(pivots))
        raise InputError(f"{corpus}/held_out has pairs of several pivots ({names}). {_HELD_OUT_REMEDY}")
    return pivots.pop(), pairs


def _read_pairs(path: Path) -> Pairs:
    try:
        schema = pq.read_schema(outside.check_readable(path))
        if not {"source", "target"} <= set(schema.names) or not _PAIR.fullmatch(path.parent.name):
            raise InputError(
                f"{path} does not have columns source and target of a pair such as en-de. {_HELD_OUT_REMEDY}"
            )
        rows = list(tables.read_text(path, ("source", "target")))
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read ({one_line(error)}). {_HELD_OUT_REMEDY}") from error
    pairs = []
    for number, (source, target) in enumerate(rows, 1):
        if not source or not source.strip() or not target or not target.strip():
            raise InputError(f"{path}: row {number} has an empty side. {_HELD_OUT_REMEDY}")
        pairs.append((str(source), str(target)))
    return pairs

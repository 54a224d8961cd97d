"""Aligned test sets: a folder -> for each language sentences of the pivot and, line by line, their translations.

    LASER's Tatoeba      tatoeba.deu-eng.deu  tatoeba.deu-eng.eng     (Moses: any NAME.xx-yy.xx and NAME.xx-yy.yy)
    XTREME               de-en.de  de-en.en                           refused where its English side is sorted
    a table              en-de.tsv                                    two columns, in the order of the name
    FLORES, NTREX, own   deu_Latn.dev  newstest2019-ref.deu.txt  de.txt     one file a language
    a prepared corpus    held_out/en-de/*.parquet                     columns source and target

Nothing is cleaned here: a set in which line i does not translate line i is refused. Other files may lie beside.
"""

import logging
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from infoxlm_core import languages, outside
from infoxlm_core.corpora import lines, tables
from infoxlm_core.errors import EncodingError, InputError, ParallelMismatch, one_line

logger = logging.getLogger(__name__)

Sides = tuple[list[str], list[str]]  # sentences of the pivot and their translations, as long
_CODE = r"[a-z]{2,3}(?:[-_][A-Z][A-Za-z]{1,3})?"  # de, deu, deu_Latn, zho-CN
_ONE = re.compile(rf"(?:newstest2019-(?:ref|src)\.)?(?P<code>{_CODE})\.(?:txt|dev|devtest|test)")
_PAIR = re.compile("[a-z]{2,3}-[a-z]{2,3}")
_TWO = re.compile(rf"(?P<pair>(?:.+\.)?(?P<a>{_CODE})-(?P<b>{_CODE}))\.(?P<side>{_CODE})")
_LAYOUTS = "NAME.de-en.de and NAME.de-en.en, en-de.tsv, de.txt and en.txt, or held_out/en-de/*.parquet"
SORTED_LINES = 20  # so many lines do not lie in the order of the alphabet by chance


def read_aligned(folder: Path, pivot: str, wanted: str | Iterable[str] = "all") -> dict[str, Sides]:
    """Read an aligned set, its languages (see `languages.choose`) sorted as the paper's; codes are those of the files.

    Raises:
        InputError: there is no such set, or a language is missing, or a line is empty.
        ParallelMismatch: two sides have different numbers of lines.
        EncodingError: a file is not UTF-8.
    """
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder: give one with {_LAYOUTS}")
    if (folder / "held_out").is_dir():
        own, rows = read_held_out(folder)
        if languages.two_letters(own) != languages.two_letters(pivot):
            raise InputError(f"{folder}/held_out has pairs of {own}, not of the pivot {pivot}: give pivot {own}")
        return {code: _unzip(rows[code]) for code in languages.choose(rows, wanted, f"{folder}/held_out")}
    files = sorted(path for path in folder.iterdir() if path.is_file())
    found = _find_pairs(files, pivot) or _find_single(files, pivot, folder)
    if not found:
        raise InputError(f"{folder} holds no aligned files of {pivot} and another language: give {_LAYOUTS}")
    return {code: found[code]() for code in languages.choose(found, wanted, str(folder))}


def is_named(path: Path) -> bool:
    """Whether a file's name is that of a part of a set; others may lie beside, such as a licence."""
    return bool(_ONE.fullmatch(path.name) or _TWO.fullmatch(path.name))


def _is(code: str, language: str) -> bool:
    return languages.two_letters(code) == languages.two_letters(language)


def _find_pairs(files: list[Path], pivot: str) -> dict[str, Callable[[], Sides]]:
    """How to read each language from tables, or from files of two sides, that name a pair with the pivot."""
    found: dict[str, tuple[Path, Callable[[], Sides]]] = {}
    for path in files:
        match = _TWO.fullmatch(path.name)
        if not match or _is(match["a"], pivot) == _is(match["b"], pivot):
            continue
        own, other = sorted((match["a"], match["b"]), key=lambda code: not _is(code, pivot))
        if match["side"] == "tsv":
            reader = partial(_read_table, path, own == match["b"])
        elif match["side"] in (own, other):
            mine, theirs = (path.with_name(f"{match['pair']}.{code}") for code in (own, other))
            for side in (mine, theirs):
                if not side.is_file():
                    raise InputError(f"{path} has no {side.name} beside it: give both sides")
            if path == mine:
                continue
            reader = partial(_read_sides, mine, theirs, match["pair"] == f"{other}-{own}")  # XTREME's names
        else:
            continue
        if other in found:
            _refuse_twice(other, found[other][0], path)
        found[other] = path, reader
    return {code: reader for code, (_, reader) in found.items()}


def _refuse_twice(code: str, first: Path, second: Path) -> None:
    raise InputError(f"{first.parent} holds {code} twice ({first.name}, {second.name}): keep one set a folder")


def _find_single(files: list[Path], pivot: str, folder: Path) -> dict[str, Callable[[], Sides]]:
    """How to read each language from its own file, beside the pivot's."""
    by_code: dict[str, Path] = {}
    for path in files:
        if match := _ONE.fullmatch(path.name):
            if match["code"] in by_code:
                _refuse_twice(match["code"], by_code[match["code"]], path)
            by_code[match["code"]] = path
    if not by_code:
        return {}
    (own,) = languages.choose(by_code, [pivot], str(folder))
    sentences = _read_lines(by_code[own])  # once for all: equal sides are embedded once
    return {
        code: partial(_read_sides, by_code[own], path, False, sentences)
        for code, path in by_code.items()
        if not _is(code, pivot)
    }


def _read_sides(own: Path, other: Path, hidden: bool, sentences: list[str] | None = None) -> Sides:
    """Lines of two files; `hidden` says that the order of the pivot's may have been destroyed on purpose."""
    sentences, translations = sentences or _read_lines(own), _read_lines(other)
    if len(sentences) != len(translations):
        raise ParallelMismatch(
            f"{own} has {len(sentences)} lines, {other} {len(translations)}: line i must translate line i"
        )
    bare = [sentence.strip() for sentence in sentences]
    if hidden and len(bare) >= SORTED_LINES and bare == sorted(bare):
        raise ParallelMismatch(
            f"{own} is in the order of the alphabet, as XTREME hides which line translates which: give LASER's "
            "files (data/tatoeba/v1)"
        )
    return sentences, translations


def _read_lines(path: Path) -> list[str]:
    """Sentences of a file, none of them empty."""
    found = []
    for number, text, reason in lines.read(path):
        if reason == "invalid_utf8":  # then the text says where
            raise EncodingError(f"{text}: not UTF-8 from this byte on: convert the file")
        if reason or not text.strip():
            raise InputError(f"{path}:{number} is {'too long' if reason else 'empty'}: give one sentence a line")
        found.append(text)
    if not found:
        raise InputError(f"{path} is empty: give one sentence a line")
    return found


def _read_table(path: Path, swapped: bool) -> Sides:
    """Two columns divided by a tab; `swapped`: the pivot's is the second."""
    rows = [tuple(line.split("\t")) for line in _read_lines(path)]
    for number, cells in enumerate(rows, 1):
        if len(cells) != 2 or not all(cell.strip() for cell in cells):
            raise InputError(f"{path}:{number} is not two sentences divided by one tab: {' | '.join(cells)!r:.100}")
    first, second = _unzip(rows)
    return (second, first) if swapped else (first, second)


def _unzip(rows: Sequence[tuple[str, ...]]) -> Sides:
    first, second = zip(*rows, strict=True)
    return list(first), list(second)


def read_held_out(corpus: Path) -> tuple[str, dict[str, list[tuple[str, str]]]]:
    """Read the pivot of a prepared corpus and, by language, its held-out pairs (pivot sentence, its translation).

    Raises:
        InputError: there are none, or a file is not what we write.
    """
    remedy = "give a prepared corpus with held_out/en-xx/NAME.parquet"
    rows: dict[str, list[tuple[str, str]]] = {}
    pivots = set()
    for path in sorted((corpus / "held_out").glob("*/*.parquet")):
        pivot, dash, language = path.parent.name.partition("-")
        try:
            schema = pq.read_schema(outside.look(path))
            if not dash or not {"source", "target"} <= set(schema.names) or not _PAIR.fullmatch(path.parent.name):
                raise InputError(f"{path} does not hold columns source and target of a pair such as en-de: {remedy}")
            pairs = list(tables.read_text(path, ("source", "target")))
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise InputError(f"{path} cannot be read ({one_line(error)}): {remedy}") from error
        if empty := next((n for n, pair in enumerate(pairs, 1) if not all(side and side.strip() for side in pair)), 0):
            raise InputError(f"{path}: row {empty} lacks a side: {remedy}")
        pivots.add(pivot)
        rows.setdefault(language, []).extend((str(source), str(target)) for source, target in pairs)
    for language in [language for language, pairs in rows.items() if not pairs]:
        logger.warning("no held-out pairs of %s: not evaluated", language)
        del rows[language]
    if not rows:
        raise InputError(f"{corpus} has no held-out pairs: {remedy}")
    if len(pivots) > 1:
        raise InputError(f"{corpus}/held_out has pairs of several pivots ({', '.join(sorted(pivots))}): {remedy}")
    return pivots.pop(), rows

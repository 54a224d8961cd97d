"""Read directories of aligned sentences: sentences in the pivot language, and their translations into each language.

    LASER's Tatoeba      tatoeba.deu-eng.deu  tatoeba.deu-eng.eng     (Moses: any NAME.xx-yy.xx and NAME.xx-yy.yy)
    XTREME               de-en.de  de-en.en                           rejected if the English side is sorted
    a table              en-de.tsv                                    two columns in the order of the name
    FLORES, NTREX, own   deu_Latn.dev  newstest2019-ref.deu.txt  de.txt     one file per language
    a prepared corpus    held_out/en-de/*.parquet                     columns source and target

Line i of a file must translate line i of the pivot's file. All lines are read unchanged, and other files are ignored.
"""

import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from infoxlm_core import languages, user_files
from infoxlm_core.corpora import evaluation_sets, lines, tables
from infoxlm_core.errors import InputError, ParallelMismatch, one_line

logger = logging.getLogger(__name__)

AlignedSentences = tuple[list[str], list[str]]  # (pivot sentences, translations)
Pairs = list[tuple[str, str]]  # (pivot sentence, translation)
_CODE = r"[a-z]{2,3}(?:[-_][A-Z][A-Za-z]{1,3})?"  # de, deu, deu_Latn, zho-CN
_SINGLE_FILE = re.compile(rf"(?:newstest2019-(?:ref|src)\.)?(?P<code>{_CODE})\.(?:txt|dev|devtest|test)")
_LANGUAGE_PAIR = re.compile("[a-z]{2,3}-[a-z]{2,3}")
_PAIR_FILE = re.compile(rf"(?P<pair>(?:.+\.)?(?P<first>{_CODE})-(?P<second>{_CODE}))\.(?P<extension>{_CODE})")
_XTREME_PIVOT_FILE = re.compile(rf"{_CODE}-(?P<pivot>{_CODE})\.(?P=pivot)")  # XTREME names the pivot last
_LAYOUTS = "NAME.de-en.de and NAME.de-en.en, en-de.tsv, de.txt and en.txt, or held_out/en-de/*.parquet"
_HELD_OUT_REMEDY = "Give a prepared corpus with held_out/en-xx/NAME.parquet."
SORTED_LINES = 20  # number of lines that cannot be in alphabetical order by chance


def read_aligned(directory: Path, pivot: str, requested: str | Iterable[str] = "all") -> dict[str, AlignedSentences]:
    """Read a directory of aligned sentences.

    Args:
        directory: directory in one of the layouts that the module's docstring lists.
        pivot: language with which all other languages are aligned.
        requested: languages to read; see `languages.choose_codes`.

    Returns:
        Mapping from the language codes in the file names to sentences, in the order of InfoXLM's tables.

    Raises:
        InputError: the directory has no aligned files, a language is missing, or a line is empty.
        ParallelMismatch: two aligned files have different numbers of lines.
        EncodingError: a file is not UTF-8.
    """
    if not directory.is_dir():
        raise InputError(f"{directory}: no such directory. Give one with {_LAYOUTS}.")
    if (directory / "held_out").is_dir():
        return _read_prepared_corpus(directory, pivot, requested)
    files = sorted(path for path in directory.iterdir() if path.is_file())
    files_by_code = _find_pair_files(files, pivot) or _find_single_files(files, pivot, directory)
    if not files_by_code:
        raise InputError(f"{directory} has no aligned files of {pivot} and another language. Give {_LAYOUTS}.")
    # Files may be large, so read only the files of the requested languages.
    selected_codes = languages.choose_codes(files_by_code, requested, str(directory))
    return {code: files_by_code[code].read() for code in selected_codes}


def _read_prepared_corpus(corpus: Path, pivot: str, requested: str | Iterable[str]) -> dict[str, AlignedSentences]:
    """Read a prepared corpus's held-out pairs by language. Raise InputError if the corpus has a different pivot."""
    corpus_pivot, pairs_by_language = read_held_out(corpus)
    if not _is_same_language(corpus_pivot, pivot):
        raise InputError(f"{corpus}/held_out has pairs of {corpus_pivot}, not of {pivot}. Set pivot: {corpus_pivot}.")
    sentences_by_language = {}
    for language in languages.choose_codes(pairs_by_language, requested, f"{corpus}/held_out"):
        pairs = pairs_by_language[language]
        sentences_by_language[language] = ([source for source, _ in pairs], [target for _, target in pairs])
    return sentences_by_language


def list_test_files(data: Path) -> list[Path]:
    """List the files of an aligned test set, or the held-out files of a prepared corpus."""
    if (data / "held_out").is_dir():
        return evaluation_sets.list_files(data / "held_out")
    files = sorted(path for path in data.iterdir() if path.is_file())
    return [file for file in files if _SINGLE_FILE.fullmatch(file.name) or _PAIR_FILE.fullmatch(file.name)]


def _is_same_language(code: str, language: str) -> bool:
    """Return whether two codes, such as deu_Latn and de, mean the same language."""
    return languages.two_letters(code) == languages.two_letters(language)


@dataclass(frozen=True)
class _SentenceTable:
    """A file with two columns: sentences in the pivot language, and their translations."""

    path: Path
    pivot_column: int  # 0 or 1

    def read(self) -> AlignedSentences:
        """Read both columns. Raise InputError if a line does not have exactly two sentences."""
        sentences = []
        translations = []
        for line_number, line in enumerate(_read_lines(self.path), 1):
            cells = line.split("\t")
            if len(cells) != 2 or not all(cell.strip() for cell in cells):
                raise InputError(
                    f"{self.path}:{line_number} is not two sentences separated by one tab: {' | '.join(cells)!r:.100}"
                )
            sentences.append(cells[self.pivot_column])
            translations.append(cells[1 - self.pivot_column])
        return sentences, translations


@dataclass(frozen=True)
class _SentenceFiles:
    """A pair of files, in which line i of `path` translates line i of `pivot_path`."""

    path: Path
    pivot_path: Path

    def read(self) -> AlignedSentences:
        """Read both files. Raise ParallelMismatch if their lines cannot be translations of each other."""
        sentences = _read_lines(self.pivot_path)
        translations = _read_lines(self.path)
        if len(sentences) != len(translations):
            raise ParallelMismatch(
                f"{self.pivot_path} has {len(sentences)} lines, {self.path} {len(translations)}. "
                "Line i must translate line i."
            )
        if _XTREME_PIVOT_FILE.fullmatch(self.pivot_path.name) and _is_sorted(sentences):
            raise ParallelMismatch(
                f"{self.pivot_path} is in alphabetical order, because XTREME hides which lines translate each other. "
                "Give LASER's files (data/tatoeba/v1)."
            )
        return sentences, translations


_FilesByCode = dict[str, _SentenceTable | _SentenceFiles]  # language code -> files with the language's sentences


def _is_sorted(sentences: Sequence[str]) -> bool:
    """Return whether at least `SORTED_LINES` sentences are in alphabetical order."""
    stripped_sentences = [sentence.strip() for sentence in sentences]
    return len(sentences) >= SORTED_LINES and stripped_sentences == sorted(stripped_sentences)


def _find_pair_files(files: Sequence[Path], pivot: str) -> _FilesByCode:
    """Find the files that are named after a language pair with the pivot, such as x.de-en.de and en-fr.tsv."""
    files_by_code: _FilesByCode = {}
    for path in files:
        name = _PAIR_FILE.fullmatch(path.name)
        if not name:
            continue
        codes = [name["first"], name["second"]]
        is_pivot = [_is_same_language(code, pivot) for code in codes]
        if is_pivot.count(True) != 1:  # neither code is the pivot, or both are variants of the pivot
            continue
        pivot_column = is_pivot.index(True)
        pivot_code = codes[pivot_column]
        code = codes[1 - pivot_column]
        if name["extension"] == "tsv":
            _add_files(files_by_code, code, _SentenceTable(path, pivot_column))
        elif name["extension"] == pivot_code:  # the pair is added when its other file is visited
            _check_exists(path.with_name(f"{name['pair']}.{code}"), path)
        elif name["extension"] == code:
            pivot_path = path.with_name(f"{name['pair']}.{pivot_code}")
            _check_exists(pivot_path, path)
            _add_files(files_by_code, code, _SentenceFiles(path, pivot_path))
    return files_by_code


def _find_single_files(files: Sequence[Path], pivot: str, directory: Path) -> _FilesByCode:
    """Find the files that are named after a single language, such as de.txt. Pair each file with the pivot's file."""
    paths_by_code: dict[str, Path] = {}
    for path in files:
        name = _SINGLE_FILE.fullmatch(path.name)
        if not name:
            continue
        code = name["code"]
        if code in paths_by_code:
            raise _duplicate_error(code, paths_by_code[code], path)
        paths_by_code[code] = path
    if not paths_by_code:
        return {}
    [pivot_code] = languages.choose_codes(paths_by_code, [pivot], str(directory))
    pivot_path = paths_by_code[pivot_code]
    other_paths = {code: path for code, path in paths_by_code.items() if not _is_same_language(code, pivot)}
    return {code: _SentenceFiles(path, pivot_path) for code, path in other_paths.items()}


def _add_files(files_by_code: _FilesByCode, code: str, added: _SentenceTable | _SentenceFiles) -> None:
    """Add a language's files. Raise InputError if the directory has a second set of files for the language."""
    if code in files_by_code:
        raise _duplicate_error(code, files_by_code[code].path, added.path)
    files_by_code[code] = added


def _duplicate_error(code: str, path: Path, other_path: Path) -> InputError:
    """Return the error for a directory with two files of the same language."""
    return InputError(f"{path.parent} has {code} twice ({path.name}, {other_path.name}). Keep one set per directory.")


def _check_exists(path: Path, other_path: Path) -> None:
    """Raise InputError if `path`, the counterpart of `other_path`, is missing."""
    if not path.is_file():
        raise InputError(f"{other_path}: {path.name} is missing beside it. Give both files.")


def _read_lines(path: Path) -> list[str]:
    """Read one sentence per line. Raise InputError if a line or the file is empty."""
    sentences = []
    for line_number, text in enumerate(lines.read_valid_texts(path), 1):
        if not text.strip():
            raise InputError(f"{path}:{line_number} is empty. Give one sentence per line.")
        sentences.append(text)
    if not sentences:
        raise InputError(f"{path} is empty. Give one sentence per line.")
    return sentences


def read_held_out(corpus: Path) -> tuple[str, dict[str, Pairs]]:
    """Read a prepared corpus's held-out pairs.

    Returns:
        The pivot language, and a mapping from each other language to its pairs.

    Raises:
        InputError: the corpus has no held-out pairs, or a file was not written by `prepare_corpus`.
    """
    pairs_by_language: dict[str, Pairs] = {}
    pivots = set()
    for path in sorted((corpus / "held_out").glob("*/*.parquet")):
        pivot, _, language = path.parent.name.partition("-")
        pivots.add(pivot)
        pairs_by_language.setdefault(language, []).extend(_read_pairs(path))
    empty_languages = [language for language, pairs in pairs_by_language.items() if not pairs]
    for language in empty_languages:
        logger.warning("no held-out pairs of %s: it is not evaluated", language)
        del pairs_by_language[language]
    if not pairs_by_language:
        raise InputError(f"{corpus} has no held-out pairs. {_HELD_OUT_REMEDY}")
    if len(pivots) > 1:
        names = ", ".join(sorted(pivots))
        raise InputError(f"{corpus}/held_out has pairs of several pivots ({names}). {_HELD_OUT_REMEDY}")
    return pivots.pop(), pairs_by_language


def _read_pairs(path: Path) -> Pairs:
    """Read the pairs of one held-out file. Raise InputError if the source or target of a pair is empty."""
    pairs = []
    for row_number, (source, target) in enumerate(_read_source_and_target(path), 1):
        if not source or not source.strip() or not target or not target.strip():
            raise InputError(f"{path}: row {row_number} has no source or no target text. {_HELD_OUT_REMEDY}")
        pairs.append((str(source), str(target)))
    return pairs


def _read_source_and_target(path: Path) -> list[tuple[str | None, ...]]:
    """Read the columns source and target of a Parquet file in a directory named like en-de."""
    try:
        schema = pq.read_schema(user_files.check_readable(path))
        has_columns = {"source", "target"} <= set(schema.names)
        if not has_columns or not _LANGUAGE_PAIR.fullmatch(path.parent.name):
            raise InputError(
                f"{path} must have the columns source and target, in a directory such as en-de. {_HELD_OUT_REMEDY}"
            )
        return list(tables.read_text_columns(path, ("source", "target")))
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read ({one_line(error)}). {_HELD_OUT_REMEDY}") from error

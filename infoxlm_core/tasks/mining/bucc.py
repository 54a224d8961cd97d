"""Read sets in the layout of BUCC 2018: two lists of sentences with ids, and the gold translation pairs.

NAME.de      de-000000001<tab>Ein Satz.
NAME.en      en-000000001<tab>A sentence.
NAME.gold    de-000000001<tab>en-000000001
"""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from infoxlm_core import languages
from infoxlm_core.corpora import lines
from infoxlm_core.errors import InputError

GOLD = ".gold"


class NumberedSentences(NamedTuple):
    """The sentences of one language with their ids, in file order."""

    ids: list[str]
    texts: list[str]


class MiningSet(NamedTuple):
    """Sentences in two languages, and the pairs that translate each other."""

    sources: NumberedSentences  # in the other language
    targets: NumberedSentences  # in the pivot language
    gold: frozenset[tuple[int, int]]  # pairs (source row, target row)


class SetFiles(NamedTuple):
    """The files of a mining set."""

    sources: Path
    targets: Path
    gold: Path


def find_sets(directory: Path, pivot: str, name: str = "") -> dict[str, SetFiles]:
    """Find the files of every set (NAME.gold, …) whose NAME contains `name`. Return them by source language.

    Raises:
        InputError: the directory has no such set, a file is missing, or two sets have the same language.
    """
    if not directory.is_dir():
        raise InputError(f"{directory}: no such directory. Give one with NAME.de, NAME.en and NAME.gold.")
    files = sorted(directory.iterdir())
    sets: dict[str, SetFiles] = {}
    for gold in files:
        if gold.suffix != GOLD or name not in gold.stem:
            continue
        file_of_language = _find_sentence_files(gold, files)
        if len(file_of_language) != 2 or pivot not in file_of_language:
            raise InputError(f"{gold}: put {gold.stem}.{pivot} and the file of one other language beside it")
        language = next(code for code in file_of_language if code != pivot)
        if language in sets:
            names = f"{sets[language].gold.name}, {gold.name}"
            raise InputError(f"{directory} has two sets of {language} ({names}): set name to a part of only one NAME")
        sets[language] = SetFiles(file_of_language[language], file_of_language[pivot], gold)
    if not sets:
        raise InputError(
            f"{directory} has no {GOLD} file with {name!r} in its name. Give NAME.de, NAME.en and NAME.gold."
        )
    return sets


def _find_sentence_files(gold: Path, files: Iterable[Path]) -> dict[str, Path]:
    """Return a mapping from language to the sentence file with the gold file's NAME."""
    file_of_language = {}
    for path in files:
        code = path.suffix.removeprefix(".")
        if path.stem == gold.stem and languages.is_known(code):
            file_of_language[languages.two_letters(code)] = path
    return file_of_language


def read_set(files: SetFiles) -> MiningSet:
    """Read a set. Raise InputError if a line is damaged, or the gold file contains an unknown sentence id."""
    sources = _read_sentences(files.sources)
    targets = _read_sentences(files.targets)
    row_of_source = {sentence_id: row for row, sentence_id in enumerate(sources.ids)}
    row_of_target = {sentence_id: row for row, sentence_id in enumerate(targets.ids)}
    gold = set()
    for line_number, (first_id, second_id) in enumerate(_read_two_columns(files.gold), 1):
        if first_id in row_of_source and second_id in row_of_target:
            gold.add((row_of_source[first_id], row_of_target[second_id]))
        elif second_id in row_of_source and first_id in row_of_target:  # some gold files list the pivot first
            gold.add((row_of_source[second_id], row_of_target[first_id]))
        else:
            raise InputError(
                f"{files.gold}:{line_number}: no sentences {first_id!r:.60} and {second_id!r:.60} in the set's files"
            )
    return MiningSet(sources, targets, frozenset(gold))


def _read_sentences(path: Path) -> NumberedSentences:
    """Read the sentences and ids of one language. Raise InputError for a single sentence and for a repeated id."""
    rows = _read_two_columns(path)
    if len(rows) < 2:  # matching removes one neighbour of each sentence
        raise InputError(f"{path} has a single sentence. Give the complete file.")
    sentence_id, count = Counter(sentence_id for sentence_id, _ in rows).most_common(1)[0]
    if count > 1:
        raise InputError(f"{path}: {count} sentences have the id {sentence_id!r:.60}. Make ids unique.")
    return NumberedSentences([sentence_id for sentence_id, _ in rows], [text for _, text in rows])


def _read_two_columns(path: Path) -> list[tuple[str, str]]:
    """Read lines of two tab-separated columns. Raise InputError if a column is missing or the file is empty."""
    rows = []
    for line_number, line in enumerate(lines.read_valid_texts(path), 1):
        first_column, _, second_column = line.partition("\t")
        if not first_column or not second_column:
            raise InputError(f"{path}:{line_number} is not two columns separated by a tab: {line!r:.100}")
        rows.append((first_column, second_column))
    if not rows:
        raise InputError(f"{path} is empty. Give the complete file.")
    return rows

"""Read files of sentences with tagged words, in one of two layouts:

train-en.tsv  dev-en.tsv  test-de.tsv      XTREME: a word, a tab and its tag per line; blank lines between sentences
en/train  en/dev  de/test                  WikiANN: the same; words may begin with their language (`en:Berlin`)
"""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from infoxlm_core import user_files
from infoxlm_core.errors import CorpusTooSmall, EncodingError, InputError
from infoxlm_core.languages import is_known, two_letters
from infoxlm_core.tasks.named_entities.task import NamedEntitiesConfig
from infoxlm_core.tasks.task import SPLITS

_NAME = re.compile(rf"(?:.*[._-])?(?P<split>{'|'.join(SPLITS)})-(?P<language>[a-z]{{2,3}})(?:\.\w+)?")
_TAG = re.compile(r"O|[BI]-\S+")
_LANGUAGE_PREFIX = re.compile(r"[a-z]{2,3}(?:-[a-z-]+)?:(?=.)")
LAYOUT = "Give XTREME's files (train-en.tsv, test-de.tsv) or WikiANN's (en/train, de/test)."


class TaggedFile(NamedTuple):
    """A file with the split and the language that its name contains."""

    path: Path
    split: str
    language: str


class Sentence(NamedTuple):
    """Words and their tags."""

    words: tuple[str, ...]
    tags: tuple[str, ...]


Sets = dict[str, dict[str, list[Sentence]]]  # split -> language -> sentences


def find_tagged_files(path: Path) -> list[TaggedFile]:
    """Return the file itself, or the files of a folder, if split and language are in their names.

    WikiANN's files have the language in the name of their folder.
    """
    if not path.exists():
        raise InputError(f"{path}: no such file or folder. {LAYOUT}")
    candidates = [path] if path.is_file() else [file for file in user_files.list_tree(path) if file.is_file()]
    files = []
    for file in candidates:
        name = _NAME.fullmatch(file.name)
        if name:
            files.append(TaggedFile(file, SPLITS[name["split"]], two_letters(name["language"])))
        elif file.stem in SPLITS and is_known(file.parent.name):
            files.append(TaggedFile(file, SPLITS[file.stem], two_letters(file.parent.name)))
    if not files:
        raise InputError(f"{path}: no file name contains a split and a language. {LAYOUT}")
    return files


def list_files(settings: NamedEntitiesConfig) -> list[TaggedFile]:
    """Return the files of all splits and languages that the settings name."""
    paths = [settings.data] if isinstance(settings.data, str) else settings.data
    return [file for path in paths for file in find_tagged_files(Path(path))]


def read_tagged(settings: NamedEntitiesConfig, splits: Iterable[str] = ("train", "dev", "test")) -> Sets:
    """Read the sentences of some splits. Training text in other languages than `train_languages` is not read.

    Raises:
        InputError: a file is missing or not readable, two files have the same split and language, or a line is not a
            word and its tag.
    """
    sets: Sets = {split: {} for split in splits}
    train_languages = {two_letters(language) for language in settings.train_languages}
    paths: dict[tuple[str, str], Path] = {}
    for path, split, language in list_files(settings):
        if split not in sets or (split == "train" and language not in train_languages):
            continue
        if (split, language) in paths:
            raise InputError(
                f"{paths[split, language]} and {path} both have {split} sentences in {language}. Keep one."
            )
        paths[split, language] = path
        sets[split][language] = _read_sentences(path)
    return sets


def _read_sentences(path: Path) -> list[Sentence]:
    """Read the sentences of one file, in which blank lines separate them."""
    sentences: list[Sentence] = []
    language_prefix: str | None = None  # of all words of the file; unknown before the first word
    words: list[str] = []
    tags: list[str] = []
    for line_number, line in enumerate(_read_lines(path), 1):
        if line.strip():
            word, _, tag = line.partition("\t")
            if not _TAG.fullmatch(tag):
                raise InputError(f"{path}:{line_number}: {line!r:.80} is not a word, a tab and O, B-… or I-….")
            if language_prefix is None:
                language_prefix = _find_language_prefix(word)
            words.append(word.removeprefix(language_prefix))
            tags.append(tag)
        elif words:
            sentences.append(Sentence(tuple(words), tuple(tags)))
            words = []
            tags = []
    if words:  # the last sentence needs no blank line after it
        sentences.append(Sentence(tuple(words), tuple(tags)))
    return sentences


def _read_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a file without line ends. Only a line feed ends a line. Raise EncodingError if not UTF-8."""
    try:
        with path.open(encoding="utf-8-sig", newline="\n") as file:
            for line in file:
                yield line.rstrip("\r\n")
    except UnicodeDecodeError:
        raise EncodingError(f"{path}: not UTF-8. Convert the file.") from None


def _find_language_prefix(word: str) -> str:
    """Return the prefix such as `en:` of WikiANN's words, or "" if the word has none."""
    match = _LANGUAGE_PREFIX.match(word)
    if match and is_known(match[0][:2]):
        return match[0]
    return ""


def list_labels(settings: NamedEntitiesConfig, sets: Sets) -> tuple[str, ...]:
    """Return the sorted tags of the training text. Raise CorpusTooSmall if it has fewer than two."""
    labels: set[str] = set()
    for sentences in sets["train"].values():
        for sentence in sentences:
            labels.update(sentence.tags)
    if len(labels) < 2:
        languages = ", ".join(settings.train_languages)
        raise CorpusTooSmall(
            f"{name_data(settings)}: train sentences in {languages} have the tags {sorted(labels)}, but training needs "
            "two tags: set train_languages to languages of the data"
        )
    return tuple(sorted(labels))


def name_data(settings: NamedEntitiesConfig) -> str:
    """Return the configured paths as text for messages."""
    return settings.data if isinstance(settings.data, str) else ", ".join(settings.data)

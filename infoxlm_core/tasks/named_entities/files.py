"""Read sentences with tagged words from files in one of two layouts:

train-en.tsv  dev-en.tsv  test-de.tsv      XTREME: a word, a tab and a tag per line; blank lines between sentences
en/train  en/dev  de/test                  WikiANN: the same lines, with an optional language prefix (`en:Berlin`)
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
TAG = re.compile(r"O|[BI]-\S+")
_LANGUAGE_PREFIX = re.compile(r"[a-z]{2,3}(?:-[a-z-]+)?:(?=.)")
LAYOUT = "Give XTREME's files (train-en.tsv, test-de.tsv) or WikiANN's (en/train, de/test)."


class TaggedFile(NamedTuple):
    """A tagged file, with the split and language in its name."""

    path: Path
    split: str
    language: str


class Sentence(NamedTuple):
    """The words of a sentence and their tags."""

    words: tuple[str, ...]
    tags: tuple[str, ...]


Sets = dict[str, dict[str, list[Sentence]]]  # split -> language -> sentences


def find_tagged_files(path: Path) -> list[TaggedFile]:
    """Find tagged files: the path itself or, in a directory, every file whose name has a split and a language.

    In WikiANN's layout, the language is the name of the file's directory instead.
    """
    if not path.exists():
        raise InputError(f"{path}: no such file or directory. {LAYOUT}")
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
    """List the configured files of all splits and languages."""
    paths = [settings.data] if isinstance(settings.data, str) else settings.data
    return [file for path in paths for file in find_tagged_files(Path(path))]


def read_tagged(settings: NamedEntitiesConfig, splits: Iterable[str] = ("train", "dev", "test")) -> Sets:
    """Read the sentences of the given splits. Read training text only in `train_languages`.

    Raises:
        InputError: a file is missing, empty or not readable, two files have the same split and language, or a line is
            not a word and a tag.
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
    """Read the sentences of one file. Blank lines separate sentences. Raise InputError if there are none."""
    sentences: list[Sentence] = []
    # WikiANN writes a prefix such as `en:` before every word of a file. It is unknown before the first word.
    language_prefix: str | None = None
    words: list[str] = []
    tags: list[str] = []
    for line_number, line in enumerate(_read_lines(path), 1):
        if line.strip():
            word, _, tag = line.partition("\t")
            if not TAG.fullmatch(tag):
                raise InputError(f"{path}:{line_number}: {line!r:.80} is not a word, a tab and O, B-… or I-….")
            if language_prefix is None:
                language_prefix = _find_language_prefix(word)
            words.append(word.removeprefix(language_prefix))
            tags.append(tag)
        elif words:
            sentences.append(Sentence(tuple(words), tuple(tags)))
            words = []
            tags = []
    if words:  # a blank line after the last sentence is optional
        sentences.append(Sentence(tuple(words), tuple(tags)))
    if not sentences:
        raise InputError(f"{path}: the file has no sentences. Remove the file or copy it again.")
    return sentences


def _read_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a UTF-8 file, without line ends. Only a line feed ends a line."""
    try:
        with path.open(encoding="utf-8-sig", newline="\n") as file:
            for line in file:
                yield line.rstrip("\r\n")
    except UnicodeDecodeError:
        raise EncodingError(f"{path}: not UTF-8. Convert the file.") from None


def _find_language_prefix(word: str) -> str:
    """Return a word's language prefix, such as WikiANN's `en:`, or "" if it has none."""
    match = _LANGUAGE_PREFIX.match(word)
    if match and is_known(match[0][:2]):
        return match[0]
    return ""


def list_labels(settings: NamedEntitiesConfig, sets: Sets) -> tuple[str, ...]:
    """Return the sorted tags of the training text. Raise CorpusTooSmall if there are fewer than two."""
    labels = {tag for sentences in sets["train"].values() for sentence in sentences for tag in sentence.tags}
    if len(labels) < 2:
        languages = ", ".join(settings.train_languages)
        raise CorpusTooSmall(
            f"{name_data(settings)}: train sentences in {languages} have the tags {sorted(labels)}, but training needs "
            "two tags: set train_languages to languages in the data"
        )
    return tuple(sorted(labels))


def name_data(settings: NamedEntitiesConfig) -> str:
    """Join the configured paths for a message."""
    return settings.data if isinstance(settings.data, str) else ", ".join(settings.data)

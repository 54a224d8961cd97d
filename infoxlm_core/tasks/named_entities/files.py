"""Files of sentences with tagged words.

train-en.tsv  dev-en.tsv  test-de.tsv      XTREME: one word and its tag a line, a tab between, blank lines between
en/train  en/dev  de/test                  WikiANN: likewise; words may begin with their language (`en:Berlin`)
"""

import re
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from infoxlm_core import outside
from infoxlm_core.errors import CorpusTooSmall, EncodingError, InputError
from infoxlm_core.languages import is_known, two_letters
from infoxlm_core.tasks.named_entities.settings import NamedEntitiesConfig

_SPLITS = {"train": "train", "dev": "dev", "valid": "dev", "validation": "dev", "test": "test"}
_NAME = re.compile(rf"(?:.*[._-])?(?P<split>{'|'.join(_SPLITS)})-(?P<language>[a-z]{{2,3}})(?:\.\w+)?")
_TAG = re.compile(r"O|[BI]-\S+")
LAYOUT = "give XTREME's files (train-en.tsv, test-de.tsv) or WikiANN's (en/train, de/test)"


class Sentence(NamedTuple):
    """Words and their tags."""

    words: tuple[str, ...]
    tags: tuple[str, ...]


Sets = dict[str, dict[str, list[Sentence]]]  # split -> language -> sentences


def read_tagged(settings: NamedEntitiesConfig, splits: Iterable[str] = ("train", "dev", "test")) -> Sets:
    """Read the sentences of some splits; of training text only the languages that are learned.

    Raises:
        InputError: a file is missing, there twice or not readable, or a line is not a word and its tag: file and line.
    """
    sets: Sets = {split: {} for split in splits}
    languages = {two_letters(language) for language in settings.train_languages}
    seen: dict[tuple[str, str], Path] = {}
    for path in [settings.data] if isinstance(settings.data, str) else settings.data:
        for file, split, language in find_files(Path(path)):
            if split not in sets or (split == "train" and language not in languages):
                continue
            if first := seen.get((split, language)):
                raise InputError(f"{first} and {file} are both {split} sentences in {language}: keep one")
            seen[split, language] = file
            sets[split][language] = list(_read(file))
    return sets


def find_files(path: Path) -> Iterator[tuple[Path, str, str]]:
    """Files, and what their names say: split and language."""
    if not path.exists():
        raise InputError(f"{path}: no such file or folder: {LAYOUT}")
    inside = [path] if path.is_file() else [p for p in outside.below(path) if p.is_file()]
    found = []
    for file in inside:
        if match := _NAME.fullmatch(file.name):
            found.append((file, _SPLITS[match["split"]], two_letters(match["language"])))
        elif file.stem in _SPLITS and is_known(file.parent.name):
            found.append((file, _SPLITS[file.stem], two_letters(file.parent.name)))
    if not found:
        raise InputError(f"{path}: no file whose name says split and language: {LAYOUT}")
    yield from found


def _read(path: Path) -> Iterator[Sentence]:
    prefix: str | None = None
    try:
        with path.open(encoding="utf-8-sig", newline="\n") as file:
            lines = ((number, line.rstrip("\r\n")) for number, line in enumerate(file, 1))
            for blank, block in groupby(lines, key=lambda line: not line[1].strip()):
                if blank:
                    continue
                sentence = []
                for number, line in block:
                    word, _, tag = line.partition("\t")
                    if not _TAG.fullmatch(tag):
                        raise InputError(
                            f"{path}:{number}: {line!r:.80} is not a word, a tab and O, B-… or I-…: mend it"
                        )
                    if prefix is None:
                        found = re.match(r"[a-z]{2,3}(?:-[a-z-]+)?:(?=.)", word)
                        prefix = found[0] if found and is_known(found[0][:2]) else ""
                    sentence.append((word.removeprefix(prefix), tag))
                yield Sentence(*zip(*sentence, strict=True))
    except UnicodeDecodeError:
        raise EncodingError(f"{path}: not UTF-8: convert the file") from None


def list_tests(settings: NamedEntitiesConfig) -> list[Path]:
    """The files of test sentences."""
    paths = [settings.data] if isinstance(settings.data, str) else settings.data
    return [file for path in paths for file, split, _ in find_files(Path(path)) if split == "test"]


def list_labels(settings: NamedEntitiesConfig, sets: Sets) -> tuple[str, ...]:
    """Tags of the training text; CorpusTooSmall if there is none, or it has no entity."""
    labels = tuple(sorted({tag for part in sets["train"].values() for sentence in part for tag in sentence.tags}))
    if len(labels) < 2:
        languages = ", ".join(settings.train_languages)
        raise CorpusTooSmall(
            f"{where_of(settings)}: train sentences in {languages} have tags {list(labels)}: need=2 tags"
        )
    return labels


def where_of(settings: NamedEntitiesConfig) -> str:
    return settings.data if isinstance(settings.data, str) else ", ".join(settings.data)

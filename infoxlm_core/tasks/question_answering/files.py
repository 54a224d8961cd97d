"""Find and read questions in the format of SQuAD v1.1, in which SQuAD, MLQA, XQuAD and TyDiQA GoldP are published.

    {"data": [{"paragraphs": [{"context": "Berlin is …", "qas": [
        {"id": "57", "question": "What is …?", "answers": [{"text": "Berlin", "answer_start": 0}]}]}]}]}

The languages are in the name of the file.
"""

import codecs
import logging
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ValidationError

from infoxlm_core import outside
from infoxlm_core.errors import InputError
from infoxlm_core.languages import is_known
from infoxlm_core.tasks.task import SPLITS

logger = logging.getLogger(__name__)
Split = Literal["train", "dev", "test"]
LanguagePair = tuple[str, str]  # language of the paragraphs, language of the questions
# the names of languages in TyDiQA's files
_TYDIQA_NAMES = {
    "arabic": "ar", "bengali": "bn", "english": "en", "finnish": "fi", "indonesian": "id", "japanese": "ja",
    "korean": "ko", "russian": "ru", "swahili": "sw", "telugu": "te", "thai": "th",
}  # fmt: skip


class _Answer(BaseModel):
    text: str
    answer_start: int


class _Question(BaseModel):
    id: str
    question: str
    answers: list[_Answer]
    is_impossible: bool = False


class _Paragraph(BaseModel):
    context: str
    qas: list[_Question]


class _Article(BaseModel):
    paragraphs: list[_Paragraph]


class _File(BaseModel):
    data: list[_Article]


@dataclass(frozen=True)
class Question:
    """A question about a paragraph."""

    id: str
    text: str
    paragraph: int  # index in `QuestionSet.paragraphs`
    answers: tuple[str, ...]  # all equally right
    span: tuple[int, int] | None  # first character, and the one after the last, of the first answer at its place


@dataclass(frozen=True)
class QuestionSet:
    """The questions of one file."""

    path: Path
    languages: LanguagePair
    paragraphs: tuple[str, ...]
    questions: tuple[Question, ...]


def read_training(paths: Sequence[str]) -> list[QuestionSet]:
    """Read training files, without questions whose answer is not at its `answer_start`. Ids may repeat, as TyDiQA's do.

    Raises:
        InputError: no question is left, or a file is not readable.
    """
    sets = []
    for path in list_files(paths, "train"):
        questions = read_squad(path)
        usable = tuple(question for question in questions.questions if question.span)
        lost = len(questions.questions) - len(usable)
        if lost:
            logger.warning("%s: %d answers are not at their answer_start: their questions are left out", path, lost)
        if usable:
            sets.append(replace(questions, questions=usable))
    if not sets:
        raise InputError(f"{', '.join(paths)}: no question to train on. Give files in SQuAD's format (train).")
    return sets


def read_sets(paths: Sequence[str], split: Split, mixed: bool = False) -> dict[LanguagePair, QuestionSet]:
    """Read test or development files (see `find_sets`). All questions stay: a score needs only the texts of answers.

    Raises:
        InputError: a file has no question, or two of one id.
    """
    sets = {pair: read_squad(path) for pair, path in find_sets(paths, split, mixed).items()}
    for questions in sets.values():
        if not questions.questions:
            raise InputError(f"{questions.path}: no question. Remove the file or copy it again.")
        ((id_, count),) = Counter(question.id for question in questions.questions).most_common(1)
        if count > 1:
            raise InputError(f"{questions.path}: question {id_}: {count} questions have this id. Make ids unique.")
        lost = sum(question.span is None for question in questions.questions)
        if lost:
            logger.warning(
                "%s: %d answers are not at their answer_start: they are scored by their texts", questions.path, lost
            )
    return sets


def find_sets(paths: Sequence[str], split: Split, mixed: bool = False) -> dict[LanguagePair, Path]:
    """Return the file of each language by file names alone; with `mixed` also those of each pair of languages.

    Raises:
        InputError: two files are of the same languages, or no file is of the expected kind.
    """
    sets: dict[LanguagePair, Path] = {}
    for path in list_files(paths, split):
        pair = languages_of(path)
        if pair in sets:
            names = "-".join(pair)
            raise InputError(f"{sets[pair]} and {path} are both {names}. Give one {split} file per language.")
        if mixed or pair[0] == pair[1]:
            sets[pair] = path
    if not any(context == question for context, question in sets):
        raise InputError(f"{', '.join(paths)}: no file whose questions are in its paragraphs' language ({split}).")
    if mixed and all(context == question for context, question in sets):
        raise InputError(f"{', '.join(paths)}: no file of two languages. Set mixed to false ({split}).")
    return sets


def list_files(paths: Sequence[str], split: Split) -> list[Path]:
    """List the JSON files among paths and directly in folders.

    If names of a folder's files contain the split (MLQA's `test-context-…`), files of other splits are left out.

    Raises:
        InputError: a path is missing, or a folder has no JSON file.
    """
    files: dict[Path, None] = {}  # an ordered set
    for path in map(Path, paths):
        if path.is_dir():
            inside = sorted(file for file in path.iterdir() if file.suffix == ".json")
            if not inside:
                raise InputError(f"{path}: no .json file here. Give the folder that has them ({split}).")
            splits = {file: set(re.split(r"[._-]", file.stem)) & set(SPLITS.values()) for file in inside}
            if any(split in named for named in splits.values()):
                inside = [file for file in inside if not splits[file] or split in splits[file]]
            files |= dict.fromkeys(inside)
        elif path.is_file():
            files[path] = None
        else:
            raise InputError(f"{path}: no such file or folder ({split}).")
    return list(files)


def languages_of(path: Path) -> LanguagePair:
    """Return the languages of paragraphs and questions that a file's name contains; SQuAD's own files are English.

    `test-context-de-question-en.json`, `xquad.de.json`, `tydiqa.goldp.sw.train.json`, `tydiqa-goldp-dev-thai.json`,
    `train-v1.1.json`; of a translated set (`squad.translate.train.en-de.json`) the second.

    Raises:
        InputError: the name contains no language.
    """
    match = re.search(r"context-([a-z]{2,3})-question-([a-z]{2,3})", path.name)
    if match:
        return match[1], match[2]
    words = re.split(r"[._-]", re.sub("^[a-z]+-", "", path.stem))  # `my-squad` is not Burmese
    codes = [_TYDIQA_NAMES.get(word, word) for word in words]
    languages = [code for code in codes if len(code) == 2 and is_known(code)]
    if languages:
        return languages[-1], languages[-1]
    if re.match(r"(?i:(?:train|dev)-v1|squad)", path.name):
        return "en", "en"
    raise InputError(f"{path}: its name contains no language. Call it {path.stem}.de.json if it is German.")


def read_squad(path: Path) -> QuestionSet:
    """Read one file; InputError if it is not in SQuAD's format, or a paragraph or an answer is empty."""
    try:
        content = _File.model_validate_json(outside.check_readable(path).read_bytes().removeprefix(codecs.BOM_UTF8))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}).") from None
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise InputError(f"{path}: {field and field + ': '}{first['msg']}. Give SQuAD's JSON format.") from None
    paragraphs = [paragraph for article in content.data for paragraph in article.paragraphs]
    questions = tuple(
        question for number, paragraph in enumerate(paragraphs) for question in _questions(path, number, paragraph)
    )
    languages = languages_of(path)
    logger.info("%s: %d questions (%s) about %d paragraphs (%s)",
                path, len(questions), languages[1], len(paragraphs), languages[0])  # fmt: skip
    return QuestionSet(path, languages, tuple(paragraph.context for paragraph in paragraphs), questions)


def _questions(path: Path, number: int, paragraph: _Paragraph) -> Iterator[Question]:
    for question in paragraph.qas:
        where = f"{path}: question {question.id}"
        if question.is_impossible or not question.answers:
            raise InputError(f"{where} has no answer. Give sets in which all have one (SQuAD 1.1, not 2.0).")
        if not all(answer.text.strip() for answer in question.answers):
            raise InputError(f"{where} has an empty answer. Give a set whose answers are public.")
        if not paragraph.context.strip():
            raise InputError(f"{where} has an empty paragraph. Fill it or remove the question.")
        spans = [_find_span(paragraph.context, answer) for answer in question.answers]
        answers = tuple(answer.text for answer in question.answers)
        yield Question(question.id, question.question, number, answers, next(filter(None, spans), None))


def _find_span(context: str, answer: _Answer) -> tuple[int, int] | None:
    """Return the characters of an answer without outer spaces; None if it is not at its `answer_start`."""
    start, text = answer.answer_start, answer.text
    if start < 0 or not context.startswith(text, start):
        return None
    start += len(text) - len(text.lstrip())
    return start, start + len(text.strip())

"""Questions about paragraphs in the format of SQuAD v1.1, as SQuAD, MLQA, XQuAD and TyDiQA GoldP are published in.

    {"data": [{"paragraphs": [{"context": "Berlin is …", "qas": [
        {"id": "57", "question": "What is …?", "answers": [{"text": "Berlin", "answer_start": 0}]}]}]}]}

The languages stand in the name of the file. An answer is found by its characters, so a file is read strictly.
"""

import codecs
import logging
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ValidationError

from infoxlm_core import outside
from infoxlm_core.errors import InputError
from infoxlm_core.languages import is_known

logger = logging.getLogger(__name__)
Split = Literal["train", "dev", "test"]
SPLITS = {"train", "dev", "test"}
Cell = tuple[str, str]  # language of the paragraphs, language of the questions
# TyDiQA's own files call their languages so
_NAMES = {
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
    """One question."""

    id: str
    text: str
    paragraph: int  # its place in `QuestionSet.paragraphs`
    answers: tuple[str, ...]  # all equally right
    span: tuple[int, int] | None  # characters of the first answer that stands where the file says, without spaces


@dataclass(frozen=True)
class QuestionSet:
    """The questions of one file."""

    path: Path
    cell: Cell
    paragraphs: tuple[str, ...]
    questions: tuple[Question, ...]


def read_training(paths: Sequence[str]) -> list[QuestionSet]:
    """Read training files; a question whose answer does not stand where the file says is dropped and counted.

    Ids may come again: TyDiQA's do.
    """
    sets = []
    for path in files(paths, "train"):
        found = read_squad(path)
        usable = tuple(question for question in found.questions if question.span)
        if lost := len(found.questions) - len(usable):
            logger.warning("%s: %d answers are not at their answer_start: questions left out", path, lost)
        if usable:
            sets.append(QuestionSet(path, found.cell, found.paragraphs, usable))
    if not sets:
        raise InputError(f"{', '.join(paths)}: no question to train on: give files in SQuAD's format (train)")
    return sets


def read_cells(paths: Sequence[str], split: Split, mixed: bool = False) -> dict[Cell, QuestionSet]:
    """Read test or development files (see `cells`). All questions stay: a score needs only the texts of answers.

    Raises:
        InputError: a file has no question, or two of one id.
    """
    sets = {cell: read_squad(path) for cell, path in cells(paths, split, mixed).items()}
    for found in sets.values():
        if not found.questions:
            raise InputError(f"{found.path}: no question: remove the file or copy it again")
        (most, count), *_ = Counter(question.id for question in found.questions).most_common(1)
        if count > 1:
            raise InputError(f"{found.path}: question {most}: {count} questions have this id: give each its own")
        if lost := sum(question.span is None for question in found.questions):
            logger.warning("%s: %d answers are not at their answer_start: scored by their texts", found.path, lost)
    return sets


def cells(paths: Sequence[str], split: Split, mixed: bool = False) -> dict[Cell, Path]:
    """The file of each language by names alone; of `mixed` sets also those of each pair of languages.

    Raises:
        InputError: two files of the same languages, or none that is wanted.
    """
    found: dict[Cell, Path] = {}
    for path in files(paths, split):
        cell = languages_of(path)
        if cell in found:
            raise InputError(f"{found[cell]} and {path} are both {'-'.join(cell)}: give one {split} file a language")
        if mixed or cell[0] == cell[1]:
            found[cell] = path
    if not any(context == question for context, question in found):
        raise InputError(f"{', '.join(paths)}: no file whose questions are of its paragraphs' language ({split})")
    if mixed and all(context == question for context, question in found):
        raise InputError(f"{', '.join(paths)}: no file of two languages: set mixed to false ({split})")
    return found


def files(paths: Sequence[str], split: Split) -> list[Path]:
    """The JSON files among paths and directly in folders.

    Where files of a folder say in their names that they are of this split (MLQA's `test-context-…`), those of another
    are left out.

    Raises:
        InputError: a path is missing, or a folder has no JSON file.
    """
    chosen = []
    for path in map(Path, paths):
        if path.is_dir():
            inside = sorted(file for file in path.iterdir() if file.suffix == ".json")
            if not inside:
                raise InputError(f"{path}: no .json file here: give the folder that holds them ({split})")
            said = {file: set(re.split(r"[._-]", file.stem)) & SPLITS for file in inside}
            named = any(split in splits for splits in said.values())
            chosen += [file for file in inside if not named or not said[file] or split in said[file]]
        elif path.is_file():
            chosen.append(path)
        else:
            raise InputError(f"{path}: no such file or folder ({split})")
    return list(dict.fromkeys(chosen))


def languages_of(path: Path) -> Cell:
    """Languages of paragraphs and questions by the name of a file; SQuAD's own files are English.

    `test-context-de-question-en.json`, `xquad.de.json`, `tydiqa.goldp.sw.train.json`, `tydiqa-goldp-dev-thai.json`,
    `train-v1.1.json`; of a translated set (`squad.translate.train.en-de.json`) the second.

    Raises:
        InputError: the name says none.
    """
    if both := re.search(r"context-([a-z]{2,3})-question-([a-z]{2,3})", path.name):
        return both[1], both[2]
    words = re.split(r"[._-]", re.sub("^[a-z]+-", "", path.stem))  # `my-squad` is not Burmese
    if known := [code for code in (_NAMES.get(word, word) for word in words) if len(code) == 2 and is_known(code)]:
        return known[-1], known[-1]
    if re.match(r"(?i:(?:train|dev)-v1|squad)", path.name):
        return "en", "en"
    raise InputError(f"{path}: its name says no language: call it {path.stem}.de.json, or whatever it is written in")


def read_squad(path: Path) -> QuestionSet:
    """Read one file; InputError if it is not SQuAD's format, or a paragraph, or an answer, is empty."""
    try:
        content = _File.model_validate_json(outside.check_readable(path).read_bytes().removeprefix(codecs.BOM_UTF8))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise InputError(f"{path}: {where and where + ': '}{first['msg']}: give SQuAD's JSON format") from None
    paragraphs = [paragraph for article in content.data for paragraph in article.paragraphs]
    questions = tuple(
        question for number, paragraph in enumerate(paragraphs) for question in _questions(path, number, paragraph)
    )
    cell = languages_of(path)
    logger.info(
        "%s: %d questions (%s) about %d paragraphs (%s)", path, len(questions), cell[1], len(paragraphs), cell[0]
    )
    return QuestionSet(path, cell, tuple(paragraph.context for paragraph in paragraphs), questions)


def _questions(path: Path, number: int, paragraph: _Paragraph) -> Iterator[Question]:
    for question in paragraph.qas:
        where = f"{path}: question {question.id}"
        if question.is_impossible or not question.answers:
            raise InputError(f"{where} has no answer: give sets in which all have (SQuAD 1.1, not 2.0)")
        if not all(answer.text.strip() for answer in question.answers):
            raise InputError(f"{where} has an empty answer: give a set whose answers are public")
        if not paragraph.context.strip():
            raise InputError(f"{where} has an empty paragraph: fill it or remove the question")
        spans = [_span(paragraph.context, answer) for answer in question.answers]
        answers = tuple(answer.text for answer in question.answers)
        yield Question(question.id, question.question, number, answers, next(filter(None, spans), None))


def _span(context: str, answer: _Answer) -> tuple[int, int] | None:
    start, text = answer.answer_start, answer.text
    if start < 0 or not context.startswith(text, start):
        return None
    start += len(text) - len(text.lstrip())
    return start, start + len(text.strip())

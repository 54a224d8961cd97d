"""Read questions in the format of SQuAD v1.1, which MLQA, XQuAD and TyDiQA GoldP also use.

    {"data": [{"paragraphs": [{"context": "Berlin is …", "qas": [
        {"id": "57", "question": "What is …?", "answers": [{"text": "Berlin", "answer_start": 0}]}]}]}]}

File names contain the languages.
"""

import codecs
import logging
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ValidationError

from infoxlm_core import user_files
from infoxlm_core.errors import InputError
from infoxlm_core.languages import is_known
from infoxlm_core.tasks.task import SPLITS

logger = logging.getLogger(__name__)
Split = Literal["train", "dev", "test"]
LanguagePair = tuple[str, str]  # language of the paragraphs, language of the questions
# Language names in TyDiQA's file names -> language codes
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
    paragraph: int  # index into `QuestionSet.paragraphs`
    answers: tuple[str, ...]  # all correct answers
    span: tuple[int, int] | None  # start and end (exclusive) of the first answer with a correct `answer_start`


@dataclass(frozen=True)
class QuestionSet:
    """The questions of one file."""

    path: Path
    languages: LanguagePair
    paragraphs: tuple[str, ...]
    questions: tuple[Question, ...]


def read_training(paths: Sequence[str]) -> list[QuestionSet]:
    """Read training files. Drop questions without a correct `answer_start`. Unlike in test sets, ids may be repeated.

    Raises:
        InputError: no question remains, or a file is not readable.
    """
    sets = []
    for path in list_files(paths, "train"):
        question_set = read_squad(path)
        usable_questions = tuple(question for question in question_set.questions if question.span)
        num_dropped = len(question_set.questions) - len(usable_questions)
        if num_dropped:
            logger.warning("%s: %d answers are not at answer_start; their questions are dropped", path, num_dropped)
        if usable_questions:
            sets.append(replace(question_set, questions=usable_questions))
    if not sets:
        raise InputError(f"{', '.join(paths)}: no questions to train on. Give files in SQuAD's format (train).")
    return sets


def read_sets(paths: Sequence[str], split: Split, mixed: bool = False) -> dict[LanguagePair, QuestionSet]:
    """Read the test or development files found by `find_sets`.

    Keep questions without a correct `answer_start`, because scores need only the texts of answers.

    Raises:
        InputError: a file has no questions, or has two questions with the same id.
    """
    sets = {pair: read_squad(path) for pair, path in find_sets(paths, split, mixed).items()}
    for question_set in sets.values():
        path = question_set.path
        questions = question_set.questions
        if not questions:
            raise InputError(f"{path}: the file has no questions. Remove the file or copy it again.")
        question_id, count = Counter(question.id for question in questions).most_common(1)[0]
        if count > 1:
            raise InputError(f"{path}: {count} questions have the id {question_id}. Make ids unique.")
        num_without_span = sum(question.span is None for question in questions)
        if num_without_span:
            logger.warning(
                "%s: %d answers are not at answer_start; only their texts are used for scores", path, num_without_span
            )
    return sets


def find_sets(paths: Sequence[str], split: Split, mixed: bool = False) -> dict[LanguagePair, Path]:
    """Return a mapping from language pair to file, according to the file names.

    Include files with different languages for paragraphs and questions only if `mixed` is true.

    Raises:
        InputError: two files have the same language pair, no file has paragraphs and questions in the same language, or
            `mixed` is true and no file in two languages contains the language of such a file.
    """
    path_by_pair: dict[LanguagePair, Path] = {}
    for path in list_files(paths, split):
        pair = parse_languages(path)
        paragraph_language, question_language = pair
        if pair in path_by_pair:
            raise InputError(
                f"{path_by_pair[pair]} and {path} are both {'-'.join(pair)}. Give one {split} file per language."
            )
        if mixed or paragraph_language == question_language:
            path_by_pair[pair] = path
    # The main scores are those of files in one language. Files in two languages only give additional scores.
    languages = {context for context, question in path_by_pair if context == question}
    if not languages:
        raise InputError(f"{', '.join(paths)}: no file has questions in the language of its paragraphs ({split}).")
    # The score across languages is a mean over the languages that also have a file of their own.
    if mixed and not any(context != question and languages & {context, question} for context, question in path_by_pair):
        codes = ", ".join(sorted(languages))
        raise InputError(
            f"{', '.join(paths)}: no file has {codes} and a second language. Set mixed to false ({split})."
        )
    return path_by_pair


def list_files(paths: Sequence[str], split: Split) -> list[Path]:
    """List the given files, and the JSON files directly in the given directories.

    If a file name in a directory contains the split (MLQA's `test-context-…`), skip the files of other splits.

    Raises:
        InputError: a path does not exist, or a directory has no JSON file.
    """
    files: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            files += _list_directory(path, split)
        elif path.is_file():
            files.append(path)
        else:
            raise InputError(f"{path}: no such file or directory ({split}).")
    return list(dict.fromkeys(files))  # a file may be given by its own path and by its directory


def _list_directory(directory: Path, split: Split) -> list[Path]:
    """List a directory's JSON files. If any file name contains the split, skip the files of other splits."""
    json_files = sorted(file for file in directory.iterdir() if file.suffix == ".json")
    if not json_files:
        raise InputError(f"{directory}: the directory has no .json file. Give the directory of the {split} files.")
    splits_in_name: dict[Path, set[str]] = {}
    for file in json_files:
        # In MLQA's de_squad-translate-train-dev-v1.1, `translate-train` is the setting, and `dev` is the split.
        stem = re.sub("translate-train-(?=train|dev)", "", file.stem)
        words = re.split(r"[._-]", stem)
        splits_in_name[file] = set(words) & set(SPLITS.values())
    all_splits = set().union(*splits_in_name.values())
    if split not in all_splits:
        return json_files
    # A file without a split in its name counts for every split.
    return [file for file, splits in splits_in_name.items() if not splits or split in splits]


def parse_languages(path: Path) -> LanguagePair:
    """Parse the languages of paragraphs and questions from a file name. The names of SQuAD's own files mean English.

    Examples: `test-context-de-question-en.json`, `xquad.de.json`, `tydiqa.goldp.sw.train.json`,
    `tydiqa-goldp-dev-thai.json`, `train-v1.1.json`. A translated set, such as `squad.translate.train.en-de.json`, is in
    the second language.

    Raises:
        InputError: the name contains no language.
    """
    match = re.search(r"context-([a-z]{2,3})-question-([a-z]{2,3})", path.name)
    if match:
        return match[1], match[2]
    name = re.sub("^[a-z]+-", "", path.stem)  # skip the first word: `my-squad` is not Burmese
    words = re.split(r"[._-]", name)
    codes = [_TYDIQA_NAMES.get(word, word) for word in words]
    languages = [code for code in codes if len(code) == 2 and is_known(code)]  # public sets use two letters
    if languages:
        return languages[-1], languages[-1]
    if re.match(r"(?i:(?:train|dev)-v1|squad)", path.name):
        return "en", "en"
    raise InputError(f"{path}: its name contains no language. Call it {path.stem}.de.json if it is German.")


def read_squad(path: Path) -> QuestionSet:
    """Read one file. Raise InputError if the format is not SQuAD's, or if a paragraph or an answer is empty."""
    articles = _parse_file(path).data
    paragraphs = [paragraph for article in articles for paragraph in article.paragraphs]
    questions: list[Question] = []
    for paragraph_index, paragraph in enumerate(paragraphs):
        questions += _convert_questions(path, paragraph, paragraph_index)
    languages = parse_languages(path)
    paragraph_language, question_language = languages
    logger.info("%s: %d questions (%s) about %d paragraphs (%s)",
                path, len(questions), question_language, len(paragraphs), paragraph_language)  # fmt: skip
    contexts = tuple(paragraph.context for paragraph in paragraphs)
    return QuestionSet(path, languages, contexts, tuple(questions))


def _parse_file(path: Path) -> _File:
    """Parse a file in SQuAD's format. Raise InputError with the first invalid field."""
    try:
        content = user_files.check_readable(path).read_bytes()
        # Pydantic's JSON parser does not accept a byte order mark.
        return _File.model_validate_json(content.removeprefix(codecs.BOM_UTF8))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}).") from None
    except ValidationError as error:
        first_error = error.errors()[0]
        reason = first_error["msg"]
        field = ".".join(map(str, first_error["loc"]))  # empty if the file is not JSON
        if field:
            reason = f"{field}: {reason}"
        raise InputError(f"{path}: {reason}. Give SQuAD's JSON format.") from None


def _convert_questions(path: Path, paragraph: _Paragraph, paragraph_index: int) -> list[Question]:
    """Convert a paragraph's questions. Raise InputError if an answer or the paragraph is missing."""
    questions = []
    for question in paragraph.qas:
        where = f"{path}: question {question.id}"
        if question.is_impossible or not question.answers:
            raise InputError(f"{where} has no answer. Give sets in which every question has one (SQuAD 1.1, not 2.0).")
        if not all(answer.text.strip() for answer in question.answers):
            raise InputError(f"{where} has an empty answer. Give a set whose answers are public.")
        if not paragraph.context.strip():
            raise InputError(f"{where} has an empty paragraph. Fill it or remove the question.")
        answers = tuple(answer.text for answer in question.answers)
        span = _find_first_span(paragraph.context, question.answers)
        questions.append(Question(question.id, question.question, paragraph_index, answers, span))
    return questions


def _find_first_span(context: str, answers: Sequence[_Answer]) -> tuple[int, int] | None:
    """Return the start and end (exclusive) of the first answer with a correct `answer_start`, without outer spaces."""
    for answer in answers:
        start = answer.answer_start
        if start >= 0 and context.startswith(answer.text, start):
            num_leading_spaces = len(answer.text) - len(answer.text.lstrip())
            start += num_leading_spaces
            return start, start + len(answer.text.strip())
    return None

"""Questions about paragraphs -> answers cut out of them (MLQA, XQuAD, TyDiQA, SQuAD), and how good they are."""

import json
import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase as Tokenizer

from infoxlm_core import manifests
from infoxlm_core.data.examples import join
from infoxlm_core.errors import InputError
from infoxlm_core.model import task_models
from infoxlm_core.model.huggingface import pretrained, tokenizers
from infoxlm_core.model.task_models import TaskModel
from infoxlm_core.tasks.question_answering import files
from infoxlm_core.tasks.question_answering.answers import cleaner, score
from infoxlm_core.tasks.question_answering.files import Cell, QuestionSet
from infoxlm_core.tasks.question_answering.head import HEAD
from infoxlm_core.tasks.question_answering.settings import AnsweringConfig
from infoxlm_core.tasks.question_answering.spans import best_spans
from infoxlm_core.tasks.question_answering.windows import Windows, lay_out, targets
from infoxlm_core.tasks.scores import Scores, mix
from infoxlm_core.tasks.task import load_chosen
from infoxlm_core.training.finetuning import selection
from infoxlm_core.training.finetuning.task_learner import Training

logger = logging.getLogger(__name__)


def training(config: AnsweringConfig, encoder: Path) -> Training:
    """Read and tokenise training and development sets; of test sets it looks at the names, before hours of training."""
    for context, _ in files.cells(config.test, "test", config.mixed):
        cleaner(config.normaliser, context)
    tokenizer, limit = _tokenizer(config, encoder)
    examples, answers = [], []
    for asked in files.read_training(config.train):
        windows = _windows(config, tokenizer, limit, asked)
        spans = [question.span for question in asked.questions if question.span]
        found = targets(windows, spans)
        logger.info("%s: %d windows, %d with an answer", asked.path, len(found), np.count_nonzero(found[:, 1]))
        examples.append(windows.examples)
        answers.append(found)
    development = tuple(context for context, _ in files.cells(config.dev, "dev")) if config.dev else ()
    return Training(
        HEAD,
        join(examples),
        np.concatenate(answers),  # (N, 2) first and last token of the answer; (0, 0) where it is not in the window
        source=training_languages(config)[0],
        development=development,
        score_dev=_score_dev(config, tokenizer, limit),
    )


def training_languages(config: AnsweringConfig) -> list[str]:
    """Languages of the training text by the names of its files; English first if it is one of several."""
    languages = []
    for path in map(Path, config.train):
        names = files.files([str(path)], "train") if path.is_dir() else [path]
        languages += [files.languages_of(name)[0] for name in names]
    return list(dict.fromkeys(["en"] * ("en" in languages) + languages))


def _tokenizer(config: AnsweringConfig, directory: Path) -> tuple[Tokenizer, int]:
    """The tokenizer of a model, and the tokens of a window: no more than the model can read."""
    tokenizer = tokenizers.load(directory)
    if not tokenizer.is_fast:
        raise InputError(f"{directory}: its tokenizer does not tell characters: give one with a tokenizer.json")
    return tokenizer, min(config.max_tokens, pretrained.longest_of(pretrained.read_config(directory)))


def _windows(config: AnsweringConfig, tokenizer: Tokenizer, limit: int, asked: QuestionSet) -> Windows:
    return lay_out(
        tokenizer,
        [question.text for question in asked.questions],
        asked.paragraphs,
        [question.paragraph for question in asked.questions],
        limit,
        config.question_tokens,
        config.stride,
    )


def _score_dev(
    config: AnsweringConfig, tokenizer: Tokenizer, limit: int
) -> Callable[[TaskModel], dict[str, float]] | None:
    if not config.dev:
        return None
    sets = {cell[0]: asked for cell, asked in files.read_cells(config.dev, "dev").items()}
    for language in sets:
        cleaner(config.normaliser, language)
    windows = {language: _windows(config, tokenizer, limit, asked) for language, asked in sets.items()}

    def score_dev(reader: TaskModel) -> dict[str, float]:
        return {
            language: _score(config, asked, answer(config, reader, asked, windows[language]))["f1"]
            for language, asked in sets.items()
        }

    return score_dev


def answer(config: AnsweringConfig, reader: TaskModel, asked: QuestionSet, windows: Windows) -> dict[str, str]:
    """Question id -> its answer, as it stands in the paragraph; empty where no start and end fit together."""
    logits = list(task_models.run(reader, windows.examples))  # of each window (L, 2)
    spans = best_spans(windows, logits, config.n_best, config.answer_tokens)
    return {
        question.id: asked.paragraphs[question.paragraph][start:end].strip()
        for question, (start, end) in zip(asked.questions, spans.tolist(), strict=True)
    }


def _score(config: AnsweringConfig, asked: QuestionSet, given: dict[str, str]) -> dict[str, float]:
    """F1 and exact match from 0 to 1. Answers are of the paragraphs' language, whatever the questions' is."""
    answers = {question.id: question.answers for question in asked.questions}
    return score(given, answers, cleaner(config.normaliser, asked.cell[0]))


def measure(config: AnsweringConfig, tuned: Path, output: Path) -> Scores:
    """Answer the test sets with a fine-tuned reader; write `predictions/LANGUAGE.json` in SQuAD's official format.

    With `config.mixed` also `predictions/PARAGRAPHS-QUESTIONS.json`, read by the model of the paragraphs' language.
    """
    sets = files.read_cells(config.test, "test", config.mixed)
    for context, _ in sets:
        cleaner(config.normaliser, context)  # before hours of reading
    given = {}
    for directory, reader, contexts in load_chosen(tuned, HEAD, [context for context, _ in sets]):
        tokenizer, limit = _tokenizer(config, directory)
        for cell, asked in sets.items():
            if cell[0] in contexts:
                given[cell] = answer(config, reader, asked, _windows(config, tokenizer, limit, asked))
    (output / "predictions").mkdir(parents=True, exist_ok=True)
    for cell, answers in given.items():
        path = output / "predictions" / f"{_name(cell)}.json"
        manifests.write_atomically(path, json.dumps(answers, ensure_ascii=False, indent=1) + "\n")
    cells = {cell: _score(config, asked, given[cell]) for cell, asked in sets.items()}
    languages = {context: scores for (context, question), scores in cells.items() if context == question}
    return Scores.from_languages(
        "question_answering",
        languages,
        training_languages(config)[0],
        tuned,
        counts={language: len(sets[language, language].questions) for language in languages},
        test_set=_digest(sets),
        mixed=mix(cells, "f1") if config.mixed else None,
    )


def _name(cell: Cell) -> str:
    return cell[0] if cell[0] == cell[1] else "-".join(cell)


def _digest(sets: dict[Cell, QuestionSet]) -> str:
    """What was asked, whatever the files are called and however they are laid out."""
    content = {
        "-".join(cell): manifests.digest(
            [asked.paragraphs, [(q.id, q.text, q.paragraph, q.answers) for q in asked.questions]]
        )
        for cell, asked in sets.items()
    }
    return manifests.digest(content)


def check(config: AnsweringConfig) -> None:
    """Whether training, development and test files can be read, judged by the rule, and their answers compared."""
    files.read_training(config.train)
    tested = files.read_cells(config.test, "test", config.mixed)
    developed = files.read_cells(config.dev, "dev") if config.dev else {}
    for language in dict.fromkeys(context for context, _ in (*developed, *tested)):
        cleaner(config.normaliser, language)
    selection.check(config.selection.rule, training_languages(config)[0], [context for context, _ in developed])

"""Fine-tune and measure readers, which mark the answer to a question in a paragraph (MLQA, XQuAD, TyDiQA, SQuAD)."""

import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase as Tokenizer

from infoxlm_core import manifests
from infoxlm_core.data.examples import join
from infoxlm_core.errors import InputError
from infoxlm_core.model import padded, task_models
from infoxlm_core.model.huggingface import pretrained, tokenizers
from infoxlm_core.model.task_models import TaskModel
from infoxlm_core.tasks.question_answering import files
from infoxlm_core.tasks.question_answering.answers import choose_normaliser, score
from infoxlm_core.tasks.question_answering.files import LanguagePair, QuestionSet
from infoxlm_core.tasks.question_answering.head import HEAD
from infoxlm_core.tasks.question_answering.settings import AnsweringConfig
from infoxlm_core.tasks.question_answering.spans import best_spans
from infoxlm_core.tasks.question_answering.windows import Windows, find_targets, make_windows
from infoxlm_core.tasks.scores import Scores, mix
from infoxlm_core.tasks.task import load_chosen
from infoxlm_core.training.finetuning import selection
from infoxlm_core.training.finetuning.task_learner import Training

logger = logging.getLogger(__name__)


def read_training(config: AnsweringConfig, encoder: Path) -> Training:
    """Read and tokenise training and development sets; check test sets by their names, before hours of training."""
    for language, _ in files.find_sets(config.test, "test", config.mixed):
        choose_normaliser(config.normaliser, language)
    tokenizer, limit = _load_tokenizer(config, encoder)
    examples, targets = [], []
    for questions in files.read_training(config.train):
        windows = _make_windows(config, encoder, tokenizer, limit, questions)
        spans = [question.span for question in questions.questions if question.span]
        window_targets = find_targets(windows, spans)
        with_answer = np.count_nonzero(window_targets[:, 1])
        logger.info("%s: %d windows, %d with an answer", questions.path, len(window_targets), with_answer)
        examples.append(windows.examples)
        targets.append(window_targets)
    dev: dict[str, QuestionSet] = {}
    if config.dev:
        dev = {languages[0]: questions for languages, questions in files.read_sets(config.dev, "dev").items()}
    for language in dev:
        choose_normaliser(config.normaliser, language)
    dev_windows = {language: _make_windows(config, encoder, tokenizer, limit, dev[language]) for language in dev}

    def score_dev(reader: TaskModel) -> dict[str, float]:
        return {
            language: _score(config, questions, answer(config, reader, questions, dev_windows[language]))["f1"]
            for language, questions in dev.items()
        }

    return Training(
        HEAD,
        join(examples),
        np.concatenate(targets),  # (N, 2) first and last token of the answer; (0, 0) if it is not in the window
        source=list_training_languages(config)[0],
        development=tuple(dev),
        score_dev=score_dev if dev else None,
    )


def list_training_languages(config: AnsweringConfig) -> list[str]:
    """Return the languages of the training text by the names of its files; English first if it is one of them."""
    languages = []
    for path in map(Path, config.train):
        paths = files.list_files([str(path)], "train") if path.is_dir() else [path]
        languages += [files.languages_of(file)[0] for file in paths]
    return list(dict.fromkeys(sorted(languages, key=lambda language: language != "en")))


def _load_tokenizer(config: AnsweringConfig, directory: Path) -> tuple[Tokenizer, int]:
    """Return the tokenizer of a model, and the tokens of a window, which the model limits."""
    tokenizer = tokenizers.load(directory)
    if not tokenizer.is_fast:
        raise InputError(f"{directory}: its tokenizer cannot map tokens to characters. Give one with a tokenizer.json.")
    return tokenizer, min(config.max_tokens, pretrained.max_tokens_of(pretrained.read_config(directory)))


def _make_windows(
    config: AnsweringConfig, directory: Path, tokenizer: Tokenizer, limit: int, questions: QuestionSet
) -> Windows:
    """Return the windows of a set; models with language embeddings read them in the paragraphs' language."""
    windows = make_windows(
        tokenizer,
        [question.text for question in questions.questions],
        questions.paragraphs,
        [question.paragraph for question in questions.questions],
        limit,
        config.question_tokens,
        config.stride,
    )
    languages = [questions.languages[0]] * len(windows.examples)
    examples = padded.set_languages(windows.examples, padded.read_config(directory), languages)
    return replace(windows, examples=examples)


def answer(config: AnsweringConfig, reader: TaskModel, questions: QuestionSet, windows: Windows) -> dict[str, str]:
    """Return question id -> answer, as it is in the paragraph; empty if no start and end fit together."""
    logits = list(task_models.run(reader, windows.examples))  # (L, 2) of each window
    spans = best_spans(windows, logits, config.n_best, config.answer_tokens)
    return {
        question.id: questions.paragraphs[question.paragraph][start:end].strip()
        for question, (start, end) in zip(questions.questions, spans.tolist(), strict=True)
    }


def _score(config: AnsweringConfig, questions: QuestionSet, predictions: Mapping[str, str]) -> dict[str, float]:
    """Return F1 and exact match; answers are in the paragraphs' language, whatever the questions' is."""
    answers = {question.id: question.answers for question in questions.questions}
    return score(predictions, answers, choose_normaliser(config.normaliser, questions.languages[0]))


def measure(config: AnsweringConfig, tuned: Path, output: Path) -> Scores:
    """Answer the test sets with a fine-tuned reader; write `predictions/LANGUAGE.json` in SQuAD's official format.

    With `config.mixed` also `predictions/PARAGRAPHS-QUESTIONS.json`, by the model of the paragraphs' language.
    """
    sets = files.read_sets(config.test, "test", config.mixed)
    for language, _ in sets:
        choose_normaliser(config.normaliser, language)  # fails before hours of reading
    predictions: dict[LanguagePair, dict[str, str]] = {}
    for directory, reader, languages in load_chosen(tuned, HEAD, [language for language, _ in sets]):
        tokenizer, limit = _load_tokenizer(config, directory)
        for pair, questions in sets.items():
            if pair[0] in languages:
                windows = _make_windows(config, directory, tokenizer, limit, questions)
                predictions[pair] = answer(config, reader, questions, windows)
    (output / "predictions").mkdir(parents=True, exist_ok=True)
    for (context, question), answers in predictions.items():
        name = context if context == question else f"{context}-{question}"
        content = json.dumps(answers, ensure_ascii=False, indent=1) + "\n"
        manifests.write_atomically(output / "predictions" / f"{name}.json", content)
    cells = {pair: _score(config, questions, predictions[pair]) for pair, questions in sets.items()}
    by_language = {context: scores for (context, question), scores in cells.items() if context == question}
    return Scores.from_languages(
        "question_answering",
        by_language,
        list_training_languages(config)[0],
        tuned,
        counts={language: len(sets[language, language].questions) for language in by_language},
        test_set=_digest(sets),
        mixed=mix(cells, "f1") if config.mixed else None,
    )


def _digest(sets: Mapping[LanguagePair, QuestionSet]) -> str:
    """Digest paragraphs, questions and answers; names and layout of the files do not matter."""
    content = {}
    for pair, questions in sets.items():
        rows = [(question.id, question.text, question.paragraph, question.answers) for question in questions.questions]
        content["-".join(pair)] = manifests.digest([questions.paragraphs, rows])
    return manifests.digest(content)


def check(config: AnsweringConfig) -> None:
    """Check that all files are readable, and that their languages suit the normaliser and the rule of selection."""
    files.read_training(config.train)
    test = files.read_sets(config.test, "test", config.mixed)
    dev = files.read_sets(config.dev, "dev") if config.dev else {}
    for language in dict.fromkeys(context for context, _ in (*dev, *test)):
        choose_normaliser(config.normaliser, language)
    selection.check(config.selection.rule, list_training_languages(config)[0], [context for context, _ in dev])

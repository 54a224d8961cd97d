"""Fine-tune and measure readers: models that mark a question's answer in a paragraph (MLQA, XQuAD, TyDiQA, SQuAD)."""

import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from infoxlm_core import manifests
from infoxlm_core.data.examples import join
from infoxlm_core.errors import InputError
from infoxlm_core.model import padded, task_models
from infoxlm_core.model.huggingface import pretrained, tokenizers
from infoxlm_core.model.task_models import TaskModel
from infoxlm_core.tasks.question_answering import files
from infoxlm_core.tasks.question_answering.answers import check_language, score
from infoxlm_core.tasks.question_answering.files import LanguagePair, QuestionSet
from infoxlm_core.tasks.question_answering.spans import find_best_spans
from infoxlm_core.tasks.question_answering.task import HEAD, AnsweringConfig
from infoxlm_core.tasks.question_answering.windows import Windows, cut_into_windows, find_targets
from infoxlm_core.tasks.scores import Scores, summarise_mixed
from infoxlm_core.tasks.task import load_selected_models
from infoxlm_core.training.finetuning import selection
from infoxlm_core.training.finetuning.task_learner import Training

logger = logging.getLogger(__name__)


def list_test_files(config: AnsweringConfig) -> list[Path]:
    """List the local files with test questions, including translated test sets."""
    test_files = list(files.find_sets(config.test, "test", config.mixed).values())
    if config.translated_test:
        test_files += files.find_sets(config.translated_test, "test").values()
    return test_files


def read_training(config: AnsweringConfig, encoder: Path, corpus: Path | None) -> Training:  # noqa: ARG001
    """Read and tokenise the training and development sets."""
    # Fail now, and not after hours of training, if the normaliser does not support a test language.
    for test_language, _ in files.find_sets(config.test, "test", config.mixed):
        check_language(config.normaliser, test_language)
    window_maker = WindowMaker(config, encoder)
    examples = []
    targets = []
    for question_set in files.read_training(config.train):
        windows = window_maker.make_windows(question_set)
        # `files.read_training` dropped all questions without a span.
        spans = [question.span for question in question_set.questions if question.span]
        window_targets = find_targets(windows, spans)
        num_with_answer = np.count_nonzero(window_targets[:, 1])  # the target (0, 0) means no answer
        logger.info("%s: %d windows, %d with an answer", question_set.path, len(window_targets), num_with_answer)
        examples.append(windows.examples)
        targets.append(window_targets)

    dev_sets = {}
    dev_windows = {}
    if config.dev:
        for (language, _), question_set in files.read_sets(config.dev, "dev").items():
            check_language(config.normaliser, language)
            dev_sets[language] = question_set
            dev_windows[language] = window_maker.make_windows(question_set)
    score_dev = partial(_score_dev, config, dev_sets, dev_windows) if dev_sets else None

    return Training(
        HEAD,
        join(examples),
        np.concatenate(targets),
        source_language=list_training_languages(config)[0],
        dev_languages=tuple(dev_sets),
        score_dev=score_dev,
    )


def _score_dev(
    config: AnsweringConfig, dev_sets: Mapping[str, QuestionSet], windows: Mapping[str, Windows], reader: TaskModel
) -> dict[str, float]:
    """Return a mapping from language to a reader's F1 on the development set."""
    f1_by_language = {}
    for language, question_set in dev_sets.items():
        predictions = answer_questions(config, reader, question_set, windows[language])
        f1_by_language[language] = _score(config, question_set, predictions)["f1"]
    return f1_by_language


def list_training_languages(config: AnsweringConfig) -> list[str]:
    """List the languages in the names of the training files. The first is the source language, English if possible."""
    languages: dict[str, None] = {}  # used as an ordered set
    for path in map(Path, config.train):
        training_files = files.list_files([str(path)], "train") if path.is_dir() else [path]
        for file in training_files:
            paragraph_language, _ = files.parse_languages(file)
            languages[paragraph_language] = None
    return sorted(languages, key=lambda language: language != "en")  # a stable sort that moves only English


class WindowMaker:
    """Cuts paragraphs into windows for one model. Raises InputError if the tokenizer has no character offsets."""

    def __init__(self, config: AnsweringConfig, directory: Path) -> None:
        self.config = config
        self.tokenizer = tokenizers.load(directory)
        if not self.tokenizer.is_fast:
            raise InputError(
                f"{directory}: its tokenizer cannot map tokens to characters. Give one with a tokenizer.json."
            )
        self.max_tokens = min(config.max_tokens, pretrained.find_max_tokens(pretrained.read_config(directory)))
        self.model_config = padded.load_config(directory)

    def make_windows(self, question_set: QuestionSet) -> Windows:
        """Tokenise a set's questions, and cut the paragraphs into windows.

        For models with language embeddings, all tokens get the language of the paragraphs.
        """
        windows = cut_into_windows(
            self.tokenizer,
            questions=[question.text for question in question_set.questions],
            paragraphs=question_set.paragraphs,
            paragraph_indices=[question.paragraph for question in question_set.questions],
            max_tokens=self.max_tokens,
            question_tokens=self.config.question_tokens,
            stride=self.config.stride,
        )
        paragraph_language, _ = question_set.languages
        languages = [paragraph_language] * len(windows.examples)
        examples = padded.set_language_ids(windows.examples, self.model_config, languages)
        return replace(windows, examples=examples)


def answer_questions(
    config: AnsweringConfig, reader: TaskModel, question_set: QuestionSet, windows: Windows
) -> dict[str, str]:
    """Return a mapping from question id to answer. The answer is text from the paragraph, or "" if none was found."""
    logits = list(task_models.compute_logits(reader, windows.examples))  # (L, 2) per window
    spans = find_best_spans(windows, logits, config.n_best, config.answer_tokens)
    answers = {}
    for question, (start, end) in zip(question_set.questions, spans.tolist(), strict=True):
        paragraph = question_set.paragraphs[question.paragraph]
        answers[question.id] = paragraph[start:end].strip()
    return answers


def _score(config: AnsweringConfig, question_set: QuestionSet, predictions: Mapping[str, str]) -> dict[str, float]:
    """Return the F1 and exact match. Answers are in the language of the paragraphs, not of the questions."""
    gold_answers = {question.id: question.answers for question in question_set.questions}
    paragraph_language, _ = question_set.languages
    return score(predictions, gold_answers, config.normaliser, paragraph_language)


def measure(config: AnsweringConfig, models: Path, output: Path) -> Scores:
    """Answer the test sets with a fine-tuned reader, and write `predictions/LANGUAGE.json` in SQuAD's format.

    With `config.mixed`, the model for the paragraphs' language also answers sets in two languages. The answers are
    written to `predictions/PARAGRAPHS-QUESTIONS.json`.
    """
    source = list_training_languages(config)[0]
    sets = _read_test(config, source)
    predictions = _predict(config, models, sets)
    _write_predictions(output / "predictions", predictions)
    scores_by_pair = {}
    scores_by_language = {}
    for pair, question_set in sets.items():
        scores_by_pair[pair] = _score(config, question_set, predictions[pair])
        paragraph_language, question_language = pair
        if paragraph_language == question_language:
            scores_by_language[paragraph_language] = scores_by_pair[pair]
    return Scores.from_languages(
        "question_answering",
        scores_by_language,
        source,
        models,
        counts={language: len(sets[language, language].questions) for language in scores_by_language},
        test_set=_digest(sets),
        mixed=summarise_mixed(scores_by_pair, "f1") if config.mixed else None,
    )


def _predict(
    config: AnsweringConfig, models: Path, sets: Mapping[LanguagePair, QuestionSet]
) -> dict[LanguagePair, dict[str, str]]:
    """Answer each set with the model selected for its paragraphs' language. Return answers by language pair and id."""
    paragraph_languages = [question_set.languages[0] for question_set in sets.values()]
    for language in paragraph_languages:
        check_language(config.normaliser, language)
    predictions = {}
    # Several languages may have the same selected model, which is then loaded only once.
    for directory, reader, model_languages in load_selected_models(models, HEAD, paragraph_languages):
        window_maker = WindowMaker(config, directory)
        for pair, question_set in sets.items():
            paragraph_language, _ = question_set.languages
            if paragraph_language in model_languages:
                windows = window_maker.make_windows(question_set)
                predictions[pair] = answer_questions(config, reader, question_set, windows)
    return predictions


def _read_test(config: AnsweringConfig, source: str) -> dict[LanguagePair, QuestionSet]:
    """Read the test sets.

    With `translated_test`, each set in a language other than the source is replaced by its translation into the source.
    The key of the translated set remains the language pair of the original, for reporting scores by language. Its
    `languages` field contains the source language, which selects the model and the rules that compare answers.

    Raises:
        InputError: a file is not usable (see `files.read_sets`), or a language has no translated set.
    """
    sets = files.read_sets(config.test, "test", config.mixed)
    if not config.translated_test:
        return sets
    translations = files.read_sets(config.translated_test, "test")
    for pair in sets:
        if pair == (source, source):
            continue
        if pair not in translations:
            paths = ", ".join(config.translated_test)
            raise InputError(f"{paths}: no test set in {pair[0]}. Give the test set of each language, translated.")
        sets[pair] = replace(translations[pair], languages=(source, source))
    return sets


def _write_predictions(directory: Path, predictions: Mapping[LanguagePair, Mapping[str, str]]) -> None:
    """Write one file per language pair, named after the languages."""
    directory.mkdir(parents=True, exist_ok=True)
    for pair, answers in predictions.items():
        name = "-".join(dict.fromkeys(pair))  # a single code if both languages are the same
        content = json.dumps(answers, ensure_ascii=False, indent=1) + "\n"
        manifests.write_atomically(directory / f"{name}.json", content)


def _digest(sets: Mapping[LanguagePair, QuestionSet]) -> str:
    """Return a digest of paragraphs, questions and answers, independent of file names and layout."""
    digests = {}
    for pair, question_set in sets.items():
        rows = []
        for question in question_set.questions:
            rows.append((question.id, question.text, question.paragraph, question.answers))
        digests["-".join(pair)] = manifests.digest([question_set.paragraphs, rows])
    return manifests.digest(digests)


def check(config: AnsweringConfig, has_grid: bool) -> None:  # noqa: ARG001 - `check_plan` checks the grid
    """Raise InputError if a file is not readable, a language is not supported, or model selection lacks a dev set."""
    files.read_training(config.train)  # raises InputError for unusable files
    source = list_training_languages(config)[0]
    test_sets = _read_test(config, source)
    dev_sets = files.read_sets(config.dev, "dev") if config.dev else {}
    for question_set in (*dev_sets.values(), *test_sets.values()):
        paragraph_language, _ = question_set.languages
        check_language(config.normaliser, paragraph_language)
    dev_languages = [paragraph_language for paragraph_language, _ in dev_sets]
    selection.check_dev_languages(config.selection.rule, source, dev_languages)

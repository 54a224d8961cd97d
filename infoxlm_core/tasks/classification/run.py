"""Fine-tune classifiers of sentences or sentence pairs, and measure their accuracy in each language."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from infoxlm_core import manifests
from infoxlm_core.data.examples import Examples, encode
from infoxlm_core.errors import CorpusTooSmall, InputError
from infoxlm_core.languages import two_letters
from infoxlm_core.model import padded, task_models
from infoxlm_core.model.huggingface import pretrained, tokenizers
from infoxlm_core.model.task_models import TaskModel
from infoxlm_core.tasks.classification.table import (
    describe_difference,
    list_files,
    normalise_labels,
    read_labelled,
    read_test,
    select_translations,
    split_by_language,
)
from infoxlm_core.tasks.classification.task import HEAD, ClassificationConfig
from infoxlm_core.tasks.scores import Scores, summarise_mixed
from infoxlm_core.tasks.task import load_selected_models
from infoxlm_core.training.finetuning import selection
from infoxlm_core.training.finetuning.task_learner import Training

logger = logging.getLogger(__name__)
BATCH_TOKENS = 8192  # tokens per forward pass; limits the memory for long texts
MAX_OVERLAP = 0.5  # largest share of test rows that may also be training rows; public sets repeat a few rows
MAX_UNKNOWN = 0.05  # largest share of rows that may be dropped because their label is not in the training text


def list_test_files(config: ClassificationConfig) -> list[Path]:
    """List the local files with test rows, including translated test sets."""
    files = list_files(config, None)
    if config.translated_test:
        files += list_files(select_translations(config), None)
    return [file.path for file in files if file.split in (None, "test")]


def encode_rows(table: pd.DataFrame, directory: Path, max_tokens: int) -> Examples:
    """Tokenise each row's `text` and optional `text_pair`, truncated to the model's maximum length."""
    limit = min(max_tokens, pretrained.find_max_tokens(pretrained.read_config(directory)))
    pairs = table["text_pair"].tolist() if "text_pair" in table else None
    examples = encode(tokenizers.load(directory), table["text"].tolist(), pairs, limit)
    return padded.set_language_ids(examples, padded.load_config(directory), table["language"].tolist())


def predict(classifier: TaskModel, examples: Examples, batch_tokens: int = BATCH_TOKENS) -> list[str]:
    """Return the most probable label of each of N examples."""
    logits: Any = task_models.compute_logits(classifier, examples, batch_tokens)  # (N, labels)
    return [classifier.labels[label_id] for label_id in logits.argmax(dim=1).tolist()]


def predict_rows(models: Path, table: pd.DataFrame, max_tokens: int, batch_tokens: int = BATCH_TOKENS) -> pd.Series:
    """Predict each row's label with the model selected for the row's language.

    Texts are truncated to `max_tokens`. A forward pass has at most `batch_tokens` tokens.
    """
    predictions = pd.Series("", index=table.index, dtype="string")
    for directory, classifier, languages in load_selected_models(models, HEAD, table["language"].unique()):
        rows = table[table["language"].isin(languages)]
        predictions[rows.index] = predict(classifier, encode_rows(rows, directory, max_tokens), batch_tokens)
    return predictions


def accuracy_by_language(
    predictions: Sequence[str], labels: Sequence[str], languages: Sequence[str]
) -> dict[str, float]:
    """Return the share of correct predictions by language, from 0 to 1."""
    is_correct = pd.Series(np.asarray(predictions) == np.asarray(labels))
    return is_correct.groupby(np.asarray(languages)).mean().to_dict()


def read_training(config: ClassificationConfig, encoder: Path, corpus: Path | None) -> Training:
    """Read and tokenise labelled text. Raise CorpusTooSmall if the training rows have fewer than two labels."""
    table = read_labelled(config, corpus)
    languages = [two_letters(language) for language in config.train_languages]
    train = table[(table["split"] == "train") & table["language"].isin(languages)]
    labels = tuple(sorted(train["label"].unique()))
    if len(labels) < 2:
        raise CorpusTooSmall(
            f"{len(train)} training rows in {', '.join(languages)} have the labels {list(labels)}, but training needs "
            "two labels. Set finetuning.train_languages to languages in the data."
        )
    label_ids = {label: label_id for label_id, label in enumerate(labels)}
    dev = drop_unknown_labels(table[table["split"] == "dev"], labels, "dev")
    test = drop_unknown_labels(table[table["split"] == "test"], labels, "test")
    check_overlap(train, test)
    score_dev = None
    if len(dev):
        # Training scores the development rows many times, so they are tokenised once.
        score_dev = partial(_score_dev, dev, encode_rows(dev, encoder, config.max_tokens))
    return Training(
        HEAD,
        encode_rows(train, encoder, config.max_tokens),
        train["label"].map(label_ids).to_numpy(np.int64),
        labels,
        source_language=languages[0],
        dev_languages=tuple(sorted(dev["language"].unique())),
        score_dev=score_dev,
        head_dropout=config.head_dropout,
        write_extra_files=partial(_write_test_set, test),
    )


def _score_dev(dev: pd.DataFrame, examples: Examples, classifier: TaskModel) -> dict[str, float]:
    """Return a classifier's accuracy on the development rows by language."""
    return accuracy_by_language(predict(classifier, examples), dev["label"], dev["language"])


def _write_test_set(test: pd.DataFrame, directory: Path) -> None:
    """Save the test rows with a classifier, for the stage `evaluate`."""
    test.drop(columns="split").to_parquet(directory / "test.parquet", index=False)


def check_overlap(train: pd.DataFrame, test: pd.DataFrame) -> None:
    """Warn if test rows are also training rows. Raise InputError if their share is above `MAX_OVERLAP`."""
    is_overlap = _normalise_text(test).isin(set(_normalise_text(train)))
    if not is_overlap.any():
        return
    example = test["text"][is_overlap].iloc[0]
    message = f"{is_overlap.sum()} of {len(test)} test rows are also training rows (such as {example!r:.80})"
    if is_overlap.mean() > MAX_OVERLAP:
        raise InputError(f"{message}. Test on other rows.")
    logger.warning("%s, so their scores measure memorization", message)


def _normalise_text(table: pd.DataFrame) -> pd.Series:
    """Return each row's text in lower case with single spaces, so that rows can be compared."""
    texts = table["text"] + "\t" + table["text_pair"] if "text_pair" in table else table["text"]
    return texts.str.casefold().str.split().str.join(" ")


def measure(config: ClassificationConfig, models: Path, output: Path) -> Scores:
    """Classify the test rows of each language with the language's selected model, and write `predictions.parquet`.

    Raises:
        InputError: the model or a translation is missing, no test row has a known label, or `mixed` is set and the
            rows of two languages do not translate each other.
    """
    # A classifier trained elsewhere may spell its labels differently from the test rows, whose labels are normalised.
    classifier_labels = padded.read_labels(padded.load_config(models))
    normalised_by_label = normalise_labels(classifier_labels, str(models))
    source = two_letters(config.train_languages[0])
    test = read_test(config).drop(columns="split")
    test = drop_unknown_labels(test, list(normalised_by_label.values()), "test")
    rows_by_language = split_by_language(test)
    if config.mixed:
        check_aligned(rows_by_language)
    # The model for the source language also reads the translations, because they are in the source language.
    texts = test.assign(language=source) if config.translated_test else test
    test["predicted"] = predict_rows(models, texts, config.max_tokens).map(normalised_by_label)
    output.mkdir(parents=True, exist_ok=True)
    test.to_parquet(output / "predictions.parquet", index=False)
    accuracies = accuracy_by_language(test["predicted"], test["label"], test["language"])
    return Scores.from_languages(
        "classification",
        {language: {"accuracy": accuracy} for language, accuracy in accuracies.items()},
        source,
        models,
        counts={language: len(rows) for language, rows in rows_by_language.items()},
        test_set=manifests.digest({language: rows.to_dict("list") for language, rows in rows_by_language.items()}),
        mixed=_score_mixed(config, models, rows_by_language, normalised_by_label, accuracies) if config.mixed else None,
    )


def drop_unknown_labels(table: pd.DataFrame, labels: Iterable[str], split: str) -> pd.DataFrame:
    """Drop the rows whose label the classifier does not know.

    Raises:
        InputError: the share of dropped rows is above `MAX_UNKNOWN`.
    """
    is_unknown = ~table["label"].isin(list(labels))
    if not is_unknown.any():
        return table.copy()  # callers add columns
    num_unknown = int(is_unknown.sum())
    example_label = table["label"][is_unknown].iloc[0]
    if num_unknown > MAX_UNKNOWN * len(table):
        raise InputError(
            f"{split}: {num_unknown} of {len(table)} rows have a label ({example_label!r}) that is not one of the "
            f"classifier's ({', '.join(labels)}). Spell the labels alike in all splits, or remove these rows."
        )
    message = "%s: dropped %d of %d rows because their labels (such as %s) are not in the training text"
    logger.warning(message, split, num_unknown, len(table), example_label)
    return table[~is_unknown].copy()


def check_aligned(rows_by_language: Mapping[str, pd.DataFrame]) -> None:
    """Raise InputError if there is one language, or if the languages' rows do not translate each other.

    Different row counts or labels show that the rows do not translate each other.
    """
    if len(rows_by_language) < 2:
        raise InputError(
            f"mixed needs two languages, but all test rows are in {', '.join(rows_by_language)}. Set mixed to false."
        )
    if any("text_pair" not in rows for rows in rows_by_language.values()):
        raise InputError("mixed needs text pairs. Set mixed to false.")
    difference = describe_difference(rows_by_language)
    if difference:
        raise InputError(f"mixed needs the same test in every language: {difference}.")


def _score_mixed(
    config: ClassificationConfig,
    models: Path,
    rows_by_language: Mapping[str, pd.DataFrame],
    normalised_by_label: Mapping[str, str],
    accuracies: Mapping[str, float],
) -> dict[str, Any]:
    """Score premises in one language with hypotheses in another (InfoXLM, section 6).

    Args:
        config: the task's settings.
        models: directory of the fine-tuned models; the model for the premise's language predicts.
        rows_by_language: mapping from language to test rows.
        normalised_by_label: mapping from the classifier's labels to their spelling in the test rows.
        accuracies: accuracy by language for premises and hypotheses in the same language.
    """
    scores_by_pair = {(language, language): {"accuracy": accuracy} for language, accuracy in accuracies.items()}
    for premise_language, premises in rows_by_language.items():
        tables = []
        for hypothesis_language, hypotheses in rows_by_language.items():
            if hypothesis_language != premise_language:
                hypothesis_columns = {"text_pair": hypotheses["text_pair"], "hypothesis_language": hypothesis_language}
                tables.append(premises.assign(**hypothesis_columns))
        # Predicting all hypothesis languages together loads each model only once.
        table = pd.concat(tables, ignore_index=True)
        predictions = predict_rows(models, table, config.max_tokens).map(normalised_by_label)
        mixed_accuracies = accuracy_by_language(predictions, table["label"], table["hypothesis_language"])
        for hypothesis_language, accuracy in mixed_accuracies.items():
            scores_by_pair[premise_language, hypothesis_language] = {"accuracy": accuracy}
        logger.info("scored premises in %s with hypotheses in all other languages", premise_language)
    return summarise_mixed(dict(sorted(scores_by_pair.items())), "accuracy")


def check(config: ClassificationConfig, has_grid: bool) -> None:
    """Raise InputError if the data lack rows for training, model selection or the test."""
    table = read_labelled(config, None)
    languages = [two_letters(language) for language in config.train_languages]
    train = table[(table["split"] == "train") & table["language"].isin(languages)]
    labels = sorted(train["label"].unique())
    paths = config.data if isinstance(config.data, str) else ", ".join(config.data or ())
    remedy = "Add rows with this split, or add files to settings.data."
    if not labels:
        raise InputError(f"{paths}: no train rows in {', '.join(config.train_languages)}. {remedy}")
    if len(labels) < 2:
        raise InputError(f"{paths}: all train rows have the label {labels[0]!r}. Add rows with other labels.")
    needs_dev = has_grid or config.selection.rule != "last"  # for selecting grid points or checkpoints
    required_splits = ["dev", "test"] if needs_dev else ["test"]
    for split in required_splits:
        if not (table["split"] == split).any():
            raise InputError(f"{paths}: no {split} rows. {remedy}")
    dev = drop_unknown_labels(table[table["split"] == "dev"], labels, "dev")
    test = drop_unknown_labels(table[table["split"] == "test"], labels, "test")
    selection.check_dev_languages(config.selection.rule, languages[0], sorted(dev["language"].unique()))
    if config.mixed:
        check_aligned(split_by_language(test))
    if config.translated_test:
        read_test(config)  # checks that every row has a translation

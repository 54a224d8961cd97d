"""Sentences, or sentence pairs, -> labels (XNLI and its kin), and what is lost away from the language of training."""

import logging
from collections.abc import Callable, Mapping, Sequence
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
from infoxlm_core.tasks.classification import files
from infoxlm_core.tasks.classification.head import HEAD
from infoxlm_core.tasks.classification.settings import ClassificationConfig
from infoxlm_core.tasks.classification.table import by_name, paths, read_labelled
from infoxlm_core.tasks.scores import Scores, mix
from infoxlm_core.tasks.task import load_chosen
from infoxlm_core.training.finetuning import selection
from infoxlm_core.training.finetuning.task_learner import Training

logger = logging.getLogger(__name__)
TOKENS = 8192  # of one forward pass
MOST_LEARNED = 0.5  # share of test rows that may be training rows; public sets have a few
MOST_STRANGE = 0.05  # share of rows whose labels training never saw, that may be left out


def encode_rows(table: pd.DataFrame, directory: Path, max_tokens: int) -> Examples:
    """Columns text and, if there is one, text_pair as a model reads them, no longer than it can."""
    limit = min(max_tokens, pretrained.longest_of(pretrained.read_config(directory)))
    pairs = table["text_pair"].tolist() if "text_pair" in table else None
    return encode(tokenizers.load(directory), table["text"].tolist(), pairs, limit)


def answer(classifier: Any, examples: Examples, tokens: int = TOKENS) -> list[str]:
    """The most probable label of each example."""
    logits: Any = task_models.run(classifier, examples, tokens)  # (N, labels)
    return [classifier.labels[best] for best in logits.argmax(dim=1).tolist()]


def predict_rows(tuned: Path, table: pd.DataFrame, max_tokens: int, tokens: int = TOKENS) -> pd.Series:
    """The label of each row by the model that was chosen for its language."""
    predicted = pd.Series("", index=table.index, dtype="string")
    for directory, classifier, languages in load_chosen(tuned, HEAD, table["language"].unique()):
        rows = table[table["language"].isin(languages)]
        predicted[rows.index] = answer(classifier, encode_rows(rows, directory, max_tokens), tokens)
    return predicted


def accuracy_by_language(
    predictions: Sequence[str], labels: Sequence[str], languages: Sequence[str]
) -> dict[str, float]:
    """Share of right predictions of each language, from 0 to 1."""
    right = pd.Series(np.asarray(predictions) == np.asarray(labels))
    return right.groupby(np.asarray(languages)).mean().to_dict()


def training(config: ClassificationConfig, encoder: Path, corpus: Path | None) -> Training:
    """Read and tokenise labelled text for an encoder; CorpusTooSmall if it has fewer than two labels."""
    table = read_labelled(config, corpus)
    languages = [two_letters(language) for language in config.train_languages]
    train = table[(table["split"] == "train") & table["language"].isin(languages)]
    labels = tuple(sorted(train["label"].unique()))
    if len(labels) < 2:
        raise CorpusTooSmall(
            f"{len(train)} training rows in {', '.join(languages)} with labels {list(labels)}: have={len(labels)} "
            "need=2 labels; set finetuning.train_languages to languages of the data"
        )
    numbers = {label: number for number, label in enumerate(labels)}
    dev, test = (known_rows(table[table["split"] == split], labels, split) for split in ("dev", "test"))
    check_apart(train, test)
    return Training(
        HEAD,
        encode_rows(train, encoder, config.max_tokens),
        train["label"].map(numbers).to_numpy(np.int64),
        labels,
        languages[0],
        tuple(sorted(dev["language"].unique())),
        _score_dev(dev, encode_rows(dev, encoder, config.max_tokens)) if len(dev) else None,
        config.head_dropout,
        lambda directory: test.drop(columns="split").to_parquet(directory / "test.parquet", index=False),
    )


def check_apart(train: pd.DataFrame, test: pd.DataFrame) -> None:
    """Warn of test rows whose text stands among the training rows; InputError if they are more than half of all."""
    known = _texts(test).isin(set(_texts(train)))
    if not known.any():
        return
    said = (
        f"{known.sum()} of {len(test)} test rows are training rows, too (such as {test['text'][known].iloc[0]!r:.80})"
    )
    if known.mean() > MOST_LEARNED:
        raise InputError(f"{said}: give other rows to test on")
    logger.warning("%s: what is measured on them is memory", said)


def _texts(table: pd.DataFrame) -> pd.Series:
    """What is compared of each row: its texts, whatever case and spaces are."""
    both = table["text"] + "\t" + table["text_pair"] if "text_pair" in table else table["text"]
    return both.str.casefold().str.split().str.join(" ")


def _score_dev(dev: pd.DataFrame, asked: Examples) -> Callable[[TaskModel], dict[str, float]]:
    return lambda classifier: accuracy_by_language(answer(classifier, asked), dev["label"], dev["language"])


def measure(config: ClassificationConfig, tuned: Path, output: Path) -> Scores:
    """Classify the test rows of every language by the model that was kept for it; write `predictions.parquet`.

    Raises:
        InputError: there is no test row that the classifier knows the label of, no model, or, for `mixed`, rows that
            do not translate each other.
    """
    labels = by_name(padded.labels_of(padded.read_config(tuned)), str(tuned))  # the classifier's -> the data's
    table = read_labelled(config, None, ("test",))
    if table.empty:
        raise InputError(f"{config.data}: no row is of split test: name files or rows so")
    test = known_rows(table.drop(columns="split"), list(labels.values()), "test")
    rows = {str(language): part.reset_index(drop=True) for language, part in test.groupby("language")}
    if config.mixed:
        check_aligned(rows)
    test["predicted"] = predict_rows(tuned, test, config.max_tokens).map(labels)
    output.mkdir(parents=True, exist_ok=True)
    test.to_parquet(output / "predictions.parquet", index=False)
    accuracy = accuracy_by_language(test["predicted"], test["label"], test["language"])
    return Scores.from_languages(
        "classification",
        {language: {"accuracy": share} for language, share in accuracy.items()},
        two_letters(config.train_languages[0]),
        tuned,
        counts={language: len(part) for language, part in rows.items()},
        test_set=manifests.digest({name: part.to_dict("list") for name, part in rows.items()}),
        mixed=_mixed(config, tuned, rows, labels, accuracy) if config.mixed else None,
    )


def known_rows(table: pd.DataFrame, labels: Sequence[str], what: str) -> pd.DataFrame:
    """The rows whose label a classifier has; a warning about the others, InputError if they are more than a few."""
    strange = ~table["label"].isin(labels)
    if strange.any():
        name, count, total = table["label"][strange].iloc[0], int(strange.sum()), len(table)
        if count > MOST_STRANGE * total:
            raise InputError(
                f"{what}: {count} of {total} rows have a label ({name!r}) that is not one of the classifier's "
                f"({', '.join(labels)}): write labels alike in all splits, or remove these rows"
            )
        logger.warning(
            "%s: %d of %d rows have a label (%s) that training never saw: left out", what, count, total, name
        )
    return table[~strange].copy()


def check_aligned(rows: Mapping[str, pd.DataFrame]) -> None:
    """Whether row i of every language translates row i of the others, as far as labels tell; InputError if not."""
    (first, one), *others = rows.items()
    if "text_pair" not in one:
        raise InputError("mixed needs pairs of texts: set it to false")
    for language, other in others:
        if len(other) != len(one):
            found = f"{first} has {len(one)} rows, {language} {len(other)}"
        elif (differ := other["label"] != one["label"]).any():
            found = f"row {differ.idxmax() + 1} has another label in {first} than in {language}"
        else:
            continue
        raise InputError(f"mixed needs the same test in every language: {found}")


def _mixed(
    config: ClassificationConfig,
    tuned: Path,
    rows: Mapping[str, pd.DataFrame],
    labels: Mapping[str, str],
    alone: Mapping[str, float],
) -> dict[str, Any]:
    """Premises of one language with hypotheses of another, by the model of the premises' language (section 6)."""
    cells = {(language, language): share for language, share in alone.items()}
    for first, premises in rows.items():
        others = {second: part for second, part in rows.items() if second != first}
        table = pd.concat(
            [premises.assign(text_pair=part["text_pair"], second=second) for second, part in others.items()],
            ignore_index=True,
        )
        predicted = predict_rows(tuned, table, config.max_tokens).map(labels)
        found = accuracy_by_language(predicted, table["label"], table["second"])
        cells |= {(first, second): share for second, share in found.items()}
        logger.info("mixed: premises in %s", first)
    return mix({cell: {"accuracy": share} for cell, share in sorted(cells.items())}, "accuracy")


def check(settings: ClassificationConfig, chosen: bool) -> None:
    """Whether there are rows to learn from, to test on and, where something is chosen by them, to develop on."""
    labels, found = _read(settings)
    parts = {split: found[found["split"] == split] for split in ("dev", "test")}
    where, remedy = ", ".join(map(str, paths(settings, None))), "add a split, or settings.data"
    if not labels:
        raise InputError(f"{where}: no train rows in {', '.join(settings.train_languages)}: {remedy}")
    if len(labels) < 2:
        raise InputError(f"{where}: the train rows have one label alone, {min(labels)!r}: there is nothing to learn")
    for split in ("dev", "test") if chosen or settings.selection.rule != "last" else ("test",):
        if parts[split].empty:
            raise InputError(f"{where}: no {split} rows: {remedy}")
    dev, test = (known_rows(part, sorted(labels), split) for split, part in parts.items())
    source = two_letters(settings.train_languages[0])
    selection.check(settings.selection.rule, source, sorted(dev["language"].unique()))
    if settings.mixed:
        rows = test.groupby("language")
        check_aligned({str(language): part.reset_index(drop=True) for language, part in rows})


def _read(settings: ClassificationConfig) -> tuple[set[str], pd.DataFrame]:
    """Labels of the training rows, and at least all development and test rows.

    Training files, which may be large, are read one at a time, and only those in a language of training.
    """
    languages = [two_letters(language) for language in settings.train_languages]
    found_files = [file for path in paths(settings, None) for file in files.find(path)]
    if any(file.split is None for file in found_files):  # a column says it, or nothing does
        found = read_labelled(settings, None)
        return _learned(found[found["split"] == "train"], languages), found
    labels: set[str] = set()
    for file in found_files:
        if file.split == "train" and (file.language is None or two_letters(file.language) in languages):
            alone = settings.model_copy(update={"data": str(file.path)})
            labels |= _learned(read_labelled(alone, None, ("train",)), languages)
    return labels, read_labelled(settings, None, ("dev", "test"))


def _learned(table: pd.DataFrame, languages: Sequence[str]) -> set[str]:
    return set(table.loc[table["language"].isin(languages), "label"])

"""Sentences, or sentence pairs, -> labels (XNLI and its kin), and what is lost away from the language of training."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import pyarrow.parquet as pq
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from infoxlm_core.errors import InputError
from infoxlm_core.tasks.embedding import autocast, batches, encode, load

XNLI_LABELS = ("entailment", "neutral", "contradiction")
"""In the order of the Hub's numbers."""


@torch.inference_mode()
def predict(
    directory: Path | str,
    texts: Sequence[str],
    pairs: Sequence[str] | None = None,
    batch_size: int = 64,
    max_tokens: int = 256,
) -> list[str]:
    """Predict the label of each text, or text pair, with a classifier on disk.

    Raises:
        InputError: there is no complete classifier in the directory.
    """
    model, tokenizer = load(directory, AutoModelForSequenceClassification)
    names: Any = model.config.id2label
    labels = [""] * len(texts)
    for chosen, batch in batches(tokenizer, encode(model, tokenizer, texts, max_tokens, pairs), batch_size):
        with autocast(model.device):
            logits = model(**{name: values.to(model.device) for name, values in batch.items()}).logits  # (B, classes)
        for i, best in zip(chosen, logits.argmax(dim=1).tolist(), strict=True):
            labels[i] = names[best]
    return labels


def accuracy_by_language(
    predictions: Sequence[str], labels: Sequence[str], languages: Sequence[str]
) -> dict[str, float]:
    """Share of right predictions of each language, from 0 to 1."""
    right = defaultdict(list)
    for predicted, label, language in zip(predictions, labels, languages, strict=True):
        right[language].append(predicted == label)
    return {language: fmean(values) for language, values in sorted(right.items())}


def xnli_label(label: str | int, order: Sequence[str] = XNLI_LABELS) -> str:
    """Name of an XNLI label, from its name (`contradictory` too) or from its number in the file's own order.

    Numbers mean nothing by themselves: the Hub counts from entailment, XTREME from contradiction.

    Raises:
        InputError: it is none of the three.
    """
    name = str(label).strip().lower()
    name = order[int(name)] if name.isdecimal() and int(name) < len(order) else name
    name = {"contradictory": "contradiction"}.get(name, name)
    if name not in XNLI_LABELS:
        raise InputError(f"{str(label)!r} is no XNLI label: give one of {', '.join(XNLI_LABELS)}, or 0, 1, 2")
    return name


def transfer_gap(scores: Mapping[str, float], source: str = "en") -> float:
    """Score of the source language minus the mean of the others: what is lost on the way (lower is better)."""
    return scores[source] - fmean(score for language, score in scores.items() if language != source)


def score(directory: Path, pivot: str, batch_size: int, max_tokens: int) -> dict[str, Any]:
    """Accuracy by language on the classifier's own test set, beside always giving the most frequent label.

    Raises:
        InputError: test.parquet is missing, empty, or does not fit the classifier.
    """
    path = directory / "test.parquet"
    if not path.is_file():
        raise InputError(f"{path} is missing: give the output of finetune")
    columns = pq.read_table(path).to_pydict()
    if missing := {"text", "label", "language"} - set(columns):
        raise InputError(f"{path} has no column {', '.join(sorted(missing))}: give the output of finetune")
    labels = [str(label) for label in columns["label"]]
    if not labels:
        raise InputError(f"{path} has no rows: give the output of finetune")
    predicted = predict(directory, columns["text"], columns.get("text_pair"), batch_size, max_tokens)
    known = list(AutoConfig.from_pretrained(directory, local_files_only=True).id2label.values())
    if unknown := sorted(set(labels) - set(known)):
        raise InputError(f"{path}: label {unknown[0]!r} is not one of the classifier's ({', '.join(known)})")
    languages = accuracy_by_language(predicted, labels, columns["language"])
    transferred = pivot in languages and len(languages) > 1
    return {
        "mean": fmean(languages.values()),
        "transfer_gap": transfer_gap(languages, pivot) if transferred else None,
        "majority": max(map(labels.count, set(labels))) / len(labels),
        "rows": len(labels),
        "labels": known,
        "languages": languages,
    }

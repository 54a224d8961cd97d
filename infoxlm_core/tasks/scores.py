"""Scores of a model on a task, and the means over languages that reports show."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Self

from infoxlm_core.errors import InputError
from infoxlm_core.training.finetuning import selection

ByLanguage = Mapping[str, Mapping[str, float]]  # language -> metric -> share


@dataclass(frozen=True)
class Scores:
    """Scores of one model on one task. Shares are from 0 to 1. Every language has the same weight in a mean."""

    task: str
    languages: ByLanguage
    mean: Mapping[str, float]
    counts: Mapping[str, int]  # questions of each language
    test_set: str  # digest of the questions
    transfer_gap: Mapping[str, float] | None = None  # by metric; None if there is no other language than the source
    dev: Mapping[str, Any] | None = None  # development scores of the model, {"languages", "mean"}
    selection: Mapping[str, Any] | None = None  # the content of selection.json
    mixed: Mapping[str, Any] | None = None  # scores by pair of languages, {"within", "across", "cells"}
    trained_on: Sequence[str] = ()  # languages of the training text, the source first
    training: Mapping[str, Any] = field(default_factory=dict)  # steps, examples, location of the model
    details: Mapping[str, Any] = field(default_factory=dict)  # what only this task has, such as retrieval's vectors
    outcomes: Any = field(default=None, compare=False, repr=False)
    """A table with a row for each question; it is not in scores.json."""

    @classmethod
    def from_languages(
        cls, task: str, languages: ByLanguage, source: str, models: Path | None = None, **other_fields: Any
    ) -> Self:
        """Return the scores of a fine-tuned model, with means and transfer gap.

        Args:
            task: name of the task.
            languages: scores by language and metric.
            source: the language of the training text, from which the transfer gap is measured.
            models: directory of the fine-tuned models, from which development scores and selection are read.
            **other_fields: fields of the class that are not computed here.
        """
        means = mean_over(languages)
        gap_by_metric = None
        if source in languages and len(languages) > 1:
            gap_by_metric = {}
            for metric in means:
                score_by_language = {language: scores[metric] for language, scores in languages.items()}
                gap_by_metric[metric] = transfer_gap(score_by_language, source)
        if models:
            other_fields["dev"] = selection.read_development_scores(models)
            other_fields["selection"] = selection.read(models)
        return cls(task=task, languages=languages, mean=means, transfer_gap=gap_by_metric, **other_fields)

    def to_dict(self) -> dict[str, Any]:
        """Return the content of scores.json, in which `details` are beside the other fields."""
        names = ("task", "languages", "mean", "transfer_gap", "counts", "test_set", "dev", "selection", "mixed")
        fields = {name: getattr(self, name) for name in names}
        return fields | dict(self.details) | {"training": dict(self.training), "trained_on": list(self.trained_on)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], where: str = "scores.json") -> Self:
        """Read what `to_dict` returned, in this version or an earlier one.

        Raises:
            InputError: a field is missing or empty.
        """
        required = ("task", "languages", "mean", "counts", "test_set")
        missing_fields = [name for name in required if not values.get(name)]
        if missing_fields:
            raise InputError(f"{where} has no {', '.join(missing_fields)}. Measure the model again.")
        field_names = set(cls.__dataclass_fields__) - {"details", "outcomes"}
        fields: dict[str, Any] = {}
        details: dict[str, Any] = {}
        for name, value in values.items():
            if name in field_names:
                fields[name] = value
            else:
                details[name] = value
        return cls(**fields, details=details)


def select_finite(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the values that are finite numbers, because a tracking server does not accept others."""
    return {name: float(value) for name, value in values.items() if value is not None and math.isfinite(value)}


def mean_over(languages: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the unweighted mean of each metric over the languages that have it, or None if no language has it."""
    means = {}
    for metric in next(iter(languages.values())):
        values = [scores[metric] for scores in languages.values() if scores[metric] is not None]
        means[metric] = fmean(values) if values else None
    return means


def transfer_gap(scores: Mapping[str, float], source: str = "en") -> float:
    """Return the score of the source language minus the mean of the other languages. Lower is better."""
    return scores[source] - fmean(score for language, score in scores.items() if language != source)


def summarise_mixed(scores_by_pair: Mapping[tuple[str, str], Mapping[str, float]], metric: str) -> dict[str, Any]:
    """Return the scores of each language pair, and their means within a language and across two languages.

    Args:
        scores_by_pair: scores by (language of premise or paragraph, language of hypothesis or question).
        metric: the metric that is averaged.
    """
    within, across = average_within_and_across({pair: scores[metric] for pair, scores in scores_by_pair.items()})
    scores_by_name = {"-".join(pair): scores for pair, scores in scores_by_pair.items()}
    return {"within": within, "across": across, "cells": scores_by_name}


def average_within_and_across(score_by_pair: Mapping[tuple[str, str], float]) -> tuple[float, float]:
    """Return the mean score of text pairs in one language, and the mean score of text pairs in two languages.

    The scores of two languages are first averaged for each language, so that every language has the same weight
    (InfoXLM, section 6).

    Args:
        score_by_pair: (language of one text, language of the other) -> score; some pairs may be missing.
    """
    languages = [first for first, second in score_by_pair if first == second]
    within = fmean(score_by_pair[language, language] for language in languages)
    means_across = []
    for language in languages:
        scores_across = []
        for (first, second), score in score_by_pair.items():
            if first != second and language in (first, second):
                scores_across.append(score)
        if scores_across:
            means_across.append(fmean(scores_across))
    return within, fmean(means_across)

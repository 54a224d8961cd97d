"""A model's scores on a task, and the means over languages for reports."""

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
    """One model's scores on one task. Shares are from 0 to 1. Means give every language the same weight."""

    task: str
    languages: ByLanguage
    mean: Mapping[str, float]
    counts: Mapping[str, int]  # number of questions by language
    test_set: str  # digest of the questions
    transfer_gap: Mapping[str, float] | None = None  # by metric; None if only the source language was tested
    dev: Mapping[str, Any] | None = None  # development scores, {"languages", "mean"}
    selection: Mapping[str, Any] | None = None  # content of selection.json
    mixed: Mapping[str, Any] | None = None  # scores by language pair, {"within", "across", "cells"}
    trained_on: Sequence[str] = ()  # languages of the training text, the source first
    training: Mapping[str, Any] = field(default_factory=dict)  # steps, examples, location of the model
    details: Mapping[str, Any] = field(default_factory=dict)  # values of this task only, such as retrieval's vectors
    outcomes: Any = field(default=None, compare=False, repr=False)
    """A table with a row per question, not saved in scores.json."""

    @classmethod
    def from_languages(
        cls, task: str, languages: ByLanguage, source: str, models: Path | None = None, **other_fields: Any
    ) -> Self:
        """Compute the means and the transfer gap of a fine-tuned model's scores.

        Args:
            task: name of the task.
            languages: scores by language and metric.
            source: the language with which the transfer gap compares all others.
            models: directory of the fine-tuned models, with their development scores and selection; None: no models.
            **other_fields: the remaining fields of the class.
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
        """Return the content of scores.json. The details are on the same level as the other fields."""
        names = ("task", "languages", "mean", "transfer_gap", "counts", "test_set", "dev", "selection", "mixed")
        fields = {name: getattr(self, name) for name in names}
        return fields | dict(self.details) | {"training": dict(self.training), "trained_on": list(self.trained_on)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], where: str = "scores.json") -> Self:
        """Read the output of `to_dict` of this or an earlier version.

        Raises:
            InputError: a field is missing or empty.
        """
        required = ("task", "languages", "mean", "counts", "test_set")
        missing_fields = [name for name in required if not values.get(name)]
        if missing_fields:
            raise InputError(f"{where} has no {', '.join(missing_fields)}. Measure the model again.")
        # `to_dict` writes the details beside the fields, and does not write the outcomes.
        field_names = set(cls.__dataclass_fields__) - {"details", "outcomes"}
        fields = {name: value for name, value in values.items() if name in field_names}
        details = {name: value for name, value in values.items() if name not in field_names}
        return cls(**fields, details=details)


def select_finite(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers among the values. Tracking servers reject all other values."""
    return {name: float(value) for name, value in values.items() if value is not None and math.isfinite(value)}


def mean_over(languages: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return each metric's unweighted mean over the languages that have a value, or None if no language has a value."""
    means = {}
    for metric in next(iter(languages.values())):
        values = [scores[metric] for scores in languages.values() if scores[metric] is not None]
        means[metric] = fmean(values) if values else None
    return means


def transfer_gap(scores: Mapping[str, float], source: str = "en") -> float:
    """Return the score of the source language minus the mean of the other languages. Lower is better."""
    return scores[source] - fmean(score for language, score in scores.items() if language != source)


def summarise_mixed(scores_by_pair: Mapping[tuple[str, str], Mapping[str, float]], metric: str) -> dict[str, Any]:
    """Return each language pair's scores (`cells`), and the means within a language and across two languages.

    Args:
        scores_by_pair: scores by (language of premise or paragraph, language of hypothesis or question).
        metric: the metric to average.
    """
    within, across = average_within_and_across({pair: scores[metric] for pair, scores in scores_by_pair.items()})
    scores_by_name = {"-".join(pair): scores for pair, scores in scores_by_pair.items()}
    return {"within": within, "across": across, "cells": scores_by_name}


def average_within_and_across(score_by_pair: Mapping[tuple[str, str], float]) -> tuple[float, float]:
    """Return the mean score of text pairs within one language, and of text pairs across two languages.

    Scores across languages are averaged per language first, so that every language has the same weight (InfoXLM,
    section 6).

    Args:
        score_by_pair: mapping from (first language, second language) to score; pairs may be missing.
    """
    languages = [first for first, second in score_by_pair if first == second]
    within = fmean(score_by_pair[language, language] for language in languages)
    means_across = []
    for language in languages:
        scores_across = [score for pair, score in score_by_pair.items() if language in pair and pair[0] != pair[1]]
        if scores_across:
            means_across.append(fmean(scores_across))
    return within, fmean(means_across)

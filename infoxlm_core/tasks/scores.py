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
        cls, task: str, languages: ByLanguage, source: str, tuned: Path | None = None, **other_fields: Any
    ) -> Self:
        """Compute means and transfer gap from the scores of each language.

        Args:
            task: name of the task.
            languages: scores by language and metric.
            source: the language of the training text, from which the transfer gap is measured.
            tuned: directory of a fine-tuned model; its development scores and selection are read.
            **other_fields: fields of the class that are not computed here.
        """
        mean = mean_over(languages)
        gap_by_metric = None
        if source in languages and len(languages) > 1:
            gap_by_metric = {}
            for metric in mean:
                scores_of_metric = {language: scores[metric] for language, scores in languages.items()}
                gap_by_metric[metric] = transfer_gap(scores_of_metric, source)
        if tuned:
            other_fields["dev"] = selection.read_development_scores(tuned)
            other_fields["selection"] = selection.read(tuned)
        return cls(task=task, languages=languages, mean=mean, transfer_gap=gap_by_metric, **other_fields)

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
    """Return the score of the source language minus the mean of the others. Lower is better."""
    return scores[source] - fmean(score for language, score in scores.items() if language != source)


def summarise_mixed(cells: Mapping[tuple[str, str], Mapping[str, float]], metric: str) -> dict[str, Any]:
    """Return the content of `Scores.mixed`: means within and across languages, and the scores of each language pair.

    Args:
        cells: scores by (language of premise or paragraph, language of hypothesis or question).
        metric: the metric of the means `within` and `across`.
    """
    scores_of_metric = {pair: scores[metric] for pair, scores in cells.items()}
    within, across = average_within_and_across(scores_of_metric)
    named_cells = {"-".join(pair): scores for pair, scores in cells.items()}
    return {"within": within, "across": across, "cells": named_cells}


def average_within_and_across(cells: Mapping[tuple[str, str], float]) -> tuple[float, float]:
    """Return the mean score of pairs of texts in the same language, and that of pairs in two languages.

    The scores of two languages are averaged for each language first, so that every language has the same weight
    (InfoXLM, section 6).

    Args:
        cells: (language of one text, language of the other) -> score; some pairs may be missing.
    """
    languages = [first for first, second in cells if first == second]
    across_by_language = []
    for language in languages:
        mixed_scores = []
        for pair, score in cells.items():
            if language in pair and pair[0] != pair[1]:
                mixed_scores.append(score)
        if mixed_scores:
            across_by_language.append(fmean(mixed_scores))
    within = fmean(cells[language, language] for language in languages)
    return within, fmean(across_by_language)

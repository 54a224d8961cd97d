"""Decide whether a candidate becomes champion.

The candidate must be better on the same questions: for each metric of the gate, the whole paired bootstrap interval of
the gain must lie above a limit. The candidate is compared with the champion. If its registration demands it, the
candidate is first compared with the model from which its training started.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field

import pandas as pd

from infoxlm_core.errors import InputError
from infoxlm_core.results.bootstrap import paired_bootstrap
from infoxlm_core.results.evidence import Outcomes
from infoxlm_core.results.statistics import INTERVAL

FEWEST_QUESTIONS = 50  # intervals over fewer questions are too narrow: equal models often look different


@dataclass(frozen=True)
class Contender:
    """A model as the gate sees it."""

    name: str  # such as "version 3"
    tags: Mapping[str, str]  # metrics by name, and `test_set`, the digest of the questions
    read_outcomes: Callable[[], Outcomes | None]  # returns None for a model registered without outcomes


@dataclass(frozen=True)
class Verdict:
    """The gate's decision on a candidate."""

    passed: bool
    reason: str
    figures: dict[str, dict[str, float]] = field(default_factory=dict)
    """Metric -> fields of `Interval`, and `least`, the gain that the interval must exceed."""


def decide(
    candidate: Contender, champion: Contender | None, gate: Mapping[str, float], start: Contender | None = None
) -> Verdict:
    """Decide whether a candidate becomes champion.

    Args:
        candidate: version to judge.
        champion: version that users get, or None.
        gate: limits by metric. The whole interval of the candidate's gain must lie above the limit.
        start: model from which the candidate's training started; None if the candidate need not be better than it.
    """
    if start is None:
        if champion is None:
            return Verdict(True, f"champion with {_list_scores(candidate, gate)}: there was none before")
        return _compare_outcomes(candidate, champion, gate)
    verdict_over_start = _compare_outcomes(candidate, start, gate)
    if champion is None or not verdict_over_start.passed:
        return verdict_over_start
    verdict_over_champion = _compare_outcomes(candidate, champion, gate)
    reason = f"{verdict_over_champion.reason}; better than {start.name}: {describe_gains(verdict_over_start.figures)}"
    figures_over_start = {f"start/{metric}": figure for metric, figure in verdict_over_start.figures.items()}
    return Verdict(verdict_over_champion.passed, reason, verdict_over_champion.figures | figures_over_start)


def _compare_outcomes(candidate: Contender, reference: Contender, gate: Mapping[str, float]) -> Verdict:
    """Decide whether a candidate is better than a reference on the same questions."""
    comparison = f"{_list_scores(candidate, gate)}; {reference.name} has {_list_scores(reference, gate)}"
    if reference.tags.get("test_set") != candidate.tags.get("test_set"):
        return Verdict(False, f"candidate with {comparison} on another test set, promote by hand")
    candidate_outcomes = candidate.read_outcomes()
    reference_outcomes = reference.read_outcomes()
    if candidate_outcomes is None or reference_outcomes is None:
        name = candidate.name if candidate_outcomes is None else reference.name
        return Verdict(False, f"candidate with {comparison}, {name} has no outcomes by question: promote by hand")
    figures: dict[str, dict[str, float]] = {}
    unproven_metrics = []
    for metric, least_gain in gate.items():
        try:
            candidate_scores = _score_questions(candidate, candidate_outcomes, metric)
            reference_scores = _score_questions(reference, reference_outcomes, metric)
            interval = paired_bootstrap(candidate_scores, reference_scores)
        except InputError as error:
            return Verdict(False, f"candidate with {comparison}, but {error}", figures)
        except ValueError:  # the models answered different questions
            reason = f"candidate with {comparison} on other questions of {metric}, promote by hand"
            return Verdict(False, reason, figures)
        figures[metric] = asdict(interval) | {"least": least_gain}
        if interval.questions < FEWEST_QUESTIONS:  # too few for any verdict, so the other metrics do not matter
            problem = f"{metric} has {interval.questions} questions, fewer than {FEWEST_QUESTIONS}: evaluate on more"
            return Verdict(False, f"candidate with {comparison}, but {problem}", figures)
        if not interval.lower > least_gain:  # also true for NaN
            unproven_metrics.append(metric)
    gains = describe_gains(figures)
    if unproven_metrics:
        return Verdict(False, f"candidate, not shown to be better than {reference.name}: {gains}", figures)
    return Verdict(True, f"champion, better than {reference.name}: {gains}", figures)


def _list_scores(contender: Contender, gate: Mapping[str, float]) -> str:
    """List a contender's values of the gate's metrics as text."""
    return ", ".join(f"{metric} {contender.tags.get(metric, 'missing')}" for metric in gate)


def _score_questions(contender: Contender, outcomes: Outcomes, metric: str) -> pd.Series:
    """Return a contender's score on every question. Raise InputError if there are none for the metric."""
    try:
        return outcomes.score_questions(metric)
    except InputError as error:
        raise InputError(f"{contender.name} has {error}") from None


def describe_gains(figures: Mapping[str, Mapping[str, float]]) -> str:
    """Describe the gain in each metric, with its interval and its limit."""
    gains = []
    for metric, figure in figures.items():
        gains.append(
            f"{metric} {figure['gain']:+.4f} ({INTERVAL} {figure['lower']:+.4f} to {figure['upper']:+.4f}, "
            f"{figure['questions']} questions; must be above {figure['least']:+g})"
        )
    return "; ".join(gains)

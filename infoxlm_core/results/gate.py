"""Decide whether a candidate replaces the champion.

The candidate must be shown to be better on the same questions: for each metric of the gate, the whole paired bootstrap
interval of the gain must lie above a limit.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field

import pandas as pd

from infoxlm_core.errors import InputError
from infoxlm_core.results.evidence import Outcomes, paired_bootstrap
from infoxlm_core.results.statistics import INTERVAL

FEWEST_QUESTIONS = 50  # with fewer, intervals are too narrow: equal models would too often look different


@dataclass(frozen=True)
class Contender:
    """A registered version as the gate sees it."""

    version: str
    tags: Mapping[str, str]  # metrics by name, and `test_set`, the digest of its questions
    read_outcomes: Callable[[], Outcomes | None]  # returns None if the version was registered without outcomes


@dataclass(frozen=True)
class Verdict:
    """The gate's decision on a candidate."""

    passed: bool
    reason: str
    figures: dict[str, dict[str, float]] = field(default_factory=dict)  # metric -> fields of `Interval`, and `least`


def decide(candidate: Contender, champion: Contender | None, gate: Mapping[str, float]) -> Verdict:
    """Decide whether a candidate becomes champion.

    Args:
        candidate: the version to judge.
        champion: the version that users get, if there is one.
        gate: metric -> the limit above which the interval of the gain must lie.
    """
    scores = ", ".join(f"{metric} {candidate.tags.get(metric, 'missing')}" for metric in gate)
    if champion is None:
        return Verdict(True, f"champion with {scores}: there was none before")
    champion_scores = ", ".join(champion.tags.get(metric, "none") for metric in gate)
    comparison = f"{scores}: champion version {champion.version} has {champion_scores}"
    if champion.tags.get("test_set") != candidate.tags.get("test_set"):
        return Verdict(False, f"candidate with {comparison} on another test set, promote by hand")
    candidate_outcomes = candidate.read_outcomes()
    champion_outcomes = champion.read_outcomes()
    if candidate_outcomes is None or champion_outcomes is None:
        incomplete = candidate if candidate_outcomes is None else champion
        return Verdict(
            False,
            f"candidate with {comparison}, version {incomplete.version} has no outcomes by question (it was registered "
            "by an older release): evaluate and register it again, or promote by hand",
        )
    figures: dict[str, dict[str, float]] = {}
    unproven_metrics = []
    for metric, limit in gate.items():
        try:
            candidate_scores = _score_questions(candidate, candidate_outcomes, metric)
            reference_scores = _score_questions(champion, champion_outcomes, metric)
            interval = paired_bootstrap(candidate_scores, reference_scores)
        except InputError as error:
            return Verdict(False, f"candidate with {comparison}, but {error}", figures)
        except ValueError:
            reason = f"candidate with {comparison} on other questions of {metric}, promote by hand"
            return Verdict(False, reason, figures)
        figures[metric] = asdict(interval) | {"least": limit}
        if interval.questions < FEWEST_QUESTIONS:
            problem = f"{metric} has {interval.questions} questions, fewer than {FEWEST_QUESTIONS}: evaluate on more"
            return Verdict(False, f"candidate with {comparison}, but {problem}", figures)
        if not interval.lower > limit:  # true also for NaN, which proves nothing
            unproven_metrics.append(metric)
    gains = "; ".join(describe(metric, figure) for metric, figure in figures.items())
    if unproven_metrics:
        return Verdict(False, f"candidate, not shown to be better than version {champion.version}: {gains}", figures)
    return Verdict(True, f"champion, better than version {champion.version}: {gains}", figures)


def _score_questions(contender: Contender, outcomes: Outcomes, metric: str) -> pd.Series:
    """Return the score of every question; InputError, which names the version, if it has none for the metric."""
    try:
        return outcomes.score_questions(metric)
    except InputError as error:
        raise InputError(f"version {contender.version} has {error}") from None


def describe(metric: str, figure: Mapping[str, float]) -> str:
    """Return a gain, its interval and its limit as text."""
    return (
        f"{metric} {figure['gain']:+.4f} ({INTERVAL} {figure['lower']:+.4f} to {figure['upper']:+.4f}, "
        f"{figure['questions']} questions; must be above {figure['least']:+g})"
    )

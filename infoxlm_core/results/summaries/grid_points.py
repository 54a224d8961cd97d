"""Choose the grid point at which a model is reported, by its development scores alone.

A grid point is one combination of grid values, such as a learning rate.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

from infoxlm_core.results import trials
from infoxlm_core.results.trials import Trial
from infoxlm_core.tasks.scores import Scores


@dataclass(frozen=True)
class GridPoint:
    """One combination of grid values, with its development scores."""

    grid: Mapping[str, Any]
    dev: float | None  # development score over all languages, averaged over finished seeds
    by: float | None  # mean of `_find_selection_score` over finished seeds; `by` is the name in suite.json
    seeds: tuple[int, ...]  # finished seeds


def select_scores(
    grid: Mapping[str, Any], trials_of_model: Iterable[Trial], scores: Mapping[str, Scores]
) -> dict[int, Scores]:
    """Return the scores of a model's finished trials at a grid point, by seed. `scores` has trial names as keys."""
    trials_of_point = [trial for trial in trials_of_model if trial.grid == grid]
    return {trial.seed: scores[trial.name] for trial in trials_of_point if trial.name in scores}


def summarise(grid: Mapping[str, Any], scores_by_seed: Mapping[int, Scores]) -> GridPoint:
    """Average the development scores of a grid point over its seeds. Without development sets, the scores are None."""
    dev_means = [scores.dev["mean"] for scores in scores_by_seed.values() if scores.dev]
    selection_scores = [_find_selection_score(scores, scores.dev) for scores in scores_by_seed.values() if scores.dev]
    return GridPoint(
        grid=grid,
        dev=fmean(dev_means) if dev_means else None,
        by=fmean(selection_scores) if selection_scores else None,
        seeds=tuple(scores_by_seed),
    )


def _find_selection_score(scores: Scores, dev: Mapping[str, Any]) -> float:
    """Return the development score by which grid points are compared.

    If checkpoints are chosen by the source language, use only the score of the source language. Scores of other
    languages would tune the model on these languages, and the test would no longer be zero-shot.
    """
    score: float = dev["mean"]
    if scores.selection and scores.selection["rule"] == "source" and scores.trained_on:
        source_language = scores.trained_on[0]
        score = dev["languages"].get(source_language, score)
    return score


class Choice(NamedTuple):
    """The chosen grid point, and which points could not be chosen."""

    chosen: GridPoint | None
    problem: str = ""  # a sentence for the report; empty if all points could be chosen


def choose(grid_points: Sequence[GridPoint]) -> Choice:
    """Choose the grid point with the best development score; the first point wins a tie. Test scores are never used."""
    measured = [grid_point for grid_point in grid_points if grid_point.seeds]
    if not measured:
        return Choice(None)
    if len(grid_points) == 1:  # nothing to compare, so no development score is needed
        return Choice(measured[0])
    without_dev = [grid_point for grid_point in measured if grid_point.by is None]
    if without_dev:  # one of these points may be the best
        names = _describe_grid_points(without_dev)
        problem = f"no grid point is chosen, because {names} have no development scores. Add development sets."
        return Choice(None, problem)
    # Only points with the most finished seeds compete, so that one lucky seed does not beat a mean of five seeds.
    most_seeds = max(len(grid_point.seeds) for grid_point in measured)
    complete = [grid_point for grid_point in measured if len(grid_point.seeds) == most_seeds]
    chosen = max(complete, key=lambda grid_point: grid_point.by or 0.0)
    incomplete = [grid_point for grid_point in measured if len(grid_point.seeds) < most_seeds]
    if not incomplete:
        return Choice(chosen)
    names = _describe_grid_points(incomplete)
    return Choice(chosen, f"{names} cannot be chosen, because fewer than {most_seeds} seeds are finished.")


def _describe_grid_points(grid_points: Iterable[GridPoint]) -> str:
    """List the values of grid points as text."""
    return ", ".join(trials.describe_grid_point(grid_point.grid) for grid_point in grid_points)

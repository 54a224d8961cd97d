"""Choose the lowest margin of mined pairs with planted pairs: known translations added to the two files.

All lines are matched twice:

1. Planted lines may be matched with their translations. The share of matched planted pairs is the recall.
2. Planted lines must not be matched with their translations. They then act as lines without a translation, so that
   every match of a planted line is wrong.

The first matching alone would overestimate the precision. Every planted line has a translation, but most lines of the
files have none.
"""

from typing import NamedTuple

import numpy as np

from infoxlm_core.errors import InputError
from infoxlm_core.tasks.mining.matching import Matches, Search, match_lines

FEWEST_PAIRS = 100  # minimum number of planted pairs; fewer cannot distinguish a precision of 95 % from 90 %
MAX_FALSE_SHARE = 0.5  # larger shares say little about the number of translated lines, and amplify sampling errors


class Curves(NamedTuple):
    """Number and quality of the mined pairs at each of N thresholds of the margin."""

    margins: np.ndarray  # (N,) ascending thresholds; pairs with at least this margin are mined
    num_pairs: np.ndarray  # (N,) number of mined pairs
    precision: np.ndarray  # (N,) lower bound of the share of correct pairs
    recall: np.ndarray  # (N,) share of planted pairs that are found

    def look_up(self, margin: float) -> dict[str, float]:
        """Return the curves' values at the lowest threshold that is at least `margin`."""
        row = min(int(np.searchsorted(self.margins, margin)), len(self.margins) - 1)
        return {
            "margin": float(self.margins[row]),
            "pairs": int(self.num_pairs[row]),
            "precision": float(self.precision[row]),
            "recall": float(self.recall[row]),
        }


def estimate(search: Search, matches: Matches) -> Curves:
    """Estimate the precision and recall of two files' matches, with every margin as a threshold.

    The estimates are based on planted lines: known translation pairs that were added to the lines of the files.
    """
    thresholds = np.unique(matches.margins)
    num_pairs = _count_at_least(matches.margins, thresholds)
    num_planted = search.num_planted

    # The first matching treats planted lines as lines of the files (num_planted=0), so translations may match.
    first = match_lines(search._replace(num_planted=0))
    source_pairs = first.sources - search.num_sources  # index of the planted pair; negative for the file's lines
    target_pairs = first.targets - search.num_targets
    is_correct = (source_pairs >= 0) & (source_pairs == target_pairs)
    recall = _count_at_least(first.margins[is_correct], thresholds) / num_planted
    is_wrong_source = (source_pairs >= 0) & ~is_correct
    is_wrong_target = (target_pairs >= 0) & ~is_correct
    mismatched_sources = _estimate_share(first.margins[is_wrong_source], thresholds, num_planted)
    mismatched_targets = _estimate_share(first.margins[is_wrong_target], thresholds, num_planted)

    # The second matching must not match planted lines with their translations, so that all their matches are false.
    second = match_lines(_exclude_planted_translations(search))
    is_planted_source = second.sources >= search.num_sources
    is_planted_target = second.targets >= search.num_targets
    false_sources = _estimate_share(second.margins[is_planted_source], thresholds, num_planted)
    false_targets = _estimate_share(second.margins[is_planted_target], thresholds, num_planted)

    wrong_by_sources = bound_wrong_pairs(num_pairs, search.num_sources, false_sources, mismatched_sources, num_planted)
    wrong_by_targets = bound_wrong_pairs(num_pairs, search.num_targets, false_targets, mismatched_targets, num_planted)
    num_wrong = (wrong_by_sources + wrong_by_targets) / 2  # the mean of two bounds on the same number
    precision = np.clip(1 - num_wrong / num_pairs, 0, 1)
    return Curves(thresholds, num_pairs, precision, recall)


def _estimate_share(planted_margins: np.ndarray, thresholds: np.ndarray, num_planted: int) -> np.ndarray:
    """Return the share (N,) of planted lines whose match reaches each threshold, given the margins of the matches."""
    # Add one line with and one line without a match, because a count of 0 may be chance.
    return (_count_at_least(planted_margins, thresholds) + 1) / (num_planted + 2)


def bound_wrong_pairs(
    num_pairs: np.ndarray, num_lines: int, false_shares: np.ndarray, mismatched_shares: np.ndarray, num_planted: int
) -> np.ndarray:
    """Return an upper bound on the number of wrong pairs at each of N thresholds.

    Suppose that T of a file's `num_lines` lines have a translation in the other file. The match of a line is wrong if
    the line has no translation, or if it is matched with another line:

        wrong = (num_lines - T) * false_shares + T * mismatched_shares

    Where `false_shares` exceeds `mismatched_shares`, a lower bound of T gives an upper bound of `wrong`. A line with a
    translation is in at most one pair, so that

        num_pairs <= T + (num_lines - T) * false_shares

    Solving this inequality gives a lower bound of T at every threshold. The largest is used. The method assumes that
    lines without a translation are matched as often as planted lines. It assumes nothing about the recall.

    `false_shares` has a sampling error, so two standard errors are added to it in the inequality. Thresholds where this
    sum exceeds `MAX_FALSE_SHARE` are ignored. Otherwise, the largest bound would often be a sampling error.

    Args:
        num_pairs: (N,) number of mined pairs.
        num_lines: number of lines in one of the files.
        false_shares: (N,) share of lines without a translation that are matched, below 1.
        mismatched_shares: (N,) share of lines with a translation that are matched with a wrong line.
        num_planted: number of planted lines (known translations added to the file), on which the shares were measured.
    """
    standard_errors = np.sqrt(false_shares * (1 - false_shares) / num_planted)
    upper_shares = false_shares + 2 * standard_errors
    is_reliable = upper_shares <= MAX_FALSE_SHARE
    solutions = (num_pairs - num_lines * upper_shares)[is_reliable] / (1 - upper_shares[is_reliable])
    num_translated = solutions.max(initial=0.0)
    return (num_lines - num_translated) * false_shares + num_translated * mismatched_shares


def choose_margin(curves: Curves, precision: float) -> float:
    """Return the lowest threshold that reaches a precision. Raise InputError if no threshold reaches it."""
    is_precise = curves.precision >= precision
    if not is_precise.any():
        best = curves.look_up(float(curves.margins[curves.precision.argmax()]))
        raise InputError(
            f"no margin has precision {precision}: the highest is {best['precision']:.3f} at margin "
            f"{best['margin']:.4f}, with {best['pairs']} pairs: lower --precision, or give more pairs to --calibrate"
        )
    return float(curves.margins[is_precise.argmax()])  # thresholds ascend, and argmax finds the first True


def _exclude_planted_translations(search: Search) -> Search:
    """Return a search that matches planted lines like the files' lines, but not with their translations."""
    pair_indices = np.arange(search.num_planted)
    excluded_targets = search.excluded_targets.copy()
    excluded_sources = search.excluded_sources.copy()
    excluded_targets[search.num_sources :] = search.num_targets + pair_indices
    excluded_sources[search.num_targets :] = search.num_sources + pair_indices
    return Search(search.forward, search.backward, excluded_targets, excluded_sources, num_planted=0)


def _count_at_least(values: np.ndarray, limits: np.ndarray) -> np.ndarray:
    """Return the number (N,) of values that reach each limit."""
    return len(values) - np.searchsorted(np.sort(values), limits)

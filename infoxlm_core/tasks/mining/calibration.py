"""Choose the lowest margin of mined pairs by means of planted pairs: known translations, added to the two files.

All lines are matched twice:

1. With the planted pairs. The share of them that is matched is the recall.
2. With the rule that no planted line is matched with its own translation. Planted lines are then lines without a
   translation, so every match of a planted line is wrong.

The first matching alone would overestimate the precision, because every planted line has a translation, while most
lines of the files have none.
"""

from typing import NamedTuple

import numpy as np

from infoxlm_core.errors import InputError
from infoxlm_core.tasks.mining.matching import Matches, Search, match_lines

FEWEST_PAIRS = 100  # planted pairs; with fewer, the precisions 95 % and 90 % cannot be distinguished

# A larger share of false matches tells little about the number of translated lines, and its error is multiplied.
MOST_FALSE_MATCHES = 0.5


class Curves(NamedTuple):
    """Number and quality of the pairs from each of N margins up."""

    margins: np.ndarray  # (N,) ascending
    num_pairs: np.ndarray  # (N,) pairs of the files
    precision: np.ndarray  # (N,) lower bound of the share of right pairs
    recall: np.ndarray  # (N,) share of the planted pairs

    def look_up(self, margin: float) -> dict[str, float]:
        """Return the values of the curves at the first margin that is not below `margin`."""
        row = min(int(np.searchsorted(self.margins, margin)), len(self.margins) - 1)
        return {
            "margin": float(self.margins[row]),
            "pairs": int(self.num_pairs[row]),
            "precision": float(self.precision[row]),
            "recall": float(self.recall[row]),
        }


def estimate(search: Search, matches: Matches) -> Curves:
    """Estimate precision and recall of the matches of the files at each of their margins."""
    margins = np.unique(matches.margins)
    num_pairs = _count_at_least(matches.margins, margins)
    num_planted = search.num_planted

    # The first matching: planted lines may be matched with their translations.
    first = match_lines(search._replace(num_planted=0))
    planted_sources = first.sources - search.num_sources  # number of the planted pair; negative for lines of the file
    planted_targets = first.targets - search.num_targets
    is_planted_source = planted_sources >= 0
    is_planted_target = planted_targets >= 0
    is_right = is_planted_source & (planted_sources == planted_targets)
    recall = _count_at_least(first.margins[is_right], margins) / num_planted
    mismatched_sources = _estimate_share(first.margins[is_planted_source & ~is_right], margins, num_planted)
    mismatched_targets = _estimate_share(first.margins[is_planted_target & ~is_right], margins, num_planted)

    # The second matching: every match of a planted line is false.
    second = match_lines(_forbid_planted_pairs(search))
    is_false_source = second.sources >= search.num_sources
    is_false_target = second.targets >= search.num_targets
    false_sources = _estimate_share(second.margins[is_false_source], margins, num_planted)
    false_targets = _estimate_share(second.margins[is_false_target], margins, num_planted)
    wrong_by_sources = bound_wrong_pairs(num_pairs, search.num_sources, false_sources, mismatched_sources, num_planted)
    wrong_by_targets = bound_wrong_pairs(num_pairs, search.num_targets, false_targets, mismatched_targets, num_planted)
    num_wrong = (wrong_by_sources + wrong_by_targets) / 2  # both estimate the same number
    precision = np.clip(1 - num_wrong / num_pairs, 0, 1)
    return Curves(margins, num_pairs, precision, recall)


def _estimate_share(planted_margins: np.ndarray, margins: np.ndarray, num_planted: int) -> np.ndarray:
    """Return the share of planted lines that are matched from each margin up, (N,)."""
    # One match and one line without a match are added, because a count of 0 may be chance.
    return (_count_at_least(planted_margins, margins) + 1) / (num_planted + 2)


def bound_wrong_pairs(
    num_pairs: np.ndarray, num_lines: int, false_matches: np.ndarray, mismatches: np.ndarray, num_planted: int
) -> np.ndarray:
    """Return an upper bound of the number of wrong pairs from each margin up, (N,).

    Let T of the `num_lines` lines of a file have a translation in the other file. The wrong pairs are those of lines
    without a translation and those of lines that are matched with another line than their translation:

        wrong = (num_lines - T) * false_matches + T * mismatches

    T is not known, but it has a lower bound. A line with a translation is in at most one pair, so that

        num_pairs <= T + (num_lines - T) * false_matches

    The inequality is solved for T at every margin, and the largest solution is used. It assumes nothing about the
    recall. It assumes that lines of the file are matched as often as planted lines if they have no translation.

    `false_matches` is a share of `num_planted` lines. The solution uses this share plus two standard errors, and only
    margins where the sum is at most one half. Otherwise, the largest solution would often be an error of sampling.

    Args:
        num_pairs: (N,) pairs of the files from each margin up.
        num_lines: lines of one of the files.
        false_matches: (N,) share of the lines without a translation that are matched, below 1.
        mismatches: (N,) share of the lines with a translation that are matched with another line.
        num_planted: number of planted lines, of which `false_matches` is a share.
    """
    standard_error = np.sqrt(false_matches * (1 - false_matches) / num_planted)
    upper_share = false_matches + 2 * standard_error
    is_certain = upper_share <= MOST_FALSE_MATCHES
    translated_lines = (num_pairs - num_lines * upper_share)[is_certain] / (1 - upper_share[is_certain])
    num_translated = translated_lines.max(initial=0.0)
    return (num_lines - num_translated) * false_matches + num_translated * mismatches


def choose_margin(curves: Curves, precision: float) -> float:
    """Return the lowest margin with at least this precision. Raise InputError if no margin has it."""
    is_precise = curves.precision >= precision
    if not is_precise.any():
        best = curves.look_up(float(curves.margins[curves.precision.argmax()]))
        raise InputError(
            f"no margin has precision {precision}: the highest is {best['precision']:.3f} at margin "
            f"{best['margin']:.4f}, with {best['pairs']} pairs: lower --precision, or give more pairs to --calibrate"
        )
    return float(curves.margins[is_precise.argmax()])


def _forbid_planted_pairs(search: Search) -> Search:
    """Return a search that matches planted lines like those of the files, but never with their own translation."""
    planted = np.arange(search.num_planted)
    source_twins = search.source_twins.copy()
    target_twins = search.target_twins.copy()
    source_twins[search.num_sources :] = search.num_targets + planted
    target_twins[search.num_targets :] = search.num_sources + planted
    return Search(search.forward, search.backward, source_twins, target_twins, num_planted=0)


def _count_at_least(values: np.ndarray, limits: np.ndarray) -> np.ndarray:
    """Return how many values are at least as high as each limit, (N,)."""
    return len(values) - np.searchsorted(np.sort(values), limits)

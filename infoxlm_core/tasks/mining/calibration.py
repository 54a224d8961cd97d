"""Choose a margin by planted pairs: translation pairs that are added to two files before their lines are matched.

Planted pairs tell how many translations are found (recall). They do not tell how many lines without a translation are
matched with something, for every planted line has a translation. So the lines are matched a second time, while no
planted line may be matched with its own translation: each planted line is then a line without translation. The share of
them that is matched anyway, times the number of lines of the file, is the expected number of wrong pairs. It assumes
that no line of the files has a translation, so the estimated precision is a lower bound.
"""

from typing import NamedTuple

import numpy as np

from infoxlm_core.errors import InputError
from infoxlm_core.tasks.mining.matching import Matches, leave_out, match
from infoxlm_core.tasks.mining.neighbours import Neighbours

FEWEST_PAIRS = 100  # planted pairs; fewer do not tell 95 % from 90 %


class Search(NamedTuple):
    """The neighbours of the lines of two files, followed by those of the planted lines, pair by pair."""

    forward: Neighbours  # of the lines of the first file
    backward: Neighbours
    source_twins: np.ndarray  # (N,) row of the target that has the same text as a source, or -1
    target_twins: np.ndarray  # (M,) the same for targets
    num_planted: int

    @property
    def num_sources(self) -> int:
        """The number of lines of the first file, without planted ones."""
        return len(self.source_twins) - self.num_planted

    @property
    def num_targets(self) -> int:
        """Lines of the second file, without planted ones."""
        return len(self.target_twins) - self.num_planted


class Curves(NamedTuple):
    """What is mined from each margin up."""

    margins: np.ndarray  # (N,) ascending
    num_pairs: np.ndarray  # (N,) pairs of the files
    precision: np.ndarray  # (N,) lower bound of the share of right pairs
    recall: np.ndarray  # (N,) share of the planted pairs

    def at(self, margin: float) -> dict[str, float]:
        """Return the values at the first margin that is not lower."""
        row = min(int(np.searchsorted(self.margins, margin)), len(self.margins) - 1)
        return {
            "margin": float(self.margins[row]),
            "pairs": int(self.num_pairs[row]),
            "precision": float(self.precision[row]),
            "recall": float(self.recall[row]),
        }


def match_lines(search: Search) -> Matches:
    """Match the lines of the files; planted lines count as neighbours only."""
    forward = leave_out(search.forward, search.source_twins)
    backward = leave_out(search.backward, search.target_twins)
    return match(forward, backward, search.num_sources, search.num_targets)


def estimate(search: Search, matches: Matches) -> Curves:
    """Estimate precision and recall of the matches of the files at each of their margins."""
    margins = np.unique(matches.margins)
    num_pairs = _count_from(matches.margins, margins)
    planted = _match_planted(search, search.source_twins, search.target_twins)
    is_right = planted.sources - search.num_sources == planted.targets - search.num_targets
    is_right &= planted.sources >= search.num_sources
    recall = _count_from(planted.margins[is_right], margins) / search.num_planted

    source_partners = search.source_twins.copy()
    target_partners = search.target_twins.copy()
    source_partners[search.num_sources :] = np.arange(search.num_planted) + search.num_targets
    target_partners[search.num_targets :] = np.arange(search.num_planted) + search.num_sources
    decoys = _match_planted(search, source_partners, target_partners)
    matched_sources = _count_from(decoys.margins[decoys.sources >= search.num_sources], margins)
    matched_targets = _count_from(decoys.margins[decoys.targets >= search.num_targets], margins)
    # Both files give an estimate of the same number of wrong pairs. One is added because a number may be 0 by chance.
    wrong_by_sources = search.num_sources * (matched_sources + 1) / search.num_planted
    wrong_by_targets = search.num_targets * (matched_targets + 1) / search.num_planted
    num_wrong = (wrong_by_sources + wrong_by_targets) / 2
    precision = np.clip(1 - num_wrong / num_pairs, 0, 1)
    return Curves(margins, num_pairs, precision, recall)


def choose_margin(curves: Curves, precision: float) -> float:
    """Return the lowest margin with at least this precision; InputError if no margin has it."""
    is_precise = curves.precision >= precision
    if not is_precise.any():
        best = curves.at(float(curves.margins[curves.precision.argmax()]))
        raise InputError(
            f"no margin has precision {precision}: the highest is {best['precision']:.3f} at margin "
            f"{best['margin']:.4f}, with {best['pairs']} pairs: lower --precision, or give more pairs to --calibrate"
        )
    return float(curves.margins[is_precise.argmax()])


def _match_planted(search: Search, source_partners: np.ndarray, target_partners: np.ndarray) -> Matches:
    """Match all lines and planted lines, but none with its partner."""
    forward = leave_out(search.forward, source_partners)
    backward = leave_out(search.backward, target_partners)
    return match(forward, backward, len(source_partners), len(target_partners))


def _count_from(values: np.ndarray, limits: np.ndarray) -> np.ndarray:
    """Return how many of the values are at least each limit, (N,)."""
    return len(values) - np.searchsorted(np.sort(values), limits)

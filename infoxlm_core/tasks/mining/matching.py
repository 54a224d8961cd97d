"""Match the lines of two files one to one by the ratio margin of their vectors (Artetxe and Schwenk 2019).

The margin divides the cosine of two lines by the mean of the cosines to their nearest neighbours. The best candidates
of all lines, in both directions, are sorted by margin. A candidate is matched if neither of its lines is in a pair with
a higher margin.
"""

from typing import NamedTuple

import numpy as np

from infoxlm_core.tasks.mining.neighbours import Neighbours
from infoxlm_core.tasks.retrieval.nearest import ratio_margin


class Search(NamedTuple):
    """The neighbours of the lines of two files. The last lines are the planted ones, in the order of their pairs."""

    forward: Neighbours  # the nearest targets of each source
    backward: Neighbours  # the nearest sources of each target
    source_twins: np.ndarray  # (N,) row of the target with the same text as each source, or -1
    target_twins: np.ndarray  # (M,) row of the source with the same text as each target, or -1
    num_planted: int

    @property
    def num_sources(self) -> int:
        """The number of lines of the first file."""
        return len(self.source_twins) - self.num_planted

    @property
    def num_targets(self) -> int:
        """The number of lines of the second file."""
        return len(self.target_twins) - self.num_planted


class Matches(NamedTuple):
    """Pairs of lines, the highest margin first. A line is in at most one pair."""

    margins: np.ndarray  # (N,) float32
    sources: np.ndarray  # (N,) rows of the sources
    targets: np.ndarray  # (N,) rows of the targets


def match_lines(search: Search) -> Matches:
    """Match the lines of the files, but no equal texts. Planted lines are not matched, but count as neighbours."""
    forward = remove_partners(search.forward, search.source_twins)
    backward = remove_partners(search.backward, search.target_twins)
    return match_greedily(forward, backward, search.num_sources, search.num_targets)


def remove_partners(neighbours: Neighbours, partners: np.ndarray) -> Neighbours:
    """Remove the partner of each vector from its neighbours, or the farthest one if the partner is not among them.

    Args:
        neighbours: the k nearest vectors of each of N vectors.
        partners: (N,) the row of each vector's partner in the other set; -1 for none.

    Returns:
        k - 1 neighbours of each vector.
    """
    is_partner = neighbours.rows == partners[:, None]  # (N, k)
    partners_last = np.argsort(is_partner, axis=1, kind="stable")
    columns = partners_last[:, :-1]
    cosines = np.take_along_axis(neighbours.cosines, columns, axis=1)
    rows = np.take_along_axis(neighbours.rows, columns, axis=1)
    return Neighbours(cosines, rows)


def match_greedily(forward: Neighbours, backward: Neighbours, num_sources: int, num_targets: int) -> Matches:
    """Match the first `num_sources` sources with the first `num_targets` targets, the highest margin first.

    Args:
        forward: the nearest targets of each source.
        backward: the nearest sources of each target.
        num_sources: further sources count as neighbours, but are not matched.
        num_targets: the same for targets.
    """
    source_means = forward.cosines.mean(axis=1)
    target_means = backward.cosines.mean(axis=1)
    forward_margins, best_targets = _choose_best(forward, source_means, target_means, num_sources, num_targets)
    backward_margins, best_sources = _choose_best(backward, target_means, source_means, num_targets, num_sources)
    margins = np.concatenate([forward_margins, backward_margins])
    sources = np.concatenate([np.arange(num_sources), best_sources])
    targets = np.concatenate([best_targets, np.arange(num_targets)])
    order = np.lexsort((targets, sources, -margins))  # the highest margin first; of equals, the lowest rows
    is_source_free = np.ones(num_sources, bool)
    is_target_free = np.ones(num_targets, bool)
    matched_candidates = []
    for candidate in order[np.isfinite(margins[order])].tolist():
        source = sources[candidate]
        target = targets[candidate]
        if is_source_free[source] and is_target_free[target]:
            is_source_free[source] = False
            is_target_free[target] = False
            matched_candidates.append(candidate)
    return Matches(margins[matched_candidates], sources[matched_candidates], targets[matched_candidates])


def _choose_best(
    neighbours: Neighbours, means: np.ndarray, candidate_means: np.ndarray, num_queries: int, num_candidates: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the highest margin of each query, (num_queries,), and the row of its candidate.

    Args:
        neighbours: the nearest candidates of the queries.
        means: mean cosine of each query to its neighbours.
        candidate_means: the same for the candidates.
        num_queries: number of the first queries, which get a candidate.
        num_candidates: number of the first candidates, which may be chosen. A query without any of them as a neighbour
            has the margin -inf.
    """
    rows = neighbours.rows[:num_queries]
    margins = ratio_margin(neighbours.cosines[:num_queries], means[:num_queries, None], candidate_means[rows])
    margins[rows >= num_candidates] = -np.inf
    best_columns = margins.argmax(axis=1)
    queries = np.arange(num_queries)
    return margins[queries, best_columns], rows[queries, best_columns]

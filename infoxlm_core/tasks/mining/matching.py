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
    excluded_targets: np.ndarray  # (N,) row of the target that each source must not be matched with; -1 for none
    excluded_sources: np.ndarray  # (M,) the same for each target
    num_planted: int

    @property
    def num_sources(self) -> int:
        """The number of lines of the first file."""
        return len(self.excluded_targets) - self.num_planted

    @property
    def num_targets(self) -> int:
        """The number of lines of the second file."""
        return len(self.excluded_sources) - self.num_planted


class Matches(NamedTuple):
    """Pairs of lines, the highest margin first. A line is in at most one pair."""

    margins: np.ndarray  # (N,) float32
    sources: np.ndarray  # (N,) rows of the sources
    targets: np.ndarray  # (N,) rows of the targets


def match_lines(search: Search) -> Matches:
    """Match the lines of the files, without excluded pairs. Planted lines are not matched, but count as neighbours."""
    forward = remove_excluded(search.forward, search.excluded_targets)
    backward = remove_excluded(search.backward, search.excluded_sources)
    return match_greedily(forward, backward, search.num_sources, search.num_targets)


def remove_excluded(neighbours: Neighbours, excluded_rows: np.ndarray) -> Neighbours:
    """Remove an excluded row from the k neighbours of each of N vectors, so that k - 1 neighbours remain.

    If the excluded row is not among the neighbours, the farthest one is removed instead.

    Args:
        neighbours: the k nearest vectors of each vector.
        excluded_rows: (N,) the row to remove; -1 for none.
    """
    is_excluded = neighbours.rows == excluded_rows[:, None]  # (N, k)
    order = np.argsort(is_excluded, axis=1, kind="stable")  # puts the excluded neighbour last
    columns = order[:, :-1]
    cosines = np.take_along_axis(neighbours.cosines, columns, axis=1)
    rows = np.take_along_axis(neighbours.rows, columns, axis=1)
    return Neighbours(cosines, rows)


def match_greedily(forward: Neighbours, backward: Neighbours, num_sources: int, num_targets: int) -> Matches:
    """Match the first `num_sources` sources with the first `num_targets` targets, the highest margin first.

    The other sources and targets count as neighbours, but are not matched.

    Args:
        forward: the nearest targets of each source.
        backward: the nearest sources of each target.
        num_sources: number of sources to match.
        num_targets: number of targets to match.
    """
    source_means = forward.cosines.mean(axis=1)
    target_means = backward.cosines.mean(axis=1)
    forward_margins, best_targets = _find_best_margins(forward, source_means, target_means, num_sources, num_targets)
    backward_margins, best_sources = _find_best_margins(backward, target_means, source_means, num_targets, num_sources)
    margins = np.concatenate([forward_margins, backward_margins])
    sources = np.concatenate([np.arange(num_sources), best_sources])
    targets = np.concatenate([best_targets, np.arange(num_targets)])
    order = np.lexsort((targets, sources, -margins))  # the highest margin first; of equals, the lowest rows
    is_source_matched = np.zeros(num_sources, bool)
    is_target_matched = np.zeros(num_targets, bool)
    matches = []
    for candidate in order[np.isfinite(margins[order])].tolist():
        source = sources[candidate]
        target = targets[candidate]
        if is_source_matched[source] or is_target_matched[target]:
            continue
        is_source_matched[source] = True
        is_target_matched[target] = True
        matches.append(candidate)
    return Matches(margins[matches], sources[matches], targets[matches])


def _find_best_margins(
    neighbours: Neighbours,
    query_means: np.ndarray,
    candidate_means: np.ndarray,
    num_queries: int,
    num_candidates: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the highest margin of each of the first queries, (num_queries,), and the row of its candidate.

    Args:
        neighbours: the nearest candidates of the queries.
        query_means: mean cosine of each query to its neighbours.
        candidate_means: mean cosine of each candidate to its neighbours.
        num_queries: number of queries that need a candidate.
        num_candidates: only the first candidates may be chosen. A query without such a neighbour has the margin -inf.
    """
    cosines = neighbours.cosines[:num_queries]  # (num_queries, k)
    rows = neighbours.rows[:num_queries]  # (num_queries, k)
    margins = ratio_margin(cosines, query_means[:num_queries, None], candidate_means[rows])
    margins[rows >= num_candidates] = -np.inf
    best_columns = margins.argmax(axis=1)
    queries = np.arange(num_queries)
    return margins[queries, best_columns], rows[queries, best_columns]

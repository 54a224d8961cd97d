"""Match the lines of two files one to one by the ratio margin of their vectors (Artetxe and Schwenk 2019).

The margin divides the cosine between two lines by the mean cosine to the nearest neighbours of both lines. The best
candidate pairs of all lines, in both directions, are sorted by margin. A candidate pair is matched if no match with a
higher margin contains one of its lines.
"""

from typing import NamedTuple

import numpy as np

from infoxlm_core.tasks.mining.neighbours import Neighbours
from infoxlm_core.tasks.retrieval.nearest import ratio_margin


class Search(NamedTuple):
    """The neighbours of the lines of two files. Planted lines follow the files' lines, in the order of their pairs."""

    forward: Neighbours  # the nearest targets of each source
    backward: Neighbours  # the nearest sources of each target
    excluded_targets: np.ndarray  # (N,) row of the target that must not be matched with source i, or -1
    excluded_sources: np.ndarray  # (M,) row of the source that must not be matched with target i, or -1
    num_planted: int

    @property
    def num_sources(self) -> int:
        """The number of lines in the first file."""
        return len(self.excluded_targets) - self.num_planted

    @property
    def num_targets(self) -> int:
        """The number of lines in the second file."""
        return len(self.excluded_sources) - self.num_planted


class Matches(NamedTuple):
    """Pairs of lines, in descending order of margin. A line is in at most one pair."""

    margins: np.ndarray  # (N,) float32
    sources: np.ndarray  # (N,) source rows
    targets: np.ndarray  # (N,) target rows


def match_lines(search: Search) -> Matches:
    """Match the files' lines, except excluded pairs. Planted lines count as neighbours only."""
    forward = remove_excluded(search.forward, search.excluded_targets)
    backward = remove_excluded(search.backward, search.excluded_sources)
    return match_greedily(forward, backward, search.num_sources, search.num_targets)


def remove_excluded(neighbours: Neighbours, excluded_rows: np.ndarray) -> Neighbours:
    """Remove one of the k neighbours of each of N vectors: the vector's excluded row or else the farthest neighbour.

    `excluded_rows` (N,) is -1 for vectors without an excluded row.
    """
    is_excluded = neighbours.rows == excluded_rows[:, None]  # (N, k)
    order = np.argsort(is_excluded, axis=1, kind="stable")  # moves the excluded neighbour to the end
    columns = order[:, :-1]
    cosines = np.take_along_axis(neighbours.cosines, columns, axis=1)
    rows = np.take_along_axis(neighbours.rows, columns, axis=1)
    return Neighbours(cosines, rows)


def match_greedily(forward: Neighbours, backward: Neighbours, num_sources: int, num_targets: int) -> Matches:
    """Match the first `num_sources` sources with the first `num_targets` targets, in descending order of margin.

    All further sources and targets are planted lines, which affect the margins but are not matched. `forward` has the
    nearest targets of each source, and `backward` has the nearest sources of each target.
    """
    source_means = forward.cosines.mean(axis=1)
    target_means = backward.cosines.mean(axis=1)
    forward_margins, best_targets = _find_best_margins(forward, source_means, target_means, num_sources, num_targets)
    backward_margins, best_sources = _find_best_margins(backward, target_means, source_means, num_targets, num_sources)
    margins = np.concatenate([forward_margins, backward_margins])
    sources = np.concatenate([np.arange(num_sources), best_sources])
    targets = np.concatenate([best_targets, np.arange(num_targets)])
    order = np.lexsort((targets, sources, -margins))  # descending margins; equal margins by row
    is_source_matched = np.zeros(num_sources, bool)
    is_target_matched = np.zeros(num_targets, bool)
    matches = []
    # A line whose neighbours are all planted lines has the margin -inf.
    for pair_index in order[np.isfinite(margins[order])].tolist():
        source = sources[pair_index]
        target = targets[pair_index]
        if is_source_matched[source] or is_target_matched[target]:
            continue
        is_source_matched[source] = True
        is_target_matched[target] = True
        matches.append(pair_index)
    return Matches(margins[matches], sources[matches], targets[matches])


def _find_best_margins(
    neighbours: Neighbours, query_means: np.ndarray, candidate_means: np.ndarray, num_queries: int, num_candidates: int
) -> tuple[np.ndarray, np.ndarray]:
    """Find the candidate with the highest margin for each of the first `num_queries` queries.

    Args:
        neighbours: the nearest candidates of each query.
        query_means: mean cosine between each query and its neighbours.
        candidate_means: mean cosine between each candidate and its neighbours.
        num_queries: number of queries to match; later queries are planted lines.
        num_candidates: number of candidates to choose from; later candidates are planted lines.

    Returns:
        The margins and the candidates' rows, both (num_queries,). The margin is -inf if all neighbours of the query are
        planted lines.
    """
    cosines = neighbours.cosines[:num_queries]  # (num_queries, k)
    rows = neighbours.rows[:num_queries]  # (num_queries, k)
    margins = ratio_margin(cosines, query_means[:num_queries, None], candidate_means[rows])
    margins[rows >= num_candidates] = -np.inf
    best_columns = margins.argmax(axis=1)
    queries = np.arange(num_queries)
    return margins[queries, best_columns], rows[queries, best_columns]

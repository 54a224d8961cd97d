"""Which lines are matched, on cosines that a reader can check by hand."""

import numpy as np

from infoxlm_core.tasks.mining.matching import Matches, match_greedily, remove_excluded
from infoxlm_core.tasks.mining.neighbours import Neighbours


def find_nearest(cosines: np.ndarray) -> Neighbours:
    """Return the four nearest candidates of each query."""
    rows = np.argsort(-cosines, axis=1, kind="stable")[:, :4]
    return Neighbours(np.take_along_axis(cosines, rows, axis=1), rows)


def match(cosines: np.ndarray, num_sources: int, num_targets: int) -> Matches:
    return match_greedily(find_nearest(cosines), find_nearest(cosines.T), num_sources, num_targets)


def list_pairs(matches: Matches) -> list[tuple[int, int]]:
    return list(zip(matches.sources.tolist(), matches.targets.tolist(), strict=True))


def mine_as_laser(cosines: np.ndarray) -> dict[tuple[int, int], float]:
    """Return the margin of each pair of LASER's `mine_bitexts.py --mode mine --retrieval max --margin ratio -k 4`."""
    forward = find_nearest(cosines)
    backward = find_nearest(cosines.T)
    neighbour_means = forward.cosines.mean(axis=1)[:, None] + backward.cosines.mean(axis=1)
    margins = cosines / (neighbour_means / 2)
    candidates = set()
    for source, targets in enumerate(forward.rows):
        candidates.add((source, int(targets[margins[source, targets].argmax()])))
    for target, sources in enumerate(backward.rows):
        candidates.add((int(sources[margins[sources, target].argmax()]), target))
    mined: dict[tuple[int, int], float] = {}
    for source, target in sorted(candidates, key=lambda pair: -margins[pair]):
        if all(source != mined_source and target != mined_target for mined_source, mined_target in mined):
            mined[source, target] = margins[source, target]
    return mined


def test_matches_are_those_of_laser():
    cosines = np.random.default_rng(1).uniform(0.3, 0.9, size=(60, 45))

    matches = match(cosines, 60, 45)

    expected = mine_as_laser(cosines)
    assert list_pairs(matches) == list(expected)
    np.testing.assert_allclose(matches.margins, list(expected.values()))
    assert len(set(matches.sources)) == len(set(matches.targets)) == len(expected) < 45


def test_planted_lines_count_as_neighbours_but_are_not_matched():
    """The best target of source 0 is target 2, which is planted: source 0 gets target 1, with an unchanged margin."""
    cosines = np.array([[0.2, 0.6, 0.9], [0.8, 0.3, 0.1]])

    all_matches = match(cosines, 2, 3)
    matches_without_planted = match(cosines, 2, 2)

    assert list_pairs(all_matches) == [(1, 0), (0, 2)]
    assert list_pairs(matches_without_planted) == [(1, 0), (0, 1)]
    expected_margins = [0.8 / ((0.4 + 0.5) / 2), 0.6 / ((1.7 / 3 + 0.45) / 2)]
    np.testing.assert_allclose(matches_without_planted.margins, expected_margins)


def test_an_excluded_row_is_removed_from_the_neighbours():
    neighbours = Neighbours(np.array([[0.9, 0.8, 0.7, 0.6, 0.5]] * 3), np.array([[7, 2, 4, 1, 3]] * 3))

    remaining = remove_excluded(neighbours, np.array([-1, 2, 3]))

    assert remaining.rows.tolist() == [[7, 2, 4, 1], [7, 4, 1, 3], [7, 2, 4, 1]]
    assert remaining.cosines.tolist() == [[0.9, 0.8, 0.7, 0.6], [0.9, 0.7, 0.6, 0.5], [0.9, 0.8, 0.7, 0.6]]

"""Which lines are matched, on cosines that a reader can check by hand."""

import numpy as np

from infoxlm_core.tasks.mining.matching import leave_out, match
from infoxlm_core.tasks.mining.neighbours import Neighbours


def nearest(cosines: np.ndarray, k: int = 4) -> Neighbours:
    rows = np.argsort(-cosines, axis=1, kind="stable")[:, :k]
    return Neighbours(np.take_along_axis(cosines, rows, axis=1), rows)


def mine_as_laser(cosines: np.ndarray) -> list[tuple[float, int, int]]:
    """LASER's `mine_bitexts.py --mode mine --retrieval max --margin ratio -k 4`, in plain loops."""
    forward, backward = nearest(cosines), nearest(cosines.T)
    forward_means, backward_means = forward.cosines.mean(axis=1), backward.cosines.mean(axis=1)
    margin = {
        (x, y): cosines[x, y] / ((forward_means[x] + backward_means[y]) / 2)
        for x in range(cosines.shape[0]) for y in range(cosines.shape[1])
    }  # fmt: skip
    pairs = {max(((x, y) for y in row), key=margin.__getitem__) for x, row in enumerate(forward.rows.tolist())}
    pairs |= {max(((x, y) for x in row), key=margin.__getitem__) for y, row in enumerate(backward.rows.tolist())}
    mined, used_sources, used_targets = [], set(), set()
    for x, y in sorted(pairs, key=lambda pair: -margin[pair]):
        if x not in used_sources and y not in used_targets:
            used_sources.add(x)
            used_targets.add(y)
            mined.append((margin[x, y], x, y))
    return mined


def test_matches_are_those_of_laser():
    cosines = np.random.default_rng(1).uniform(0.3, 0.9, size=(60, 45))

    matches = match(nearest(cosines), nearest(cosines.T), 60, 45)

    expected = mine_as_laser(cosines)
    assert list(zip(matches.sources, matches.targets, strict=True)) == [(x, y) for _, x, y in expected]
    np.testing.assert_allclose(matches.margins, [margin for margin, _, _ in expected])
    assert len(set(matches.sources)) == len(set(matches.targets)) == len(expected) < 45


def test_lines_beyond_a_number_count_as_neighbours_and_are_not_matched():
    """The best target of source 0 is target 2, which is planted: source 0 gets target 1, with an unchanged margin."""
    cosines = np.array([[0.2, 0.6, 0.9], [0.8, 0.3, 0.1]])

    everything = match(nearest(cosines), nearest(cosines.T), 2, 3)
    without_planted = match(nearest(cosines), nearest(cosines.T), 2, 2)

    assert list(zip(everything.sources, everything.targets, strict=True)) == [(1, 0), (0, 2)]
    assert list(zip(without_planted.sources, without_planted.targets, strict=True)) == [(1, 0), (0, 1)]
    np.testing.assert_allclose(without_planted.margins, [0.8 / ((0.4 + 0.5) / 2), 0.6 / ((1.7 / 3 + 0.45) / 2)])


def test_a_partner_is_no_neighbour():
    neighbours = Neighbours(np.array([[0.9, 0.8, 0.7, 0.6, 0.5]] * 3), np.array([[7, 2, 4, 1, 3]] * 3))

    remaining = leave_out(neighbours, np.array([-1, 2, 3]))

    assert remaining.rows.tolist() == [[7, 2, 4, 1], [7, 4, 1, 3], [7, 2, 4, 1]]
    assert remaining.cosines.tolist() == [[0.9, 0.8, 0.7, 0.6], [0.9, 0.7, 0.6, 0.5], [0.9, 0.8, 0.7, 0.6]]

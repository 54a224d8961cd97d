"""The neighbours of both directions, from blocks of vectors and from an index."""

import numpy as np
import pytest

from infoxlm_core.errors import InputError
from infoxlm_core.tasks.mining import neighbours
from infoxlm_core.tasks.mining.neighbours import check_size, find_neighbours


def units(count: int, seed: int) -> np.ndarray:
    """Vectors around 60 centres, as those of sentences about 60 subjects."""
    centres = np.random.default_rng(0).normal(size=(60, 16))
    random = np.random.default_rng(seed)
    vectors = centres[random.integers(60, size=count)] + 0.5 * random.normal(size=(count, 16))
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float16)


def test_the_neighbours_of_both_directions_are_those_of_brute_force(monkeypatch):
    sources, targets = units(70, 1), units(41, 2)
    monkeypatch.setattr(neighbours, "BLOCK", 16)

    forward, backward = find_neighbours([sources[:25], sources[25:]], [targets[:3], targets[3:]])

    cosines = sources.astype(np.float32) @ targets.astype(np.float32).T
    for found, expected in ((forward, cosines), (backward, cosines.T)):
        assert found.rows.tolist() == np.argsort(-expected, axis=1)[:, :5].tolist()
        np.testing.assert_allclose(found.cosines, -np.sort(-expected, axis=1)[:, :5], atol=1e-6)


def test_a_set_of_fewer_vectors_than_neighbours_has_all_of_them():
    forward, backward = find_neighbours([units(9, 1)], [units(3, 2)])

    assert (forward.rows.shape, backward.rows.shape) == ((9, 3), (3, 5))
    assert np.isfinite(forward.cosines).all() and np.sort(forward.rows, axis=1).tolist() == [[0, 1, 2]] * 9


def test_an_index_finds_almost_all_neighbours(monkeypatch):
    pytest.importorskip("faiss")
    sources, targets = [units(3000, 1)], [units(2500, 2), units(500, 3)]
    exact, _ = find_neighbours(sources, targets)
    monkeypatch.setattr(neighbours, "MAX_EXACT", 100)
    monkeypatch.setattr(neighbours, "PROBED_CELLS", 20)

    forward, backward = find_neighbours(sources, targets)

    is_found = (forward.rows[:, :, None] == exact.rows[:, None, :4]).any(axis=1)
    assert 0.9 < is_found.mean() < 1 and backward.rows.shape == (3000, 5)
    np.testing.assert_allclose(forward.cosines[:, 0], exact.cosines[:, 0], atol=0.1)


def test_a_query_whose_visited_cells_have_too_few_vectors_is_searched_in_all_cells(monkeypatch):
    pytest.importorskip("faiss")
    monkeypatch.setattr(neighbours, "MAX_EXACT", 100)
    monkeypatch.setattr(neighbours, "TRAINING_VECTORS", 4)  # 125 cells of about 4 vectors
    monkeypatch.setattr(neighbours, "PROBED_CELLS", 1)

    forward, backward = find_neighbours([units(500, 1)], [units(500, 2)])

    for found in (forward, backward):
        assert found.rows.min() >= 0 and found.cosines.min() > -1
        assert all(len(set(rows)) == 5 for rows in found.rows.tolist())


def test_a_large_set_without_the_library_of_the_index_is_refused_in_one_line(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    check_size(300_000, 2)

    with pytest.raises(InputError, match=r"300,001 sentences are more .* install infoxlm-pipeline\[mining\]"):
        check_size(2, 300_001)

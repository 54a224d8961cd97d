"""The neighbours of both directions, from blocks of vectors and from an index."""

import numpy as np
import pytest

from infoxlm_core.errors import InputError
from infoxlm_core.tasks.mining import neighbours
from infoxlm_core.tasks.mining.neighbours import check_faiss_if_large, find_neighbours


def draw_vectors(count: int, seed: int) -> np.ndarray:
    """Return vectors of length 1 around 60 centres, like those of sentences about 60 subjects."""
    centres = np.random.default_rng(0).normal(size=(60, 16))
    random = np.random.default_rng(seed)
    vectors = centres[random.integers(60, size=count)] + 0.5 * random.normal(size=(count, 16))
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float16)


def test_neighbours_of_both_directions_equal_brute_force(monkeypatch):
    sources = draw_vectors(70, 1)
    targets = draw_vectors(41, 2)
    monkeypatch.setattr(neighbours, "BLOCK", 16)

    forward, backward = find_neighbours([sources[:25], sources[25:]], [targets[:3], targets[3:]])

    cosines = sources.astype(np.float32) @ targets.astype(np.float32).T
    for nearest, all_cosines in ((forward, cosines), (backward, cosines.T)):
        assert nearest.rows.tolist() == np.argsort(-all_cosines, axis=1)[:, :5].tolist()
        np.testing.assert_allclose(nearest.cosines, -np.sort(-all_cosines, axis=1)[:, :5], atol=1e-6)


def test_a_set_with_fewer_vectors_than_neighbours_returns_all_of_them():
    forward, backward = find_neighbours([draw_vectors(9, 1)], [draw_vectors(3, 2)])

    assert (forward.rows.shape, backward.rows.shape) == ((9, 3), (3, 5))
    assert np.isfinite(forward.cosines).all()
    assert np.sort(forward.rows, axis=1).tolist() == [[0, 1, 2]] * 9


def test_an_index_finds_almost_all_neighbours(monkeypatch):
    pytest.importorskip("faiss")
    sources = [draw_vectors(3000, 1)]
    targets = [draw_vectors(2500, 2), draw_vectors(500, 3)]
    exact, _ = find_neighbours(sources, targets)
    monkeypatch.setattr(neighbours, "MAX_EXACT", 100)
    monkeypatch.setattr(neighbours, "PROBED_CELLS", 20)

    forward, backward = find_neighbours(sources, targets)

    is_found = (forward.rows[:, :, None] == exact.rows[:, None, :4]).any(axis=1)
    assert 0.9 < is_found.mean() < 1
    assert backward.rows.shape == (3000, 5)
    np.testing.assert_allclose(forward.cosines[:, 0], exact.cosines[:, 0], atol=0.1)


def test_all_cells_are_searched_if_the_probed_ones_have_too_few_vectors(monkeypatch):
    pytest.importorskip("faiss")
    monkeypatch.setattr(neighbours, "MAX_EXACT", 100)
    monkeypatch.setattr(neighbours, "TRAINING_VECTORS_PER_CELL", 4)  # 125 cells of about 4 vectors
    monkeypatch.setattr(neighbours, "PROBED_CELLS", 1)

    for nearest in find_neighbours([draw_vectors(500, 1)], [draw_vectors(500, 2)]):
        assert nearest.rows.min() >= 0
        assert nearest.cosines.min() > -1
        assert all(len(set(rows)) == 5 for rows in nearest.rows.tolist())


def test_large_sets_without_the_library_of_the_index_are_refused(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    check_faiss_if_large(300_000, 2)

    with pytest.raises(InputError, match=r"300,001 sentences are more .* install infoxlm-pipeline\[mining\]"):
        check_faiss_if_large(2, 300_001)

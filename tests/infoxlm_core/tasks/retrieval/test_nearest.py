"""The nearest candidates, on vectors that a reader can check by hand."""

import pytest
import torch

from infoxlm_core.tasks.retrieval import nearest
from infoxlm_core.tasks.retrieval.nearest import find_nearest, find_nearest_in_both_directions

pytestmark = pytest.mark.item("A23")


@pytest.fixture
def vectors() -> torch.Tensor:
    return torch.randn(50, 8, generator=torch.Generator().manual_seed(1))


def test_identical_vectors_are_always_found(vectors):
    almost_parallel = torch.ones(3, 4).double()
    almost_parallel[:, 0] += torch.tensor([0.0, 1e-5, 2e-5])
    order = torch.randperm(50, generator=torch.Generator().manual_seed(2))

    assert find_nearest(vectors, vectors).tolist() == list(range(50))
    assert find_nearest(vectors[order], vectors).equal(order)
    assert find_nearest(vectors, 3 * vectors[order]).equal(order.argsort())  # the length of vectors does not matter
    assert find_nearest(almost_parallel, almost_parallel).tolist() == [0, 1, 2]


def test_nearest_candidates_equal_brute_force():
    candidates = torch.randn(2000, 8, generator=torch.Generator().manual_seed(3))
    queries = torch.randn(1500, 8, generator=torch.Generator().manual_seed(4))  # more than one chunk

    expected = [torch.cosine_similarity(query, candidates).argmax().item() for query in queries]

    assert find_nearest(queries, candidates).tolist() == expected


@pytest.mark.parametrize("margin", [False, True])
def test_one_matrix_for_both_directions_equals_two_searches(vectors, margin, monkeypatch):
    targets = torch.cat([vectors.roll(3, dims=0) + 0.8 * vectors, vectors[:7]])  # (57, 8), the last seven are ties

    nearest_targets, nearest_sources = find_nearest_in_both_directions(vectors, targets, margin)

    monkeypatch.setattr(nearest, "MATRIX_ROWS", 10)
    for chunk in (1024, 9):
        monkeypatch.setattr(nearest, "CHUNK", chunk)
        searched_targets, searched_sources = find_nearest_in_both_directions(vectors, targets, margin)
        assert searched_targets.equal(nearest_targets)
        assert searched_sources.equal(nearest_sources)


def test_the_ratio_margin_follows_its_formula(vectors):
    queries = vectors[:20]
    candidates = vectors[20:] + 0.3

    def average_neighbours(vector: torch.Tensor, others: torch.Tensor) -> float:
        return torch.cosine_similarity(vector, others).topk(4).values.mean().item()

    expected = []
    for query in queries:
        margins = []
        for candidate in candidates:
            cosine = torch.cosine_similarity(query, candidate, dim=0).item()
            neighbour_means = average_neighbours(query, candidates), average_neighbours(candidate, queries)
            margins.append(cosine / (sum(neighbour_means) / 2))
        expected.append(margins.index(max(margins)))

    assert find_nearest(queries, candidates, margin=True).tolist() == expected
    assert find_nearest(queries, candidates).tolist() != expected


def test_the_margin_disfavours_a_candidate_near_to_every_query():
    """Cosines: each query .75 to the hub, .6 to its translation, .34 to the others'. Margins: 1.19 hub, 1.31 own."""
    axes = torch.eye(11)
    hub = axes[0]
    queries = 0.75 * hub + (1 - 0.75**2) ** 0.5 * axes[1:6]
    candidates = torch.cat([hub.unsqueeze(0), 0.6 * queries + 0.8 * axes[6:11]])

    assert find_nearest(queries, candidates).tolist() == [0, 0, 0, 0, 0]
    assert find_nearest(queries, candidates, margin=True).tolist() == [1, 2, 3, 4, 5]


def test_ties_go_to_the_lowest_index():
    equal_vectors = torch.full((1003, 37), 0.1)  # as [CLS] at the embeddings: one vector for all sentences

    assert find_nearest(equal_vectors, equal_vectors).unique().tolist() == [0]

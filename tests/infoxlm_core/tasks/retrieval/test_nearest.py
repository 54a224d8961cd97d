"""The nearest candidates, on vectors that a reader can check by hand."""

import pytest
import torch

from infoxlm_core.tasks.retrieval import nearest
from infoxlm_core.tasks.retrieval.nearest import find_both, find_nearest


def accuracy(queries: torch.Tensor, candidates: torch.Tensor, targets: torch.Tensor) -> float:
    return (find_nearest(queries, candidates) == targets).double().mean().item()


@pytest.fixture
def vectors() -> torch.Tensor:
    return torch.randn(50, 8, generator=torch.Generator().manual_seed(1))


@pytest.mark.item("A23")
def test_identical_vectors_are_always_found(vectors):
    assert accuracy(vectors, vectors, torch.arange(50)) == 1.0


@pytest.mark.item("A23")
def test_it_equals_brute_force(vectors):
    candidates = torch.randn(2000, 8, generator=torch.Generator().manual_seed(3))
    queries = torch.randn(1500, 8, generator=torch.Generator().manual_seed(4))  # more than one chunk

    expected = [max(range(2000), key=torch.cosine_similarity(q, candidates).tolist().__getitem__) for q in queries]

    assert find_nearest(queries, candidates).tolist() == expected


@pytest.mark.item("A23")
@pytest.mark.parametrize("margin", [False, True])
def test_both_directions_at_once_are_the_two_searches(vectors, margin, monkeypatch):
    targets = torch.cat([vectors.roll(3, dims=0) + 0.8 * vectors, vectors[:7]])  # (57, 8), the last seven are ties

    at_once = find_both(vectors, targets, margin)
    monkeypatch.setattr(nearest, "MATRIX_ROWS", 10)
    one_by_one = find_both(vectors, targets, margin)
    monkeypatch.setattr(nearest, "CHUNK", 9)
    in_chunks = find_both(vectors, targets, margin)

    assert [found.tolist() for found in at_once] == [found.tolist() for found in one_by_one]
    assert [found.tolist() for found in at_once] == [found.tolist() for found in in_chunks]
    assert at_once[0].equal(find_nearest(vectors, targets, margin))
    assert at_once[1].equal(find_nearest(targets, vectors, margin))


@pytest.mark.item("A23")
def test_the_ratio_margin_is_that_of_its_formula(vectors):
    queries, candidates = vectors[:20], vectors[20:] + 0.3

    def neighbours(vector: torch.Tensor, others: torch.Tensor) -> float:
        return sum(sorted(torch.cosine_similarity(vector, others).tolist(), reverse=True)[:4]) / (2 * 4)

    expected = []
    for query in queries:
        ratios = [
            torch.cosine_similarity(query, candidate, dim=0).item()
            / (neighbours(query, candidates) + neighbours(candidate, queries))
            for candidate in candidates
        ]
        expected.append(ratios.index(max(ratios)))

    assert find_nearest(queries, candidates, margin=True).tolist() == expected
    assert find_nearest(queries, candidates).tolist() != expected


def test_by_margin_a_sentence_that_is_near_to_everything_does_not_win():
    """Cosines: each query .75 to the hub, .6 to its translation, .34 to the others'. Margins: 1.19 hub, 1.31 own."""
    axes = torch.eye(11)
    hub, queries = axes[0], 0.75 * axes[0] + (1 - 0.75**2) ** 0.5 * axes[1:6]
    candidates = torch.cat([hub.unsqueeze(0), 0.6 * queries + 0.8 * axes[6:11]])

    assert find_nearest(queries, candidates).tolist() == [0, 0, 0, 0, 0]
    assert find_nearest(queries, candidates, margin=True).tolist() == [1, 2, 3, 4, 5]


@pytest.mark.item("A23")
def test_ties_go_to_the_lowest_index():
    same = torch.full((1003, 37), 0.1)  # as [CLS] at the embeddings: one vector for all sentences

    assert find_nearest(same, same).unique().tolist() == [0]


@pytest.mark.item("A23")
def test_almost_parallel_vectors_are_told_apart():
    candidates = torch.ones(3, 4).double()
    candidates[:, 0] += torch.tensor([0.0, 1e-5, 2e-5])

    assert accuracy(candidates, candidates, torch.arange(3)) == 1.0

"""Find the most similar candidate of each sentence.

Similarity is the cosine or the ratio margin. The ratio margin divides the cosine by the mean of the cosines to the
nearest neighbours of both sentences, so that a sentence that is close to everything is found less often (Artetxe and
Schwenk 2019, equation 3).

Two sides are aligned: row i of one translates row i of the other.
"""

import logging
from collections.abc import Iterable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from infoxlm_core.tasks.embedding import VectorSpec

logger = logging.getLogger(__name__)
Vectors = Mapping[VectorSpec, Tensor]  # (N, d) of each vector of the sentences of one side
Nearest = dict[str, Tensor]  # direction -> (N,) the row that was found for each row

CHUNK = 1024  # queries that are compared at a time; changes memory, not the result
MATRIX_ROWS = 4096  # up to this many sentences a side, one matrix of cosines serves both directions
ROUNDING = 1e-12  # two equal candidates may differ by this much after a matrix product in fp64
NEIGHBOURS = 4  # of the ratio margin


def find_nearest(queries: Tensor, candidates: Tensor, margin: bool = False) -> Tensor:
    """Return the index of the candidate (M, d) most similar to each query (N, d): (N,); ties go to the lowest index.

    Computed in fp64: vectors of untrained or [CLS]-only encoders are almost parallel, so their cosines differ only in
    late digits. With `margin`, neighbours are those among all queries and all candidates.
    """
    neighbour_cosines = _mean_neighbour_cosines(candidates, queries) if margin else None  # (M,)
    candidates, nearest = _normalise(candidates), []
    for chunk in queries.split(CHUNK):
        cosines = _normalise(chunk) @ candidates.T  # (chunk, M)
        if neighbour_cosines is not None:
            cosines = cosines / (_mean_of_highest(cosines).unsqueeze(1) + neighbour_cosines) * 2
        nearest.append(_first_of_best(cosines))
    return torch.cat(nearest)


def find_both(sources: Tensor, targets: Tensor, margin: bool = False) -> tuple[Tensor, Tensor]:
    """Run `find_nearest` in both directions: the target of each source (N, d), and the source of each target (M, d)."""
    if max(len(sources), len(targets)) > MATRIX_ROWS:
        return find_nearest(sources, targets, margin), find_nearest(targets, sources, margin)
    cosines = _normalise(sources) @ _normalise(targets).T  # (N, M)
    if margin:
        cosines = cosines / (_mean_of_highest(cosines).unsqueeze(1) + _mean_of_highest(cosines.T)) * 2
    return _first_of_best(cosines), _first_of_best(cosines.T)


def _normalise(vectors: Tensor) -> Tensor:
    return F.normalize(vectors.double(), dim=1)


def _first_of_best(similarities: Tensor) -> Tensor:
    """(N, M) -> (N,) the lowest index of the highest value of each row."""
    best = similarities.amax(dim=1, keepdim=True) - ROUNDING
    return (similarities >= best).to(torch.uint8).argmax(dim=1)  # argmax returns the first of equals


def _mean_of_highest(cosines: Tensor) -> Tensor:
    """(N, M) -> (N,) mean of the NEIGHBOURS highest of each row."""
    return cosines.topk(min(NEIGHBOURS, cosines.shape[1]), dim=1).values.mean(dim=1)


def _mean_neighbour_cosines(vectors: Tensor, others: Tensor) -> Tensor:
    """Return the mean cosine of each vector (N, d) to its nearest neighbours among the others (M, d): (N,)."""
    others = _normalise(others)
    return torch.cat([_mean_of_highest(_normalise(chunk) @ others.T) for chunk in vectors.split(CHUNK)])


def search(sides: Iterable[tuple[str, Vectors, Vectors]], margin: bool = False) -> dict[str, dict[VectorSpec, Nearest]]:
    """Run `find_both` for every language and vector.

    `sides` yields a language, the vectors of the pivot's sentences, and those of their translations in the same order.
    It is an iterator, because the vectors of all languages may not fit into memory together.
    """
    nearest: dict[str, dict[VectorSpec, Nearest]] = {}
    for language, pivot, translations in sides:
        nearest[language] = {}
        for spec, vectors in pivot.items():
            from_pivot, to_pivot = find_both(vectors, translations[spec], margin)
            nearest[language][spec] = {"from_pivot": from_pivot.cpu(), "to_pivot": to_pivot.cpu()}
        logger.info("retrieved %d pairs of %s", len(next(iter(pivot.values()))), language)
    return nearest


def mark_hits(nearest: Nearest) -> dict[str, Tensor]:
    """Return by direction, (N,) bool, for which rows the translation was found."""
    return {direction: rows == torch.arange(len(rows)) for direction, rows in nearest.items()}


def share(hits: Tensor) -> float:
    """Return the share of (N,) hits; N must not be 0."""
    return hits.double().mean().item()

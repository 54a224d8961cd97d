"""Find the most similar candidate of each sentence.

Similarity is the cosine or the ratio margin. The ratio margin divides the cosine by the mean of the cosines to the
nearest neighbours of both sentences, so that a sentence that is close to everything is found less often (Artetxe and
Schwenk 2019, equation 3).

Sources and targets are aligned: row i of one translates row i of the other.
"""

from collections.abc import Mapping
from typing import TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from infoxlm_core.tasks.embedding import VectorSpec

VectorsBySpec = Mapping[VectorSpec, Tensor]  # (N, d) vectors of the same N sentences
Values = TypeVar("Values", Tensor, np.ndarray)
NearestRows = dict[str, Tensor]  # direction -> (N,) the row of the most similar candidate of each query
Hits = Mapping[str, Tensor]  # direction -> (N,) bool, whether the translation of each query was found

CHUNK = 1024  # queries that are compared at a time; changes memory, not the result
MATRIX_ROWS = 4096  # with more sentences in a language, the matrix of all similarities would not fit into memory
ROUNDING = 1e-12  # similarities of equal candidates may differ by this much after a matrix product in fp64
NEIGHBOURS = 4  # of the ratio margin


def find_nearest(queries: Tensor, candidates: Tensor, margin: bool = False) -> Tensor:
    """Return the row of the most similar candidate of each query, (N,). Ties go to the lowest row.

    Args:
        queries: (N, d).
        candidates: (M, d).
        margin: compare by ratio margin, with neighbours among all queries and all candidates, instead of cosine.
    """
    candidate_means = _average_nearest_cosines(candidates, queries) if margin else None  # (M,)
    normalised_candidates = _normalise(candidates)
    nearest_rows = []
    for query_chunk in queries.split(CHUNK):
        similarities = _normalise(query_chunk) @ normalised_candidates.T  # (chunk, M)
        if candidate_means is not None:
            query_means = _average_highest(similarities)  # (chunk,)
            similarities = ratio_margin(similarities, query_means[:, None], candidate_means)
        nearest_rows.append(_first_of_best(similarities))
    return torch.cat(nearest_rows)


def find_nearest_in_both_directions(sources: Tensor, targets: Tensor, margin: bool = False) -> tuple[Tensor, Tensor]:
    """Return the row of the most similar target of each source, and that of the most similar source of each target.

    Args:
        sources: (N, d).
        targets: (M, d).
        margin: compare by ratio margin instead of cosine.
    """
    if max(len(sources), len(targets)) > MATRIX_ROWS:
        return find_nearest(sources, targets, margin), find_nearest(targets, sources, margin)
    # One matrix serves both directions, which halves the time.
    similarities = _normalise(sources) @ _normalise(targets).T  # (N, M)
    if margin:
        source_means = _average_highest(similarities)  # (N,)
        target_means = _average_highest(similarities.T)  # (M,)
        similarities = ratio_margin(similarities, source_means[:, None], target_means)
    return _first_of_best(similarities), _first_of_best(similarities.T)


def ratio_margin(cosines: Values, query_means: Values, candidate_means: Values) -> Values:
    """Divide each cosine of a query and a candidate by the mean of their mean cosines to their nearest neighbours.

    The shapes of the arguments must broadcast.
    """
    return cosines / (query_means + candidate_means) * 2


def _normalise(vectors: Tensor) -> Tensor:
    """Return the vectors with length 1, in fp64.

    Vectors of untrained encoders are almost parallel, so their cosines differ only in digits that fp32 rounds away.
    """
    return F.normalize(vectors.double(), dim=1)


def _first_of_best(similarities: Tensor) -> Tensor:
    """Return the lowest index of the highest value in each row of (N, M): (N,)."""
    lowest_accepted = similarities.amax(dim=1, keepdim=True) - ROUNDING
    return (similarities >= lowest_accepted).to(torch.uint8).argmax(dim=1)  # argmax returns the first of equals


def _average_highest(cosines: Tensor) -> Tensor:
    """Return the mean of the `NEIGHBOURS` highest values in each row of (N, M): (N,)."""
    return cosines.topk(min(NEIGHBOURS, cosines.shape[1]), dim=1).values.mean(dim=1)


def _average_nearest_cosines(vectors: Tensor, candidates: Tensor) -> Tensor:
    """Return the mean cosine of each vector (N, d) to its nearest neighbours among the candidates (M, d): (N,)."""
    normalised_candidates = _normalise(candidates)
    means = []
    for chunk in vectors.split(CHUNK):
        cosines = _normalise(chunk) @ normalised_candidates.T  # (chunk, M)
        means.append(_average_highest(cosines))
    return torch.cat(means)


def find_nearest_by_spec(
    pivot_vectors: VectorsBySpec, translation_vectors: VectorsBySpec, margin: bool = False
) -> dict[VectorSpec, NearestRows]:
    """Find the nearest sentences in both directions between the pivot and another language, for each kind of vector.

    Args:
        pivot_vectors: vectors of the pivot's sentences.
        translation_vectors: vectors of their translations, in the same order.
        margin: compare by ratio margin instead of cosine.
    """
    nearest: dict[VectorSpec, NearestRows] = {}
    for spec, vectors in pivot_vectors.items():
        from_pivot, to_pivot = find_nearest_in_both_directions(vectors, translation_vectors[spec], margin)
        nearest[spec] = {"from_pivot": from_pivot.cpu(), "to_pivot": to_pivot.cpu()}
    return nearest


def mark_hits(nearest: NearestRows) -> dict[str, Tensor]:
    """Return for each direction whether a query found its translation, which is the candidate in the same row."""
    return {direction: rows == torch.arange(len(rows)) for direction, rows in nearest.items()}


def accuracy(hits: Tensor) -> float:
    """Return the share of queries whose translation was found. `hits` are (N,) bool with N above 0."""
    return hits.double().mean().item()

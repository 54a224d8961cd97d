"""Find the most similar candidate of each sentence.

Similarity is the cosine or the ratio margin. The ratio margin divides the cosine by the mean cosine to the nearest
neighbours of both sentences. As a result, sentences that are close to everything are found less often (Artetxe and
Schwenk 2019, equation 3).

Sources and targets are aligned: source i translates target i.
"""

from collections.abc import Mapping
from typing import TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from infoxlm_core.tasks.embedding import VectorSpec

VectorsBySpec = Mapping[VectorSpec, Tensor]  # spec -> vectors (N, d) of the same N sentences
Values = TypeVar("Values", Tensor, np.ndarray)
NearestRows = dict[str, Tensor]  # direction -> row of each query's most similar candidate, (N,)
Hits = Mapping[str, Tensor]  # direction -> mask of the queries whose translation was found, (N,)

CHUNK = 1024  # queries to compare at a time; affects memory, not the result
MATRIX_ROWS = 4096  # largest number of sentences whose matrix of all similarities fits into memory
ROUNDING = 1e-12  # largest difference between the similarities of equal candidates after an fp64 matrix product
NEIGHBOURS = 4  # number of nearest neighbours for the ratio margin


def find_nearest(queries: Tensor, candidates: Tensor, margin: bool = False) -> Tensor:
    """Return the row (N,) of each query's most similar candidate. Ties go to the lowest row.

    Args:
        queries: vectors (N, d).
        candidates: vectors (M, d).
        margin: whether to compare by ratio margin instead of cosine.
    """
    candidate_means = _average_nearest_cosines(candidates, queries) if margin else None  # (M,)
    normalised_candidates = _normalise(candidates)
    nearest_rows = []
    for query_chunk in queries.split(CHUNK):
        similarities = _normalise(query_chunk) @ normalised_candidates.T  # (chunk, M)
        if candidate_means is not None:
            query_means = _average_highest(similarities)  # (chunk,)
            similarities = ratio_margin(similarities, query_means[:, None], candidate_means)
        nearest_rows.append(_find_first_maxima(similarities))
    return torch.cat(nearest_rows)


def find_nearest_in_both_directions(sources: Tensor, targets: Tensor, margin: bool = False) -> tuple[Tensor, Tensor]:
    """Return the row (N,) of each source's most similar target, and the row (M,) of each target's most similar source.

    The vectors are (N, d) and (M, d). They are compared by cosine, or if `margin` is true, by ratio margin.
    """
    if max(len(sources), len(targets)) > MATRIX_ROWS:  # the matrix of all similarities would be too large
        return find_nearest(sources, targets, margin), find_nearest(targets, sources, margin)
    # Using one matrix for both directions halves the time.
    similarities = _normalise(sources) @ _normalise(targets).T  # (N, M)
    if margin:
        source_means = _average_highest(similarities)  # (N,)
        target_means = _average_highest(similarities.T)  # (M,)
        similarities = ratio_margin(similarities, source_means[:, None], target_means)
    return _find_first_maxima(similarities), _find_first_maxima(similarities.T)


def ratio_margin(cosines: Values, query_means: Values, candidate_means: Values) -> Values:
    """Divide cosines between queries and candidates by the average of both mean cosines to nearest neighbours.

    The shapes of the arguments must broadcast.
    """
    return cosines / (query_means + candidate_means) * 2


def _normalise(vectors: Tensor) -> Tensor:
    """Scale vectors to length 1 in fp64.

    In fp32, the cosines of an untrained encoder's almost parallel vectors would be rounded to the same value.
    """
    return F.normalize(vectors.double(), dim=1)


def _find_first_maxima(similarities: Tensor) -> Tensor:
    """Return the first index (N,) of the highest value in each row of similarities (N, M)."""
    lowest_accepted = similarities.amax(dim=1, keepdim=True) - ROUNDING
    # argmax returns the first maximum, but does not support bool.
    return (similarities >= lowest_accepted).to(torch.uint8).argmax(dim=1)


def _average_highest(cosines: Tensor) -> Tensor:
    """Return the mean (N,) of the `NEIGHBOURS` highest values in each row of cosines (N, M)."""
    return cosines.topk(min(NEIGHBOURS, cosines.shape[1]), dim=1).values.mean(dim=1)


def _average_nearest_cosines(vectors: Tensor, candidates: Tensor) -> Tensor:
    """Return the mean cosine (N,) between each vector (N, d) and its nearest neighbours among candidates (M, d)."""
    normalised_candidates = _normalise(candidates)
    means = []
    for chunk in vectors.split(CHUNK):
        cosines = _normalise(chunk) @ normalised_candidates.T  # (chunk, M)
        means.append(_average_highest(cosines))
    return torch.cat(means)


def find_nearest_by_spec(
    pivot_vectors: VectorsBySpec, translation_vectors: VectorsBySpec, margin: bool = False
) -> dict[VectorSpec, NearestRows]:
    """Find the nearest sentences between the pivot and a second language in both directions, for each kind of vector.

    Pivot sentences and translations have the same order. If `margin` is true, they are compared by ratio margin.
    """
    nearest: dict[VectorSpec, NearestRows] = {}
    for spec, vectors in pivot_vectors.items():
        from_pivot, to_pivot = find_nearest_in_both_directions(vectors, translation_vectors[spec], margin)
        nearest[spec] = {"from_pivot": from_pivot.cpu(), "to_pivot": to_pivot.cpu()}  # `mark_hits` runs on the CPU
    return nearest


def mark_hits(nearest: NearestRows) -> dict[str, Tensor]:
    """Return a mask for each direction of the queries that found their translation: the candidate in the same row."""
    return {direction: rows == torch.arange(len(rows)) for direction, rows in nearest.items()}


def accuracy(hits: Tensor) -> float:
    """Return the share of queries whose translation was found. `hits` is a mask (N,) with N above 0."""
    return hits.double().mean().item()

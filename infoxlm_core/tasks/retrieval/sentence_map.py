"""A map of held-out sentences for the report: their points in the plane in which the vectors of a model differ most."""

from collections.abc import Iterable, Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from infoxlm_core.tasks.embedding import VectorSpec
from infoxlm_core.tasks.retrieval.nearest import VectorsBySpec

MAX_LANGUAGES = 20  # colours of the figure
MAX_SENTENCES = 1000  # of all languages; each adds 100 bytes to the figure
MAX_SENTENCES_OF_LANGUAGE = 200

EmbeddedPairs = Iterable[tuple[str, VectorsBySpec, VectorsBySpec]]
"""The languages, each with the vectors of the pivot's sentences and those of their translations."""


def copy_vectors(
    embedded_pairs: EmbeddedPairs, spec: VectorSpec, pivot: str, copies: dict[str, Tensor]
) -> Iterator[tuple[str, VectorsBySpec, VectorsBySpec]]:
    """Yield the pairs unchanged, and copy one vector of their first sentences.

    Args:
        embedded_pairs: the pairs.
        spec: the vector to copy.
        pivot: language of the first side of the pairs.
        copies: gets the vectors of each language: (N, d) float64 of length 1 on the CPU.
    """
    for language, source_vectors, target_vectors in embedded_pairs:
        vectors_by_language = {pivot: source_vectors[spec], language: target_vectors[spec]}
        for code, vectors in vectors_by_language.items():
            if code not in copies and len(copies) < MAX_LANGUAGES:
                copies[code] = F.normalize(vectors[:MAX_SENTENCES_OF_LANGUAGE].double().cpu(), dim=1)
        yield language, source_vectors, target_vectors


def project(vectors_by_language: Mapping[str, Tensor]) -> dict[str, list[list[float]]]:
    """Return the first two principal components of the vectors of each language.

    The component of each axis with the largest magnitude is positive, so that equal vectors give an equal map.

    Args:
        vectors_by_language: (N, d) for each language.

    Returns:
        Language -> the x and the y coordinates of its first sentences, rounded to three digits.
    """
    limit = MAX_SENTENCES // len(vectors_by_language)
    first_vectors = {language: vectors[:limit] for language, vectors in vectors_by_language.items()}
    all_vectors = torch.cat(list(first_vectors.values()))
    mean = all_vectors.mean(dim=0)
    _, _, directions = torch.linalg.svd(all_vectors - mean, full_matrices=False)
    axes = directions[:2]  # (2, d)
    largest = axes.abs().argmax(dim=1, keepdim=True)
    axes = axes * axes.gather(1, largest).sign()  # the sign of a singular vector is arbitrary
    coordinates: dict[str, list[list[float]]] = {}
    for language, vectors in first_vectors.items():
        coordinates[language] = []
        for axis_coordinates in (axes @ (vectors - mean).T).tolist():  # of (2, N)
            coordinates[language].append([round(value, 3) for value in axis_coordinates])
    return coordinates

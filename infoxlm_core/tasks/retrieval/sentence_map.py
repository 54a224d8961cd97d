"""Map held-out sentences to points of a plane for the report: the first two principal components of their vectors."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

MAX_LANGUAGES = 20  # colours of the figure
MAX_SENTENCES = 1000  # in all languages together; each adds 100 bytes to the figure
MAX_SENTENCES_OF_LANGUAGE = 200


def add_vectors(vectors_by_language: dict[str, Tensor], language: str, vectors: Tensor) -> None:
    """Add the first vectors (N, d) of a language, unless it is already there or there are `MAX_LANGUAGES`."""
    if language not in vectors_by_language and len(vectors_by_language) < MAX_LANGUAGES:
        first_vectors = vectors[:MAX_SENTENCES_OF_LANGUAGE].double().cpu()
        vectors_by_language[language] = F.normalize(first_vectors, dim=1)


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

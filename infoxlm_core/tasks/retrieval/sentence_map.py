"""Project vectors of held-out sentences to two dimensions, for the map in the report."""

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
    """Project sentence vectors (N, d) of each language to their first two principal components.

    All languages together have at most `MAX_SENTENCES`, and only the first sentences of each are projected.

    Returns:
        Language -> [x coordinates, y coordinates] of its sentences, rounded to three digits.
    """
    limit = MAX_SENTENCES // len(vectors_by_language)
    first_vectors = {language: vectors[:limit] for language, vectors in vectors_by_language.items()}
    all_vectors = torch.cat(list(first_vectors.values()))
    mean = all_vectors.mean(dim=0)
    axes = _find_principal_axes(all_vectors - mean)
    coordinates_by_language = {}
    for language, vectors in first_vectors.items():
        x_coordinates, y_coordinates = (axes @ (vectors - mean).T).tolist()  # of (2, N)
        coordinates_by_language[language] = [
            [round(x, 3) for x in x_coordinates],
            [round(y, 3) for y in y_coordinates],
        ]
    return coordinates_by_language


def _find_principal_axes(centred_vectors: Tensor) -> Tensor:
    """Return the two directions (2, d) of the largest variance of vectors (N, d) with mean 0."""
    _, _, directions = torch.linalg.svd(centred_vectors, full_matrices=False)
    axes = directions[:2]
    # The sign of a singular vector is arbitrary. The component with the largest magnitude is made positive, so that
    # equal vectors always give an equal map.
    largest_components = axes.gather(1, axes.abs().argmax(dim=1, keepdim=True))  # (2, 1)
    return axes * largest_components.sign()

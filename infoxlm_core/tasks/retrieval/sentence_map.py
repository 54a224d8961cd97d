"""Project the vectors of held-out sentences to two dimensions, for the map in the report."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

MAX_LANGUAGES = 20  # number of colours in the figure
MAX_SENTENCES = 1000  # total over all languages; each sentence adds 100 bytes to the figure
MAX_SENTENCES_OF_LANGUAGE = 200


def add_vectors(vectors_by_language: dict[str, Tensor], language: str, vectors: Tensor) -> None:
    """Add the first of a language's vectors (N, d), unless the language was added before or the map is full."""
    if language not in vectors_by_language and len(vectors_by_language) < MAX_LANGUAGES:
        first_vectors = vectors[:MAX_SENTENCES_OF_LANGUAGE].double().cpu()
        vectors_by_language[language] = F.normalize(first_vectors, dim=1)


def project(vectors_by_language: Mapping[str, Tensor]) -> dict[str, list[list[float]]]:
    """Project each language's sentence vectors (N, d) to the first two principal components of all vectors.

    Only each language's first sentences are projected, at most `MAX_SENTENCES` in total.

    Returns:
        Mapping from language to [x coordinates, y coordinates], rounded to three digits.
    """
    limit = MAX_SENTENCES // len(vectors_by_language)
    first_vectors = {language: vectors[:limit] for language, vectors in vectors_by_language.items()}
    all_vectors = torch.cat(list(first_vectors.values()))
    mean = all_vectors.mean(dim=0)
    axes = _find_principal_axes(all_vectors - mean)
    coordinates_by_language = {}
    for language, vectors in first_vectors.items():
        coordinates = (axes @ (vectors - mean).T).tolist()  # (2, N)
        coordinates_by_language[language] = [[round(value, 3) for value in values] for values in coordinates]
    return coordinates_by_language


def _find_principal_axes(centred_vectors: Tensor) -> Tensor:
    """Return the two directions (2, d) of largest variance for vectors (N, d) with mean 0."""
    _, _, directions = torch.linalg.svd(centred_vectors, full_matrices=False)
    axes = directions[:2]
    # The sign of a singular vector is arbitrary. Make its largest component positive, so that equal vectors always give
    # the same map.
    largest_components = axes.gather(1, axes.abs().argmax(dim=1, keepdim=True))  # (2, 1)
    return axes * largest_components.sign()

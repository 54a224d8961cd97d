"""The map of held-out sentences: which vectors it takes, and where it puts them."""

import pytest
import torch

from infoxlm_core.tasks.retrieval import sentence_map


def test_the_map_has_the_principal_axes_with_a_fixed_sign():
    random = torch.Generator().manual_seed(1)
    plane = torch.randn(40, 2, generator=random, dtype=torch.float64) * torch.tensor([3.0, 1.0])
    rotation, _ = torch.linalg.qr(torch.randn(5, 5, generator=random, dtype=torch.float64))
    vectors = plane @ rotation[:2] + 7
    centred_plane = plane - plane.mean(dim=0)
    _, _, axes = torch.linalg.svd(centred_plane)  # principal axes within the plane

    coordinates = sentence_map.project({"en": vectors[:20], "de": vectors[20:]})

    points = torch.cat([torch.tensor(coordinates[language]).T for language in ("en", "de")])
    torch.testing.assert_close(points.abs(), (centred_plane @ axes.T).abs().float(), atol=1e-3, rtol=0)
    directions = torch.linalg.lstsq(points.double(), vectors - vectors.mean(dim=0)).solution  # (2, 5)
    assert all(direction[direction.abs().argmax()] > 0 for direction in directions)


def test_the_map_has_the_first_sentences_of_each_language():
    vectors_by_language: dict[str, torch.Tensor] = {}
    for number, language in enumerate(("en", "de", "en", "fr"), start=1):
        sentence_map.add_vectors(vectors_by_language, language, torch.full((300, 4), float(number)))

    shapes = {language: tuple(vectors.shape) for language, vectors in vectors_by_language.items()}
    assert shapes == {"en": (200, 4), "de": (200, 4), "fr": (200, 4)}
    assert vectors_by_language["fr"].norm(dim=1).tolist() == pytest.approx([1.0] * 200)


def test_the_map_of_many_languages_has_1000_sentences():
    vectors_by_language = {str(number): torch.randn(200, 4) for number in range(20)}

    coordinates = sentence_map.project(vectors_by_language)

    assert all(len(axis_coordinates) == 50 for axes in coordinates.values() for axis_coordinates in axes)

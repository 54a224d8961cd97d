"""Retrieval among held-out pairs: how answers are counted, on vectors that a reader can check by hand."""

import pytest
import torch

from infoxlm_core.tasks.embedding import VectorSpec
from infoxlm_core.tasks.questions import Questions
from infoxlm_core.tasks.retrieval.held_out import score_language, tabulate
from infoxlm_core.tasks.retrieval.nearest import find_nearest_by_spec, mark_hits
from infoxlm_core.tasks.scores import mean_over


def unit_vectors(*degrees: float) -> torch.Tensor:
    radians = torch.tensor(degrees).deg2rad()
    return torch.stack([radians.cos(), radians.sin()], dim=1)


@pytest.mark.item("A23")
def test_the_two_directions_can_differ():
    spec = VectorSpec("mean", 0)
    sources = {spec: unit_vectors(0, 20)}
    targets = {spec: unit_vectors(15, 40)}  # source 2 is nearer to target 1, but both targets are nearest to their own

    hits = mark_hits(find_nearest_by_spec(sources, targets)[spec])

    assert hits["from_pivot"].tolist() == [True, False]
    assert hits["to_pivot"].tolist() == [False, True]
    for subset in ([True, False], [False, True]):
        scores = score_language(hits, torch.tensor(subset))
        assert scores == {"from_pivot": 0.5, "to_pivot": 0.5, "mean": 0.5, "no_overlap": 0.5}


@pytest.mark.item("A21")
def test_every_language_weighs_the_same_and_empty_subsets_are_left_out():
    german_hits = {"from_pivot": torch.tensor([1, 1, 1, 1, 0]), "to_pivot": torch.tensor([1, 1, 1, 0, 0])}
    chinese_hits = {"from_pivot": torch.tensor([1, 0, 0, 0, 0]), "to_pivot": torch.tensor([0, 0, 0, 0, 0])}
    german = score_language(german_hits, torch.tensor([True, False, False, False, True]))
    chinese = score_language(chinese_hits, torch.tensor([False] * 5))

    mean = mean_over({"de": german, "zh": chinese})

    assert mean == pytest.approx({"from_pivot": 0.5, "to_pivot": 0.3, "mean": 0.4, "no_overlap": 0.5})
    assert chinese["no_overlap"] is None
    assert mean_over({"zh": chinese})["no_overlap"] is None


def test_a_sentence_with_two_translations_is_one_question_in_each_direction():
    german_pairs = [("Save", "Speichern"), *((f"word {number}", f"Wort {number}") for number in range(59))]
    pairs = {"de": german_pairs, "fr": [("Save", "Enregistrer")]}
    unshared = {"de": torch.arange(60) < 50, "fr": torch.tensor([True])}
    nearest = {}
    for language, language_pairs in pairs.items():
        rows = torch.arange(len(language_pairs))  # every translation is found
        nearest[language] = {"from_pivot": rows, "to_pivot": rows}

    table = tabulate(Questions("en", {}, pairs, {}, unshared), {"best": nearest})

    assert list(table["language"]) == ["de"] * 120 + ["fr"] * 2
    assert sorted(table.groupby("question")["language"].nunique()) == [1] * 59 + [2]
    assert table["unshared"].sum() == 100  # French has too few such pairs
    assert table["right"].all()

"""Retrieval among held-out pairs: how answers are counted, on vectors that a reader can check by hand."""

import math

import pytest
import torch

from infoxlm_core.tasks.embedding import VectorSpec
from infoxlm_core.tasks.questions import Questions
from infoxlm_core.tasks.retrieval.held_out import score, tabulate
from infoxlm_core.tasks.retrieval.nearest import find_nearest_by_spec, mark_hits
from infoxlm_core.tasks.scores import mean_over


@pytest.mark.item("A23")
def test_the_two_directions_can_differ():
    degrees = {"sources": [0, 20], "targets": [15, 40]}  # source 2 is nearer to target 1; both targets find their own
    spec = VectorSpec("mean", 0)
    sources, targets = (
        {spec: torch.tensor([[math.cos(math.radians(a)), math.sin(math.radians(a))] for a in angles])}
        for angles in degrees.values()
    )

    hits = mark_hits(find_nearest_by_spec(sources, targets)[spec])

    first, second = (score(hits, torch.tensor(subset)) for subset in ([True, False], [False, True]))

    assert hits["from_pivot"].tolist() == [True, False] and hits["to_pivot"].tolist() == [False, True]
    assert first == second == {"from_pivot": 0.5, "to_pivot": 0.5, "mean": 0.5, "no_overlap": 0.5}


@pytest.mark.item("A21")
def test_every_language_has_the_same_weight_and_an_empty_subset_has_none():
    to_pivot = {"de": [1, 1, 1, 0, 0], "zh": [0, 0, 0, 0, 0]}
    from_pivot = {"de": [1, 1, 1, 1, 0], "zh": [1, 0, 0, 0, 0]}
    subsets = {"de": [True, False, False, False, True], "zh": [False] * 5}
    rows = {}
    for code in ("de", "zh"):
        hits = {"from_pivot": torch.tensor(from_pivot[code]), "to_pivot": torch.tensor(to_pivot[code])}
        rows[code] = score(hits, torch.tensor(subsets[code]))

    mean = mean_over(rows)

    assert mean["mean"] == pytest.approx(0.4)
    assert (mean["from_pivot"], mean["to_pivot"]) == pytest.approx((0.5, 0.3))
    assert mean["no_overlap"] == pytest.approx(0.5)
    assert rows["zh"]["no_overlap"] is None
    assert mean_over({"zh": rows["zh"]})["no_overlap"] is None


def test_a_sentence_asked_in_two_languages_is_one_question_with_a_row_for_each_direction():
    words = [("Save", "Speichern"), *((f"word {number}", f"Wort {number}") for number in range(59))]
    pairs = {"de": words, "fr": [("Save", "Enregistrer")]}
    unshared = {"de": torch.arange(60) < 50, "fr": torch.tensor([True])}
    nearest = {
        code: {direction: torch.arange(len(rows)) for direction in ("from_pivot", "to_pivot")}
        for code, rows in pairs.items()
    }

    table = tabulate(Questions("en", {}, pairs, {}, unshared), {"best": nearest})

    assert list(table["language"]) == ["de"] * 120 + ["fr"] * 2
    assert sorted(table.groupby("question")["language"].nunique()) == [1] * 59 + [2]
    assert table["unshared"].sum() == 100 and table["right"].all()  # French has too few such pairs

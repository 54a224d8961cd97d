"""The comparison with published figures: languages that both have, in percent."""

import json

import pytest

from benchmarks.quality import tatoeba


def test_only_languages_with_a_published_figure_are_compared():
    rows = {"deu": {"to_pivot": 0.985, "from_pivot": 0.971}, "swh": {"to_pivot": 0.7641, "from_pivot": 0.81},
            "xxx": {"to_pivot": 0.0, "from_pivot": 0.0}}  # fmt: skip
    scores = {"languages": rows, "counts": {"deu": 1000, "swh": 390, "xxx": 1}}

    found = tatoeba.compare(scores, {"model": "m", "accuracy": {"deu": 98.0, "swh": 76.9, "fra": 93.0}})

    assert list(found["languages"]) == ["deu", "swh"]
    assert found["languages"]["swh"] == {
        "pairs": 390, "published": 76.9, "ours": 76.4, "difference": -0.5, "from English": 81.0
    }  # fmt: skip
    assert found["mean"]["published"] == pytest.approx(87.45)
    assert found["mean_absolute_difference"] == pytest.approx(0.5)


def test_the_published_figures_are_those_of_every_language_of_tatoeba():
    published = json.loads(tatoeba.PUBLISHED.read_bytes())

    assert len(published["accuracy"]) == 112 and published["accuracy"]["swh"] == 75.9
    assert all(0 < value <= 100 for value in published["accuracy"].values())

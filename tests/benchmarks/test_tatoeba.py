"""The comparison with published figures."""

import json

from benchmarks.quality import tatoeba


def test_only_languages_with_a_published_figure_are_compared():
    rows = {"deu": {"to_pivot": 0.985, "from_pivot": 0.971}, "swh": {"to_pivot": 0.7641, "from_pivot": 0.81},
            "xxx": {"to_pivot": 0.0, "from_pivot": 0.0}}  # fmt: skip
    scores = {"languages": rows, "counts": {"deu": 1000, "swh": 390, "xxx": 1}}

    compared = tatoeba.compare(scores, {"deu": 98.0, "swh": 76.9, "fra": 93.0})

    assert list(compared) == ["deu", "swh"]
    assert compared["swh"] == {"pairs": 390, "published": 76.9, "ours": 76.4, "difference": -0.5, "from English": 81.0}


def test_every_language_of_tatoeba_has_a_published_figure():
    published = json.loads(tatoeba.PUBLISHED.read_bytes())["accuracy"]

    assert len(published) == 112 and published["swh"] == 75.9
    assert all(0 < accuracy <= 100 for accuracy in published.values())

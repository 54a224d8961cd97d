"""Scores are stored and read without loss, and their means are those of the paper."""

import json

import pytest

from infoxlm_core.errors import InputError
from infoxlm_core.tasks.scores import Scores, average_within_and_across, transfer_gap
from tests.toys.scores import answered, labelled, retrieved


@pytest.mark.parametrize("scores", [labelled(0.8, 0.6), answered(0.5), retrieved(0.7)], ids=lambda row: row["task"])
def test_stored_scores_are_read_and_written_without_loss(scores):
    stored = json.loads(json.dumps(scores | {"training": {"steps": 3}, "trained_on": ["en"]}))

    assert Scores.from_dict(stored).to_dict() == stored


@pytest.mark.parametrize("field", ["task", "languages", "mean", "counts", "test_set"])
def test_scores_without_a_required_field_are_refused(field):
    stored = labelled(0.8, 0.6)
    del stored[field]

    with pytest.raises(InputError, match=rf"old/scores.json has no {field}\. Measure the model again"):
        Scores.from_dict(stored, "old/scores.json")


@pytest.mark.item("A21")
@pytest.mark.parametrize(
    ("row", "expected_gap"),
    [  # XNLI, en first: Table 1 of the paper; the gaps are those of its Table 5
        ("82.1 73.8 74.3 71.1 66.4 68.9 69.0 61.6 64.9 69.5 55.8 69.3 60.0 50.4 58.0", 16.9),
        ("84.7 79.1 79.4 77.4 76.6 78.4 76.0 73.5 72.6 75.5 73.0 74.5 71.0 65.7 67.6", 10.4),
        ("86.4 80.6 80.8 78.9 77.8 78.9 77.6 75.6 74.0 77.0 73.7 76.7 72.0 66.4 67.1", 10.9),
    ],
    ids=["mBERT", "XLM-R (reimpl)", "InfoXLM"],
)
def test_transfer_gaps_of_the_paper_follow_from_its_scores(row, expected_gap):
    languages = ["en", "fr", "es", "de", "el", "bg", "ru", "tr", "ar", "vi", "th", "zh", "hi", "sw", "ur"]
    scores = dict(zip(languages, map(float, row.split()), strict=True))

    assert transfer_gap(scores) == pytest.approx(expected_gap, abs=0.05)


def test_every_language_weighs_the_same_in_the_mean_across_languages():
    scores = {("en", "en"): 0.9, ("de", "de"): 0.7, ("sw", "sw"): 0.5, ("en", "de"): 0.6, ("de", "en"): 0.4,
              ("en", "sw"): 0.3}  # fmt: skip

    within, across = average_within_and_across(scores)

    assert within == pytest.approx(0.7)
    # en: .6 .4 .3; de: .6 .4; sw: .3
    assert across == pytest.approx(((0.6 + 0.4 + 0.3) / 3 + 0.5 + 0.3) / 3)

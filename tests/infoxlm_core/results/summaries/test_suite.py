"""How the scores of a suite are averaged, and what its metrics are called."""

import math

import pytest

from infoxlm_core.tasks import TASKS
from infoxlm_core.tasks.scores import Scores
from tests.toys.scores import (
    ANSWERING,
    CLASSIFICATION,
    RETRIEVAL,
    answered,
    config,
    labelled,
    retrieved,
    summed,
)


def test_result_has_the_location_of_the_model_of_each_seed():
    scores = {}
    for seed in (1, 2):
        training = {"steps": 10, "examples": 40, "tuned": f"tuned/{seed}"}
        scores[f"ours words seed {seed}"] = labelled(0.5, 0.5, training=training)

    summary = summed(config(words=CLASSIFICATION | {"seeds": [1, 2]}), scores)

    assert summary.tasks["words"].models["ours"].tuned == {1: "tuned/1", 2: "tuned/2"}


@pytest.mark.parametrize(
    ("changes", "note"),
    [
        ({"test_set": "sha256:2"}, "The trials have different test sets."),
        ({"not_reserved": ["x.en"]}, "peer may have been trained on this test: 1 of the test's files were not removed"),
    ],
)
def test_note_warns_of_scores_that_do_not_compare(changes, note):
    scores = {"ours pairs": retrieved(0.7), "peer pairs": retrieved(0.7) | changes}

    summary = summed(config(("ours", "peer"), pairs=RETRIEVAL), scores)

    [task_note] = summary.tasks["pairs"].notes
    assert task_note.startswith(note)


@pytest.fixture(scope="module")
def suite_metrics() -> dict[str, float]:
    planned = config(("Ours", "XLM_R"), xnli=CLASSIFICATION | {"seeds": [1, 2]}, mlqa=ANSWERING, tatoeba=RETRIEVAL)
    mixed = {"within": 0.6, "across": 0.4, "cells": {}}
    scores = {f"Ours xnli seed {seed}": labelled(0.8, 0.6 + seed / 10, mixed=mixed) for seed in (1, 2)}
    scores |= {"Ours mlqa seed 1": answered(0.5), "Ours tatoeba": retrieved(0.8), "XLM_R tatoeba": retrieved(0.4, 5)}
    return summed(planned, scores).name_metrics()


def test_metrics_have_stable_names_and_those_of_other_models_a_prefix(suite_metrics):
    expected = {
        "xnli/mean": (0.8 + 0.75 + 0.5) / 3, "xnli/de": 0.75, "xnli/deviation": 0.1 / 3 / math.sqrt(2),
        "xnli/transfer_gap": 0.8 - 0.625, "xnli/within": 0.6, "xnli/across": 0.4, "xnli/dev": 0.5, "xnli/seeds": 2,
        "mlqa/f1": 0.65, "mlqa/exact_match": 0.325, "mlqa/f1/zh": 0.5, "mlqa/exact_match/en": 0.4,
        "mlqa/transfer_gap": 0.3, "tatoeba/xx_en": 0.8, "tatoeba/en_xx": 0.4, "tatoeba/mean": 0.6,
        "tatoeba/best_layer": 7, "tatoeba/deu": 0.6, "tatoeba/cls-last/xx_en": 0.2, "tatoeba/cls-last/layer": 12,
        "xlm-r/tatoeba/xx_en": 0.4, "xlm-r/tatoeba/best_layer": 5,
    }  # fmt: skip
    assert {name: suite_metrics[name] for name in expected} == pytest.approx(expected)
    assert not [name for name in suite_metrics if name.startswith("xlm-r/xnli")]
    assert "mlqa/deviation" not in suite_metrics  # it has a single seed
    assert "tatoeba/transfer_gap" not in suite_metrics


@pytest.mark.parametrize(
    ("name", "task", "scores"), [("mlqa", ANSWERING, answered(0.5)), ("tatoeba", RETRIEVAL, retrieved(0.8))]
)
def test_metrics_of_a_trial_are_those_of_the_suite(suite_metrics, name, task, scores):
    settings = config(**{name: task}).tasks[name].settings

    trial_metrics = TASKS[scores["task"]].name_metrics(Scores.from_dict(scores), settings, name)

    assert trial_metrics.items() <= suite_metrics.items()

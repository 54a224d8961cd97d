"""How grid points are chosen and scores averaged, and what the metrics of a suite are called."""

import math
from statistics import stdev

import pytest

from infoxlm_core.tasks import TASKS
from infoxlm_core.tasks.scores import Scores
from tests.toys.scores import (
    ANSWERING,
    CLASSIFICATION,
    RATES,
    RETRIEVAL,
    answered,
    config,
    labelled,
    retrieved,
    summed,
)

RATE = "optimization.learning_rate"


def test_grid_point_is_chosen_by_development_scores_only():
    planned = config(words=CLASSIFICATION | {"grid": RATES, "seeds": [1, 2]})
    scores = {
        "ours words learning_rate=1e-05 seed 1": labelled(0.9, 0.9, dev=0.60),
        "ours words learning_rate=1e-05 seed 2": labelled(0.9, 0.9, dev=0.62),
        "ours words learning_rate=2e-05 seed 1": labelled(0.7, 0.6, dev=0.64),
        "ours words learning_rate=2e-05 seed 2": labelled(0.8, 0.6, dev=0.63),
    }

    result = summed(planned, scores).to_dict()["tasks"]["words"]["models"]["ours"]

    assert result["chosen"]["grid"] == {RATE: 2e-5}
    assert result["chosen"]["dev"] == pytest.approx(0.635)
    assert result["grid"][0]["dev"] == 0.61
    assert result["languages"]["en"]["accuracy"]["mean"] == pytest.approx(0.75)
    assert result["languages"]["en"]["accuracy"]["deviation"] == pytest.approx(stdev([0.7, 0.8]))
    assert result["transfer_gap"]["accuracy"]["mean"] == pytest.approx((0.7 + 0.8) / 2 - 0.55)


@pytest.mark.parametrize(
    ("rule", "rate", "dev", "description"),
    [
        ("source", 1e-5, 0.65, "1, dev of the source"),
        ("joint", 2e-5, 0.7, "1, joint dev"),
        ("last", 2e-5, 0.7, "1, last step; grid by joint dev"),
    ],
)
def test_rule_source_chooses_the_grid_point_by_the_source_language(rule, rate, dev, description):
    planned = config(words=CLASSIFICATION | {"grid": RATES})
    scores = {}
    for rate_name, en, de in (("1e-05", 0.8, 0.5), ("2e-05", 0.7, 0.7)):
        scores[f"ours words learning_rate={rate_name} seed 1"] = labelled(0.5, 0.5) | {
            "dev": {"languages": {"en": en, "de": de}, "mean": (en + de) / 2},
            "selection": {"rule": rule, "looks": [], "chosen": {"*": 1}},
        }

    result = summed(planned, scores).to_dict()["tasks"]["words"]["models"]["ours"]

    assert result["chosen"]["grid"] == {RATE: rate}
    assert result["chosen"]["dev"] == pytest.approx(dev)  # over all languages, whatever the rule
    assert result["rule"] == description


def test_grid_point_with_fewer_finished_seeds_is_not_chosen():
    planned = config(("ours", "peer"), words=CLASSIFICATION | {"grid": RATES, "seeds": [1, 2]})
    scores = {
        "ours words learning_rate=1e-05 seed 1": labelled(0.5, 0.5, dev=0.60),
        "ours words learning_rate=1e-05 seed 2": labelled(0.5, 0.5, dev=0.60),
        "ours words learning_rate=2e-05 seed 2": labelled(0.6, 0.6, dev=0.61),
    }

    summary = summed(planned, scores).to_dict()

    assert list(summary["unfinished"]) == [
        "ours words learning_rate=2e-05 seed 1",
        *(f"peer words learning_rate={rate} seed {seed}" for rate in ("1e-05", "2e-05") for seed in (1, 2)),
    ]
    task = summary["tasks"]["words"]
    assert list(task["models"]) == ["ours"]
    assert task["models"]["ours"]["chosen"]["seeds"] == (1, 2)
    assert task["models"]["ours"]["mean"]["accuracy"]["mean"] == pytest.approx(0.5)
    assert task["notes"] == ("ours: learning_rate=2e-05 cannot be chosen, because fewer than 2 seeds are finished.",)


def test_no_grid_point_is_chosen_without_development_scores():
    planned = config(words=CLASSIFICATION | {"grid": RATES})
    scores = {f"ours words learning_rate={rate} seed 1": labelled(0.5, 0.5, dev=None) for rate in ("1e-05", "2e-05")}

    task = summed(planned, scores).tasks["words"]

    assert not task.models
    [note] = task.notes
    assert note.startswith("ours: no grid point is chosen, because learning_rate=1e-05, learning_rate=2e-05 have no ")


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
        ({"not_reserved": ["a.en-de.en"]}, "peer may have been trained on this test: 1 of its files were not removed"),
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

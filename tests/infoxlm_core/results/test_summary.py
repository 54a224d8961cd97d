"""What is chosen and averaged of a suite, how variants are compared, and what the metrics are called."""

import math
from statistics import stdev

import pytest

from infoxlm_core import languages
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


def test_the_place_of_the_grid_is_chosen_by_development_scores_and_never_by_test_scores():
    planned = config(words=CLASSIFICATION | {"grid": RATES, "seeds": [1, 2]})
    results = {
        "ours words learning_rate=1e-05 seed 1": labelled(0.9, 0.9, dev=0.60),
        "ours words learning_rate=1e-05 seed 2": labelled(0.9, 0.9, dev=0.62),
        "ours words learning_rate=2e-05 seed 1": labelled(0.7, 0.6, dev=0.64),
        "ours words learning_rate=2e-05 seed 2": labelled(0.8, 0.6, dev=0.63),
    }

    row = summed(planned, results).to_dict()["tasks"]["words"]["models"]["ours"]

    assert row["chosen"]["grid"] == {"optimization.learning_rate": 2e-5}
    assert row["chosen"]["dev"] == pytest.approx(0.635) and row["grid"][0]["dev"] == 0.61
    assert row["languages"]["en"]["accuracy"]["mean"] == pytest.approx(0.75)
    assert row["languages"]["en"]["accuracy"]["deviation"] == pytest.approx(stdev([0.7, 0.8]))
    assert row["transfer_gap"]["accuracy"]["mean"] == pytest.approx((0.7 + 0.8) / 2 - 0.55)


@pytest.mark.parametrize(("rule", "rate"), [("source", 1e-5), ("joint", 2e-5), ("last", 2e-5)])
def test_the_rule_of_the_source_chooses_the_place_too_by_the_source_alone(rule, rate):
    planned = config(words=CLASSIFICATION | {"grid": RATES})
    results = {
        f"ours words learning_rate={name} seed 1": labelled(0.5, 0.5) | {
            "dev": {"languages": {"en": en, "de": de}, "mean": (en + de) / 2},
            "selection": {"rule": rule, "looks": [], "chosen": {"*": 1}},
        }
        for name, en, de in (("1e-05", 0.8, 0.5), ("2e-05", 0.7, 0.7))
    }  # fmt: skip

    found = summed(planned, results).to_dict()["tasks"]["words"]

    row = found["models"]["ours"]
    assert row["chosen"]["grid"] == {"optimization.learning_rate": rate}
    assert row["chosen"]["dev"] == pytest.approx(0.65 if rate == 1e-5 else 0.7)  # the metric stays that of points
    said = {"source": "1, dev of the source", "joint": "1, joint dev", "last": "1, last step; grid by joint dev"}
    assert row["rule"] == said[rule]


def test_a_place_with_fewer_finished_seeds_is_not_chosen_and_what_is_missing_is_named():
    planned = config(("ours", "peer"), words=CLASSIFICATION | {"grid": RATES, "seeds": [1, 2]})
    results = {
        "ours words learning_rate=1e-05 seed 1": labelled(0.5, 0.5, dev=0.60),
        "ours words learning_rate=1e-05 seed 2": labelled(0.5, 0.5, dev=0.60),
        "ours words learning_rate=2e-05 seed 2": labelled(0.6, 0.6, dev=0.61),
    }

    found = summed(planned, results).to_dict()

    assert list(found["unfinished"]) == [
        "ours words learning_rate=2e-05 seed 1",
        *(f"peer words learning_rate={rate} seed {seed}" for rate in ("1e-05", "2e-05") for seed in (1, 2)),
    ]
    row = found["tasks"]["words"]["models"]["ours"]
    assert row["chosen"]["seeds"] == (1, 2) and row["mean"]["accuracy"]["mean"] == pytest.approx(0.5)
    (note,) = found["tasks"]["words"]["notes"]
    assert note == "ours: learning_rate=2e-05 cannot be chosen, because fewer than 2 seeds are finished."
    assert "peer" not in found["tasks"]["words"]["models"]


def test_without_development_scores_nothing_is_chosen_and_that_is_said():
    planned = config(words=CLASSIFICATION | {"grid": RATES})
    results = {f"ours words learning_rate={r} seed 1": labelled(0.5, 0.5, dev=None) for r in ("1e-05", "2e-05")}

    found = summed(planned, results).to_dict()["tasks"]["words"]

    assert not found["models"]
    (note,) = found["notes"]
    assert note.startswith("ours: no grid point is chosen, because learning_rate=1e-05, learning_rate=2e-05 have no ")


def test_a_row_says_where_in_the_store_the_model_of_each_seed_is():
    training = {"steps": 10, "examples": 40}
    results = {
        f"ours words seed {seed}": labelled(0.5, 0.5, training=training | {"tuned": f"tuned/{seed}"}) for seed in (1, 2)
    }

    found = summed(config(words=CLASSIFICATION | {"seeds": [1, 2]}), results).to_dict()

    assert found["tasks"]["words"]["models"]["ours"]["tuned"] == {1: "tuned/1", 2: "tuned/2"}


def test_models_that_were_asked_other_questions_are_not_compared_silently():
    results = {"ours words seed 1": labelled(0.5, 0.5), "peer words seed 1": labelled(0.5, 0.5, test_set="sha256:2")}

    found = summed(config(("ours", "peer"), words=CLASSIFICATION), results).to_dict()

    (note,) = found["tasks"]["words"]["notes"]
    assert note.startswith("The trials have different test sets.")


def test_languages_stand_in_the_papers_order_and_others_after_them():
    assert languages.sort(["sw", "am", "en", "de", "fr"], TASKS["classification"].order) == [
        "en",
        "fr",
        "de",
        "sw",
        "am",
    ]
    assert languages.sort(["zh", "ko", "de", "es", "en"], TASKS["question_answering"].order) == [
        "en",
        "es",
        "de",
        "zh",
        "ko",
    ]
    assert languages.sort(["gle", "afr", "cmn", "ara"], TASKS["retrieval"].order) == ["ara", "cmn", "afr", "gle"]


def test_metrics_have_stable_names_and_other_models_stand_behind_their_own():
    planned = config(("Ours", "XLM_R"), xnli=CLASSIFICATION | {"seeds": [1, 2]}, mlqa=ANSWERING, tatoeba=RETRIEVAL)
    mixed = {"within": 0.6, "across": 0.4, "cells": {}}
    results = {f"Ours xnli seed {seed}": labelled(0.8, 0.6 + seed / 10, mixed=mixed) for seed in (1, 2)}
    results |= {"Ours mlqa seed 1": answered(0.5), "Ours tatoeba": retrieved(0.8), "XLM_R tatoeba": retrieved(0.4, 5)}

    flat = summed(planned, results).name_metrics()

    expected = {
        "xnli/mean": (0.8 + 0.75 + 0.5) / 3, "xnli/de": 0.75, "xnli/deviation": 0.1 / 3 / math.sqrt(2),
        "xnli/transfer_gap": 0.8 - 0.625, "xnli/within": 0.6, "xnli/across": 0.4, "xnli/dev": 0.5, "xnli/seeds": 2,
        "mlqa/f1": 0.65, "mlqa/exact_match": 0.325, "mlqa/f1/zh": 0.5, "mlqa/exact_match/en": 0.4,
        "mlqa/transfer_gap": 0.3, "tatoeba/xx_en": 0.8, "tatoeba/en_xx": 0.4, "tatoeba/mean": 0.6,
        "tatoeba/best_layer": 7, "tatoeba/deu": 0.6, "tatoeba/cls-last/xx_en": 0.2, "tatoeba/cls-last/layer": 12,
        "xlm-r/tatoeba/xx_en": 0.4, "xlm-r/tatoeba/best_layer": 5,
    }  # fmt: skip
    assert {name: flat[name] for name in expected} == pytest.approx(expected)
    assert not [name for name in flat if name.startswith("xlm-r/xnli")]
    assert "mlqa/deviation" not in flat and "tatoeba/transfer_gap" not in flat


def test_the_metrics_of_a_point_are_those_of_the_suite():
    planned = config(xnli=CLASSIFICATION, mlqa=ANSWERING, tatoeba=RETRIEVAL)
    results = {
        "ours xnli seed 1": labelled(0.8, 0.6),
        "ours mlqa seed 1": answered(0.5),
        "ours tatoeba": retrieved(0.8),
    }
    flat = summed(planned, results).name_metrics()

    for name, scores in results.items():
        task, read = name.split()[1], Scores.from_dict(scores)
        of_point = TASKS[read.task].name_metrics(read, planned.tasks[task].settings, task)
        assert of_point.items() <= flat.items()


def test_a_model_that_may_have_been_trained_on_the_test_is_noted():
    planned = config(models=("ours", "theirs"), pairs=RETRIEVAL)

    summary = summed(
        planned, {"ours pairs": retrieved(0.7) | {"not_reserved": ["a.en-de.en"]}, "theirs pairs": retrieved(0.7)}
    )

    (note,) = summary.tasks["pairs"].notes
    assert note.startswith("ours may have been trained on this test: 1 of its files were not removed")

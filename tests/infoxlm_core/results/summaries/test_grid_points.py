"""Grid points are chosen by development scores, and only the scores at the chosen point are averaged."""

from statistics import stdev

import pytest

from tests.toys.scores import CLASSIFICATION, RATES, config, labelled, summed

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

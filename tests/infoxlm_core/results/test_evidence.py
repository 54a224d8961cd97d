"""The paired bootstrap, against what is known without it."""

import numpy as np
import pandas as pd
import pytest

from infoxlm_core.errors import InputError
from infoxlm_core.results.evidence import COLUMNS, Outcomes, paired_bootstrap


def answers(values: dict[str, list[float]]) -> pd.Series:
    """Language -> scores of questions 0, 1, 2, ..."""
    rows = {(language, number): value for language, row in values.items() for number, value in enumerate(row)}
    return pd.Series(rows).rename_axis(["language", "question"])


def coins(languages: int, questions: int, right: float, seed: int) -> pd.Series:
    rng = np.random.default_rng(seed)
    return answers({f"l{n}": (rng.random(questions) < right).astype(float).tolist() for n in range(languages)})


def test_a_metric_counts_the_rows_that_it_names_whatever_the_task_is_called():
    rows = [
        ("mining", place, language, direction, "q", language == "de", right)
        for language, place, direction, right in [
            ("de", "served", "to_pivot", True),
            ("de", "served", "from_pivot", False),
            ("fr", "served", "to_pivot", True),
            ("fr", "served", "from_pivot", True),
            ("fr", "best", "to_pivot", False),
        ]
    ]
    rows += [("tagging", "", "de", "", "q", False, True)]
    outcomes = Outcomes(pd.DataFrame(rows, columns=list(COLUMNS[1:])), "en")

    metrics = ("mining/served", "mining/fr", "mining/xx_en", "mining/no_overlap", "mining/best", "tagging/mean",
               "tagging/de")  # fmt: skip
    found = {metric: outcomes.score_questions(metric).to_dict() for metric in metrics}

    de, fr = ("de", "q"), ("fr", "q")
    assert found == {
        "mining/served": {de: 0.5, fr: 1.0}, "mining/fr": {fr: 1.0}, "mining/xx_en": {de: 1.0, fr: 1.0},
        "mining/no_overlap": {de: 0.5}, "mining/best": {fr: 0.0}, "tagging/mean": {de: 1.0},
        "tagging/de": {de: 1.0},
    }  # fmt: skip
    for metric in ("mining/mean", "tagging/served", "tagging/xx_en", "tagging/no_overlap"):
        with pytest.raises(InputError, match=f"no outcomes of {metric}"):
            outcomes.score_questions(metric)


def test_equal_answers_gain_nothing_for_sure():
    found = paired_bootstrap(coins(3, 50, 0.6, 1), coins(3, 50, 0.6, 1))

    assert (found.gain, found.lower, found.upper, found.questions) == (0.0, 0.0, 0.0, 50)


def test_the_interval_is_that_of_the_normal_approximation_on_many_questions():
    candidate, champion = coins(1, 4000, 0.7, 1), coins(1, 4000, 0.6, 2)

    found = paired_bootstrap(candidate, champion)

    gains = candidate - champion
    half = 1.96 * gains.std() / np.sqrt(len(gains))
    assert found.gain == pytest.approx(gains.mean())
    assert (found.lower, found.upper) == pytest.approx((gains.mean() - half, gains.mean() + half), abs=half * 0.05)


def test_the_same_questions_in_ten_languages_are_not_ten_tests():
    one = coins(1, 300, 0.7, 1), coins(1, 300, 0.6, 2)
    ten = tuple(answers({f"l{n}": side.tolist() for n in range(10)}) for side in one)

    alone, repeated = paired_bootstrap(*one), paired_bootstrap(*ten)

    assert (repeated.lower, repeated.upper) == pytest.approx((alone.lower, alone.upper))


def test_every_language_weighs_the_same_however_many_questions_it_has():
    candidate = answers({"de": [1.0] * 90, "fr": [0.0] * 10})
    champion = answers({"de": [0.0] * 90, "fr": [0.0] * 10})

    assert paired_bootstrap(candidate, champion).gain == 0.5


def test_the_interval_holds_the_true_gain_about_as_often_as_it_says():
    inside = 0
    for seed in range(200):
        found = paired_bootstrap(coins(2, 200, 0.7, seed), coins(2, 200, 0.6, 1000 + seed), resamples=500)
        inside += found.lower <= 0.1 <= found.upper

    assert 180 <= inside <= 198  # 190 expected


def test_it_repeats_itself_and_another_seed_draws_anew():
    rng = np.random.default_rng(1)
    sides = [answers({"de": rng.random(80).tolist(), "fr": rng.random(60).tolist()}) for _ in range(2)]

    assert paired_bootstrap(*sides) == paired_bootstrap(*sides) != paired_bootstrap(*sides, seed=2)


def test_other_questions_are_refused():
    with pytest.raises(ValueError, match="different questions"):
        paired_bootstrap(coins(1, 10, 0.5, 1), coins(1, 11, 0.5, 1))

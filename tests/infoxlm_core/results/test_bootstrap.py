"""The paired bootstrap, compared with results that are known without it."""

import numpy as np
import pandas as pd
import pytest

from infoxlm_core.results.bootstrap import paired_bootstrap


def make_scores(scores_of_language: dict[str, list[float]]) -> pd.Series:
    """Return (language, question) -> score for questions 0, 1, 2, ..."""
    scores = {}
    for language, values in scores_of_language.items():
        scores |= {(language, number): value for number, value in enumerate(values)}
    return pd.Series(scores).rename_axis(["language", "question"])


def draw_answers(languages: int, questions: int, accuracy: float, seed: int) -> pd.Series:
    """Return random right and wrong answers in several languages."""
    rng = np.random.default_rng(seed)
    answers = (rng.random((languages, questions)) < accuracy).astype(float)
    return make_scores({f"language {number}": row.tolist() for number, row in enumerate(answers)})


def test_equal_answers_have_a_gain_of_exactly_zero():
    answers = draw_answers(3, 50, 0.6, seed=1)

    interval = paired_bootstrap(answers, answers)

    assert (interval.gain, interval.lower, interval.upper, interval.questions) == (0.0, 0.0, 0.0, 50)


def test_interval_of_many_questions_is_that_of_the_normal_approximation():
    candidate = draw_answers(1, 4000, 0.7, seed=1)
    champion = draw_answers(1, 4000, 0.6, seed=2)

    interval = paired_bootstrap(candidate, champion)

    gains = candidate - champion
    half_width = 1.96 * gains.std() / np.sqrt(len(gains))
    assert interval.gain == pytest.approx(gains.mean())
    assert interval.lower == pytest.approx(gains.mean() - half_width, abs=half_width * 0.05)
    assert interval.upper == pytest.approx(gains.mean() + half_width, abs=half_width * 0.05)


def test_same_questions_in_ten_languages_do_not_narrow_the_interval():
    sides = [draw_answers(1, 300, 0.7, seed=1), draw_answers(1, 300, 0.6, seed=2)]
    repeated_sides = [make_scores({f"language {n}": side.tolist() for n in range(10)}) for side in sides]

    single = paired_bootstrap(*sides)
    repeated = paired_bootstrap(*repeated_sides)

    assert (repeated.lower, repeated.upper) == pytest.approx((single.lower, single.upper))


def test_all_languages_have_the_same_weight():
    candidate = make_scores({"de": [1.0] * 90, "fr": [0.0] * 10})
    champion = make_scores({"de": [0.0] * 90, "fr": [0.0] * 10})

    assert paired_bootstrap(candidate, champion).gain == 0.5


def test_95_percent_interval_contains_the_true_gain_in_about_95_percent_of_tests():
    hits = 0
    for seed in range(200):
        candidate = draw_answers(2, 200, 0.7, seed)
        interval = paired_bootstrap(candidate, draw_answers(2, 200, 0.6, 1000 + seed), resamples=500)
        hits += interval.lower <= 0.1 <= interval.upper

    assert 180 <= hits <= 198  # 190 expected

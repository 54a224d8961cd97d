"""The gate's decision, without any registry: what a candidate must show, and what it is refused for."""

import pandas as pd
import pytest

from infoxlm_core.results.evidence import COLUMNS, Outcomes
from infoxlm_core.results.gate import FEWEST_QUESTIONS, Contender, Verdict, decide

METRIC = "retrieval/served"


def contender(
    version: str, right: int, questions: int = 400, test: str = "one", asked: str = "q", best: int = 0, place="served"
) -> Contender:
    """A version that answers the first `right` of its questions, and with its best vector the first `best`."""
    rows = [
        ("m", "retrieval", vector, "de", direction, f"{asked}{number}", False, number < right_answers)
        for vector, right_answers in ((place, right), ("best", best))
        for direction in ("from_pivot", "to_pivot")
        for number in range(questions)
    ]
    outcomes = Outcomes(pd.DataFrame(rows, columns=list(COLUMNS)), "en")
    return Contender(f"version {version}", {METRIC: f"{right / questions}", "test_set": test}, lambda: outcomes)


def decided(candidate: Contender, champion: Contender | None, least: float = 0.0) -> Verdict:
    return decide(candidate, champion, {METRIC: least})


def test_the_first_version_is_champion_without_a_question():
    assert decided(contender("1", 0), None) == Verdict(
        True, "champion with retrieval/served 0.0: there was none before"
    )


def test_a_clear_gain_passes_and_an_equal_model_does_not():
    better = decided(contender("2", 240), contender("1", 200))
    equal = decided(contender("2", 200), contender("1", 200))

    assert better.passed and better.figures[METRIC]["gain"] == pytest.approx(0.1)
    assert not equal.passed and "not shown to be better than version 1" in equal.reason


def test_a_candidate_that_is_better_only_at_its_best_layer_does_not_pass():
    worse = decided(contender("2", 160, best=300), contender("1", 200, best=200))
    better = decided(contender("2", 240, best=200), contender("1", 200, best=300))

    assert not worse.passed and worse.figures[METRIC]["gain"] == pytest.approx(-0.1)
    assert better.passed and better.figures[METRIC]["gain"] == pytest.approx(0.1)


def test_a_champion_of_an_older_release_is_compared_at_its_contrast_layer_or_not_at_all():
    older = decided(contender("2", 240), contender("1", 200, best=300, place="contrast"))
    without_contrast = decided(contender("2", 240), contender("1", 200, best=300, place="best"))

    assert older.passed and older.figures[METRIC]["gain"] == pytest.approx(0.1)
    assert not without_contrast.passed
    assert "version 1 has no outcomes of retrieval/served by question. Evaluate the model" in without_contrast.reason


def test_a_margin_below_zero_tolerates_a_loss():
    assert not decided(contender("2", 199), contender("1", 200)).passed
    assert decided(contender("2", 199), contender("1", 200), least=-0.05).passed


@pytest.mark.parametrize(
    ("candidate", "said"),
    [
        (contender("2", 300, test="two"), "on another test set, promote by hand"),
        (contender("2", 300, asked="other"), "on other questions of retrieval/served, promote by hand"),
        (Contender("version 2", {"test_set": "one"}, lambda: None), "version 2 has no outcomes by question"),
    ],
)
def test_what_cannot_be_compared_is_refused_and_says_why(candidate, said):
    verdict = decided(candidate, contender("1", 200))

    assert not verdict.passed and said in verdict.reason


def test_too_few_questions_decide_nothing():
    few = FEWEST_QUESTIONS - 1

    verdict = decided(contender("2", few, questions=few), contender("1", 0, questions=few))

    assert not verdict.passed and f"{few} questions, fewer than {FEWEST_QUESTIONS}" in verdict.reason


START = contender("0", 200)


@pytest.mark.parametrize(
    ("right", "champion", "passed", "reason"),
    [
        (240, None, True, "champion, better than version 0: retrieval/served +0.1000"),
        (200, None, False, "candidate, not shown to be better than version 0"),
        (240, 180, True, "champion, better than version 1: retrieval/served +0.1500"),
        (190, 100, False, "candidate, not shown to be better than version 0"),
        (240, 240, False, "candidate, not shown to be better than version 1"),
    ],
)
def test_against_its_start_a_candidate_must_be_better_than_start_and_champion(right, champion, passed, reason):
    current = contender("1", champion) if champion else None

    verdict = decide(contender("2", right), current, {METRIC: 0.0}, START)

    assert verdict.passed is passed and verdict.reason.startswith(reason) and "\n" not in verdict.reason
    assert ("better than version 0" in verdict.reason) and (METRIC in verdict.figures)


def test_a_start_without_outcomes_lets_no_version_become_champion():
    verdict = decide(
        contender("1", 400), None, {METRIC: 0.0}, Contender("its start", {"test_set": "one"}, lambda: None)
    )

    assert not verdict.passed and "its start has no outcomes by question: evaluate and register again" in verdict.reason

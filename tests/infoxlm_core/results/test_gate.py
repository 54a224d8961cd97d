"""The gate's decision, without a registry."""

import pandas as pd
import pytest

from infoxlm_core.results.evidence import COLUMNS, Outcomes
from infoxlm_core.results.gate import FEWEST_QUESTIONS, Contender, Verdict, decide

METRIC = "retrieval/served"


def make_contender(
    version: str, right: int, *, questions: int = 400, test_set: str = "one", prefix: str = "q", best: int = 0,
    place: str = "served",
) -> Contender:  # fmt: skip
    """Return a version that answers the first `right` of its questions, and the first `best` with its best vector."""
    rows = []
    for vector, right_answers in ((place, right), ("best", best)):
        for direction in ("from_pivot", "to_pivot"):
            for number in range(questions):
                is_right = number < right_answers
                rows.append(("m", "retrieval", vector, "de", direction, f"{prefix}{number}", False, is_right))
    outcomes = Outcomes(pd.DataFrame(rows, columns=list(COLUMNS)), "en")
    return Contender(f"version {version}", {METRIC: f"{right / questions}", "test_set": test_set}, lambda: outcomes)


def make_unmeasured(name: str) -> Contender:
    return Contender(name, {"test_set": "one"}, lambda: None)


def judge(candidate: Contender, champion: Contender | None, limit: float = 0.0) -> Verdict:
    return decide(candidate, champion, {METRIC: limit})


def test_first_version_becomes_champion_without_a_comparison():
    assert judge(make_contender("1", 0), None) == Verdict(
        True, "champion with retrieval/served 0.0: there was none before"
    )


@pytest.mark.parametrize(
    ("candidate", "champion", "gain", "passed"),
    [
        ({"right": 240}, {"right": 200}, 0.1, True),
        ({"right": 200}, {"right": 200}, 0.0, False),
        ({"right": 160, "best": 300}, {"right": 200, "best": 200}, -0.1, False),  # better only at its best layer
        ({"right": 240, "best": 200}, {"right": 200, "best": 300}, 0.1, True),
        ({"right": 240}, {"right": 200, "best": 300, "place": "contrast"}, 0.1, True),  # of an older release
    ],
)
def test_candidate_passes_if_its_served_vector_is_clearly_better(candidate, champion, gain, passed):
    verdict = judge(make_contender("2", **candidate), make_contender("1", **champion))

    assert verdict.passed is passed
    assert verdict.figures[METRIC]["gain"] == pytest.approx(gain)
    assert ("not shown to be better than version 1" in verdict.reason) is not passed


def test_negative_limit_tolerates_a_loss():
    candidate = make_contender("2", 199)
    champion = make_contender("1", 200)

    assert not judge(candidate, champion).passed
    assert judge(candidate, champion, limit=-0.05).passed


@pytest.mark.parametrize(
    ("candidate", "champion", "reason"),
    [
        (make_contender("2", 300, test_set="two"), make_contender("1", 200), "on another test set, promote by hand"),
        (make_contender("2", 300, prefix="x"), make_contender("1", 200), f"on other questions of {METRIC}, promote by"),
        (make_unmeasured("version 2"), make_contender("1", 200), "version 2 has no outcomes by question: promote"),
        (make_contender("2", 240), make_contender("1", 200, place="best"), f"version 1 has no outcomes of {METRIC} by"),
        (make_contender("2", FEWEST_QUESTIONS - 1, questions=FEWEST_QUESTIONS - 1),
         make_contender("1", 0, questions=FEWEST_QUESTIONS - 1), f"fewer than {FEWEST_QUESTIONS}"),
    ],
)  # fmt: skip
def test_candidate_is_refused_if_it_cannot_be_compared(candidate, champion, reason):
    verdict = judge(candidate, champion)

    assert not verdict.passed
    assert reason in verdict.reason


@pytest.mark.parametrize(
    ("right", "champion_right", "passed", "reason"),
    [
        (240, None, True, "champion, better than version 0: retrieval/served +0.1000"),
        (200, None, False, "candidate, not shown to be better than version 0"),
        (240, 180, True, "champion, better than version 1: retrieval/served +0.1500"),
        (190, 100, False, "candidate, not shown to be better than version 0"),
        (240, 240, False, "candidate, not shown to be better than version 1"),
    ],
)
def test_candidate_must_be_better_than_its_start_and_the_champion(right, champion_right, passed, reason):
    champion = make_contender("1", champion_right) if champion_right else None

    verdict = decide(make_contender("2", right), champion, {METRIC: 0.0}, make_contender("0", 200))

    assert verdict.passed is passed
    assert verdict.reason.startswith(reason)
    assert "better than version 0" in verdict.reason  # both comparisons are reported
    assert METRIC in verdict.figures

"""The stored outcomes of questions."""

import pandas as pd
import pytest

from infoxlm_core.errors import InputError
from infoxlm_core.results.evidence import COLUMNS, Outcomes

DE, FR = ("de", "q"), ("fr", "q")


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    """Return the answers of a model to a question of two tasks."""
    rows = [
        ("mining", "served", "de", "to_pivot", "q", True, True),
        ("mining", "served", "de", "from_pivot", "q", True, False),
        ("mining", "served", "fr", "to_pivot", "q", False, True),
        ("mining", "served", "fr", "from_pivot", "q", False, True),
        ("mining", "best", "fr", "to_pivot", "q", False, False),
        ("tagging", "", "de", "", "q", False, True),
    ]
    return Outcomes(pd.DataFrame(rows, columns=list(COLUMNS[1:])), "en")


@pytest.mark.parametrize(
    ("metric", "scores"),
    [
        ("mining/served", {DE: 0.5, FR: 1.0}),
        ("mining/fr", {FR: 1.0}),
        ("mining/xx_en", {DE: 1.0, FR: 1.0}),
        ("mining/no_overlap", {DE: 0.5}),
        ("mining/best", {FR: 0.0}),
        ("tagging/mean", {DE: 1.0}),
        ("tagging/de", {DE: 1.0}),
    ],
)
def test_metric_averages_the_answers_of_its_rows(outcomes, metric, scores):
    assert outcomes.score_questions(metric).to_dict() == scores


@pytest.mark.parametrize("metric", ["mining/mean", "tagging/served", "tagging/xx_en", "tagging/no_overlap"])
def test_metric_without_answers_is_refused(outcomes, metric):
    with pytest.raises(InputError, match=f"no outcomes of {metric}"):
        outcomes.score_questions(metric)

"""The guard of an evaluation: its scores, and the outcomes by which two models are compared."""

from pathlib import Path

import pytest

from infoxlm_core.config import AlignedSetConfig
from infoxlm_core.results.evidence import Outcomes
from infoxlm_core.tasks.embedding import load_embedder
from infoxlm_core.tasks.retrieval import guard
from tests.toys.models import save_model

WORDS = [f"{letter}{number}" for letter in "abc" for number in range(10)]
ENGLISH = [f"a{first} b{second}" for first in range(10) for second in range(6)]
FINNISH = [f"c{number % 10} c{number // 10}" for number in range(60)]


def write_lines(path: Path, lines: list[str]) -> None:
    path.write_text("".join(f"{line}\n" for line in lines))


def test_outcomes_give_back_the_scores_and_belong_to_one_test_set(tmp_path):
    english = [*ENGLISH[:-1], ENGLISH[0]]  # one sentence occurs twice
    for language, lines in (("en", english), ("fr", english), ("fi", FINNISH)):  # French copies English
        write_lines(tmp_path / f"{language}.txt", lines)
    config = AlignedSetConfig(data=str(tmp_path))
    model = save_model(tmp_path / "model", words=WORDS)
    embedder = load_embedder(model)

    scores = guard.measure(config, model, embedder)
    outcomes = Outcomes(scores.outcomes, "en")
    write_lines(tmp_path / "fi.txt", FINNISH[::-1])
    outcomes_of_other_set = Outcomes(guard.measure(config, model, embedder).outcomes, "en")

    assert scores.languages["fr"]["mean"] == pytest.approx(59 / 60)  # of two equal sentences, only the first is found
    assert scores.languages["fi"]["mean"] < 0.2
    mean_by_language = outcomes.score_questions("guard/mean").groupby("language").mean()
    assert mean_by_language.mean() == pytest.approx(scores.mean["mean"])
    question_ids = outcomes.score_questions("guard/fi").index
    assert len(question_ids) == scores.counts["fi"] == 60
    assert not question_ids.equals(outcomes_of_other_set.score_questions("guard/fi").index)

"""The guard of an evaluation: its scores, and the outcomes by which two models are compared."""

from pathlib import Path

import pytest

from infoxlm_core.config import AlignedSetConfig
from infoxlm_core.results.evidence import Outcomes
from infoxlm_core.tasks.embedding import load_embedder
from infoxlm_core.tasks.retrieval import guard
from tests.toys.models import save_model

WORDS = [f"{letter}{number}" for letter in "abc" for number in range(10)]
ENGLISH = [f"a{number} b{other}" for number in range(10) for other in range(6)]
FINNISH = [f"c{number % 10} c{number // 10}" for number in range(60)]


def write_lines(path: Path, lines: list[str]) -> None:
    path.write_text("".join(f"{line}\n" for line in lines))


@pytest.fixture
def data(tmp_path) -> AlignedSetConfig:
    """French copies the English sentences, of which one occurs twice; Finnish is unrelated to them."""
    english = [*ENGLISH[:-1], ENGLISH[0]]
    (tmp_path / "data").mkdir()
    for language, lines in (("en", english), ("fr", english), ("fi", FINNISH)):
        write_lines(tmp_path / f"data/{language}.txt", lines)
    return AlignedSetConfig(data=str(tmp_path / "data"))


def test_copies_are_found_and_outcomes_give_back_the_scores(data, tmp_path):
    model = save_model(tmp_path / "model", words=WORDS)

    scores = guard.measure(data, model, load_embedder(model))

    assert scores.languages["fr"]["mean"] == pytest.approx(59 / 60)  # of two equal sentences, only the first is found
    assert scores.languages["fi"]["mean"] < 0.2
    outcomes = Outcomes(scores.outcomes, "en")
    assert outcomes.score_questions("guard/mean").groupby("language").mean().mean() == pytest.approx(
        scores.mean["mean"]
    )
    assert len(outcomes.score_questions("guard/fr")) == scores.counts["fr"] == 60


def test_answers_to_another_set_are_answers_to_other_questions(data, tmp_path):
    model = save_model(tmp_path / "model", words=WORDS)
    embedder = load_embedder(model)
    before = Outcomes(guard.measure(data, model, embedder).outcomes, "en").score_questions("guard/fi")
    write_lines(Path(data.data) / "fi.txt", list(reversed(FINNISH)))

    after = Outcomes(guard.measure(data, model, embedder).outcomes, "en").score_questions("guard/fi")

    assert len(before) == len(after) and not before.index.equals(after.index)

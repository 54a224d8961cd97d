"""What a training changed: gains by language, fixed and broken pairs, and how a page shows sentences."""

import pandas as pd
import pytest
import torch

from infoxlm_core.results import before_after, page
from infoxlm_core.results.before_after import MAX_EXAMPLES
from infoxlm_core.results.evidence import Outcomes
from infoxlm_core.results.summaries.ablation import summarise_metrics
from infoxlm_core.tasks.questions import Questions
from infoxlm_core.tasks.retrieval import held_out

PAIR_COUNT = 60
HOSTILE = "<img src=x onerror=alert(1)> | **bold** [link](javascript:x)\nline"
PAIRS = {
    code: [(f"save {number}", f"{code} {number}") for number in range(PAIR_COUNT - 1)] + [("hostile", HOSTILE)]
    for code in ("de", "fr")
}
QUESTIONS = Questions("en", {}, PAIRS, {}, {code: torch.arange(PAIR_COUNT) < 55 for code in PAIRS})


def answer_questions(**errors: list[int]) -> pd.DataFrame:
    """Return the table of a model that retrieves the next sentence instead of its translation for some German pairs.

    Args:
        **errors: direction -> rows of the errors.
    """
    nearest = {}
    for code in PAIRS:
        nearest[code] = {direction: torch.arange(PAIR_COUNT) for direction in ("from_pivot", "to_pivot")}
    for direction, rows in errors.items():
        nearest["de"][direction][rows] = (torch.tensor(rows) + 1) % PAIR_COUNT
    return held_out.tabulate(QUESTIONS, {"served": nearest})


def answer_guard(right_answers: dict[str, int]) -> pd.DataFrame:
    """Return the outcomes of a guard in which the first questions of each language are answered."""
    rows = []
    for language, right_count in right_answers.items():
        for direction in ("from_pivot", "to_pivot"):
            for number in range(100):
                rows.append(("guard", "", language, direction, f"q{number}", False, number < right_count))
    return pd.DataFrame(rows, columns=["task", "place", "language", "direction", "question", "unshared", "right"])


START = answer_questions(from_pivot=[0, 1, 2, 3], to_pivot=[0, 59])
ENCODER = answer_questions(from_pivot=[3, 7], to_pivot=[59])


def test_gains_and_fixed_and_broken_answers_are_counted_by_language():
    comparison = before_after.compare_outcomes(Outcomes(START, "en"), Outcomes(ENCODER, "en"), {"en", "de"})

    assert list(comparison) == ["held_out"]
    rows = {row["name"]: row for row in comparison["held_out"]}
    assert list(rows) == ["mean", "no shared token", "de", "fr"]
    german = rows["de"]
    assert (german["fixed"], german["broken"], german["answers"]) == (4, 1, 120)
    assert german["start"] == pytest.approx(114 / 120)
    assert german["encoder"] == pytest.approx(117 / 120)
    assert german["gain"] == pytest.approx(3 / 120)
    assert german["lower"] < german["gain"] < german["upper"]
    assert rows["mean"]["gain"] == pytest.approx(german["gain"] / 2)
    assert (rows["fr"]["gain"], rows["fr"]["lower"], rows["fr"]["fixed"]) == (0, 0, 0)
    assert rows["no shared token"]["answers"] == 220


def test_guard_marks_languages_outside_of_the_training_text_and_shows_them_last():
    start = Outcomes(pd.concat([START, answer_guard({"fin": 90, "deu": 80})]), "en")
    encoder = Outcomes(pd.concat([ENCODER, answer_guard({"fin": 85, "deu": 84})]), "en")

    rows = before_after.compare_outcomes(start, encoder, {"en", "de"})["guard"]

    assert [(row["name"], pytest.approx(row["gain"])) for row in rows] == [
        ("mean", -0.005), ("languages of the training", 0.04), ("other languages", -0.05), ("deu", 0.04),
        ("fin (not in the training text)", -0.05),
    ]  # fmt: skip


def test_examples_show_the_retrieved_sentences_before_and_after():
    examples = before_after.find_examples(QUESTIONS, START, ENCODER)

    assert examples.broken == [("en → de", "save 7", "de 7", "de 7", "de 8")]
    assert len(examples.fixed) == 4
    assert examples.fixed[0] == ("en → de", "save 0", "de 0", "de 1", "de 0")
    assert ("de → en", "de 0", "save 0", "save 1", "save 0") in examples.fixed
    assert [example.direction for example in examples.neighbours[:2]] == ["en → de", "en → fr"]
    assert len(examples.neighbours) == before_after.MAX_NEIGHBOURS


def test_at_most_max_examples_are_shown():
    examples = before_after.find_examples(QUESTIONS, answer_questions(to_pivot=list(range(40))), ENCODER)

    assert len(examples.fixed) == MAX_EXAMPLES


def test_sentences_are_shown_as_text_and_kept_out_of_the_model_card(tmp_path):
    start = answer_questions(from_pivot=[59])  # the hostile sentence is fixed
    encoder = answer_questions()
    comparison = before_after.compare_outcomes(Outcomes(start, "en"), Outcomes(encoder, "en"), {"en"})
    examples = before_after.find_examples(QUESTIONS, start, encoder)

    sections = before_after.build_sections("ours", comparison, examples, {"cost/cpu_hours/all": 0.5})
    page.write_page(tmp_path, "report", summarise_metrics("toy", []), sections)

    html = (tmp_path / "report.html").read_text()
    assert "<img src=x" not in html
    assert "&lt;img src=x onerror=alert(1)&gt; | **bold**" in html
    assert '<td class="sentence" dir="auto">' in html
    assert "Fixed: found only after the training (1 of 1)" in html
    assert "Broken: found" not in html
    assert "0.50, up to this evaluation" in html
    markdown = (tmp_path / "report.md").read_text()
    assert r"\<img src=x onerror=alert(1)\> \| \*\*bold\*\* \[link\](javascript:x) line |" in markdown
    assert HOSTILE in pd.read_csv(tmp_path / "tables/fixed.csv")["right translation"].to_list()
    tables_without_sentences = [
        table.name for section in sections for table in section.tables if not table.has_sentences
    ]
    assert tables_without_sentences == ["before-after"]


@pytest.mark.parametrize("passed", [True, False])
def test_merge_marks_the_chosen_weight_and_tells_if_no_weight_passed(passed):
    accuracies = {"held_out": 0.9, "guard": 0.8, "guard_lower": -0.001}
    curve = [{"weight": weight, **accuracies} for weight in (0.0, 0.25, 0.5)]
    merge = {"weight": 0.25, "passed": passed, "largest_loss": 0.005, "curve": curve}

    section = before_after.build_merge_section(merge)

    [table] = section.tables
    assert [line.name for line in table.lines] == ["0 (start)", "0.25", "0.5"]
    assert table.highlighted == "0.25"
    assert bool(section.problems) is not passed
    assert ("slightly too high" in section.text) is passed

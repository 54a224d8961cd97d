"""What a training changed: gains by language, fixed and broken pairs, and how a page shows sentences."""

import pandas as pd
import pytest
import torch

from infoxlm_core.results import before_after, page, tables
from infoxlm_core.results.before_after import MAX_EXAMPLES
from infoxlm_core.results.evidence import Outcomes
from infoxlm_core.results.summary import summarise_metrics
from infoxlm_core.tasks.questions import Questions
from infoxlm_core.tasks.retrieval import held_out

NUM_PAIRS = 60
HOSTILE = "<img src=x onerror=alert(1)> | **bold** [link](javascript:x)\nline"
PAIRS = {
    code: [(f"save {number}", f"{code} {number}") for number in range(NUM_PAIRS - 1)] + [("hostile", HOSTILE)]
    for code in ("de", "fr")
}
QUESTIONS = Questions("en", {}, PAIRS, {}, {code: torch.arange(NUM_PAIRS) < 55 for code in PAIRS})


def answer(**errors: list[int]) -> pd.DataFrame:
    """Return the table of a model that retrieves the next sentence instead of its translation for some German pairs.

    Args:
        errors: direction -> rows of the errors.
    """
    nearest = {}
    for code in PAIRS:
        nearest[code] = {direction: torch.arange(NUM_PAIRS) for direction in ("from_pivot", "to_pivot")}
    for direction, rows in errors.items():
        nearest["de"][direction][rows] = (torch.tensor(rows) + 1) % NUM_PAIRS
    return held_out.tabulate(QUESTIONS, {"served": nearest})


def guard_rows(right: dict[str, int]) -> pd.DataFrame:
    """Return the outcomes of a guard in which the first questions of each language are answered."""
    rows = [
        ("guard", "", language, direction, f"q{number}", False, number < share)
        for language, share in right.items()
        for direction in ("from_pivot", "to_pivot")
        for number in range(100)
    ]
    return pd.DataFrame(rows, columns=["task", "place", "language", "direction", "question", "unshared", "right"])


START = answer(from_pivot=[0, 1, 2, 3], to_pivot=[0, 59])
ENCODER = answer(from_pivot=[3, 7], to_pivot=[59])


def test_gains_and_counts_of_fixed_and_broken_answers_are_by_language():
    comparison = before_after.compare(Outcomes(START, "en"), Outcomes(ENCODER, "en"), {"en", "de"})

    rows = {row["name"]: row for row in comparison["held_out"]}
    assert list(rows) == ["mean", "no shared token", "de", "fr"] and "guard" not in comparison
    german = rows["de"]
    assert (german["fixed"], german["broken"], german["answers"]) == (4, 1, 120)
    assert german["start"] == pytest.approx(114 / 120) and german["encoder"] == pytest.approx(117 / 120)
    assert german["gain"] == pytest.approx(3 / 120) and german["lower"] < german["gain"] < german["upper"]
    assert rows["mean"]["gain"] == pytest.approx(german["gain"] / 2)
    assert (rows["fr"]["gain"], rows["fr"]["lower"], rows["fr"]["fixed"]) == (0, 0, 0)
    assert rows["no shared token"]["answers"] == 220


def test_languages_of_the_guard_outside_of_the_training_text_come_last_and_are_marked():
    start = Outcomes(pd.concat([START, guard_rows({"fin": 90, "deu": 80})]), "en")
    encoder = Outcomes(pd.concat([ENCODER, guard_rows({"fin": 85, "deu": 84})]), "en")

    rows = before_after.compare(start, encoder, {"en", "de"})["guard"]

    gains = {row["name"]: pytest.approx(row["gain"]) for row in rows}
    assert list(gains.items()) == [
        ("mean", -0.005), ("languages of the training", 0.04), ("other languages", -0.05), ("deu", 0.04),
        ("fin (not in the training text)", -0.05),
    ]  # fmt: skip


def test_examples_have_sentence_right_translation_and_what_was_found():
    examples = before_after.find_examples(QUESTIONS, START, ENCODER)

    assert examples.broken == [("en → de", "save 7", "de 7", "de 7", "de 8")]
    assert examples.fixed[0] == ("en → de", "save 0", "de 0", "de 1", "de 0")
    assert ("de → en", "de 0", "save 0", "save 1", "save 0") in examples.fixed and len(examples.fixed) == 4
    assert [example.direction for example in examples.neighbours[:2]] == ["en → de", "en → fr"]
    assert len(examples.neighbours) == before_after.NEIGHBOURS

    many = before_after.find_examples(QUESTIONS, answer(to_pivot=list(range(40))), ENCODER)
    assert len(many.fixed) == MAX_EXAMPLES


@pytest.fixture
def written(tmp_path):
    """A page with the sections, in which a hostile sentence was fixed."""
    start, encoder = answer(from_pivot=[59]), answer()
    comparison = before_after.compare(Outcomes(start, "en"), Outcomes(encoder, "en"), {"en"})
    examples = before_after.find_examples(QUESTIONS, start, encoder)
    sections = before_after.lay_out("ours", comparison, examples, {"cost/cpu_hours/all": 0.5})
    page.write_page(tmp_path, "report", summarise_metrics("toy", []), sections)
    return tmp_path, sections


def test_sentences_are_shown_as_text_whatever_they_contain(written):
    output, _ = written

    html, markdown = ((output / f"report.{suffix}").read_text() for suffix in ("html", "md"))

    assert "<img src=x" not in html and "&lt;img src=x onerror=alert(1)&gt; | **bold**" in html
    assert r"\<img src=x onerror=alert(1)\> \| \*\*bold\*\* \[link\](javascript:x) line |" in markdown
    assert "Fixed: found only after the training (1 of 1)" in html and "Broken: found" not in html
    assert '<td class="sentence" dir="auto">' in html
    assert "CPU hours" in html and "0.50, up to this evaluation" in html
    assert HOSTILE in pd.read_csv(output / "tables/fixed.csv")["right translation"].to_list()


def test_only_tables_with_sentences_are_kept_from_the_model_card(written):
    _, sections = written

    shown = [table.name for section in sections for table in section.tables if not table.has_sentences]

    assert shown == ["before-after"]
    assert tables.escape_markdown("a\n# b") == r"a \# b"


@pytest.mark.parametrize("passed", [True, False])
def test_the_merge_curve_marks_the_chosen_weight_and_tells_if_none_passed(passed):
    point = {"held_out": 0.9, "guard": 0.8, "guard_lower": -0.001}
    curve = [{"weight": weight, **point} for weight in (0.0, 0.25, 0.5)]

    section = before_after.lay_out_merge({"weight": 0.25, "passed": passed, "largest_loss": 0.005, "curve": curve})

    [table] = section.tables
    assert [line.name for line in table.lines if line.under_test] == ["0.25"]
    assert [line.name for line in table.lines] == ["0 (start)", "0.25", "0.5"]
    assert bool(section.problems) is not passed and ("slightly too high" in section.text) is passed

"""Compare an encoder's answers before and after its training: gains, and answers that were fixed or broken."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

import pandas as pd

from infoxlm_core import languages
from infoxlm_core.results import evidence, figures
from infoxlm_core.results.bootstrap import paired_bootstrap
from infoxlm_core.results.evidence import Outcomes
from infoxlm_core.results.page import Section
from infoxlm_core.results.statistics import INTERVAL, Statistic
from infoxlm_core.results.tables import SENTENCE, Column, Line, PageTable, format_count, format_percent
from infoxlm_core.tasks.task import Fact

if TYPE_CHECKING:
    from infoxlm_core.tasks.questions import Questions  # imports torch

MAX_EXAMPLES = 18
"""Largest number of fixed answers that a page lists, and of broken answers."""
MAX_NEIGHBOURS = 10
"""Largest number of questions that a page lists with their nearest sentences."""
_MEAN_ROW = 0  # index of the mean over all languages in a table of `compare_outcomes`
_format_percent = partial(format_percent, decimals=2)


class Example(NamedTuple):
    """A question, and the sentences retrieved for the question before and after the training."""

    direction: str
    sentence: str
    translation: str
    retrieved_before: str
    retrieved_after: str


class Examples(NamedTuple):
    """The questions that a page shows as examples."""

    broken: Sequence[Example]  # the right translation was retrieved only before the training
    fixed: Sequence[Example]  # only after the training
    neighbours: Sequence[Example]  # any questions, shown with their nearest sentences


# ---------------------------------------------------------------- computation


def compare_outcomes(
    start: Outcomes, encoder: Outcomes, trained_languages: Collection[str]
) -> dict[str, list[dict[str, Any]]]:
    """Compare the answers before and after the training, on the held-out pairs and on the guard.

    Args:
        start: answers of the model before its training.
        encoder: answers of the trained model to the same questions.
        trained_languages: two-letter codes of the languages in the training text.

    Returns:
        A mapping with the rows of the tables `held_out` and, for an evaluation with a guard, `guard`. The rows cover
        the mean, groups of languages and single languages. `_compare_answers` makes their values.
    """
    before = start.select_rows("retrieval/served")
    after = encoder.select_rows("retrieval/served")
    codes = list(dict.fromkeys(after["language"]))
    # The row of pairs without a shared token follows the mean, because it also covers all languages.
    mean, *rows_of_languages = _compare_groups(before, after, {"mean": codes} | {code: [code] for code in codes})
    rows = [mean]
    if after["unshared"].any():
        change = _compare_answers(before[before["unshared"]], after[after["unshared"]])
        rows.append({"name": "no shared token", **change})
    comparison = {"held_out": rows + rows_of_languages}
    if "guard" in set(encoder.table["task"]):
        comparison["guard"] = _compare_guard(start, encoder, trained_languages)
    return comparison


def _compare_guard(start: Outcomes, encoder: Outcomes, trained_languages: Collection[str]) -> list[dict[str, Any]]:
    """Compare the answers on the guard. The names of languages without training text are marked."""
    before = start.select_rows("guard/mean")
    after = encoder.select_rows("guard/mean")
    codes = list(dict.fromkeys(after["language"]))
    rows = _compare_groups(before, after, _group_languages(codes, trained_languages))
    for row in rows:
        is_language = row["name"] in codes
        if is_language and languages.two_letters(row["name"]) not in trained_languages:
            row["name"] += " (not in the training text)"
    return rows


def _group_languages(codes: Sequence[str], trained_languages: Collection[str]) -> dict[str, list[str]]:
    """Return the language groups of a table by row name: all, those with and without training text, and each alone."""
    trained = [code for code in codes if languages.two_letters(code) in trained_languages]
    others = [code for code in codes if languages.two_letters(code) not in trained_languages]
    groups = {"mean": trained + others}
    if trained and others:  # otherwise a group would repeat the mean
        groups["languages of the training"] = trained
        groups["other languages"] = others
    for code in trained + others:
        groups[code] = [code]
    return groups


def _compare_groups(
    before: pd.DataFrame, after: pd.DataFrame, groups: Mapping[str, Sequence[str]]
) -> list[dict[str, Any]]:
    """Compare the answers in each group of languages. `groups` maps row names to languages."""
    rows = []
    for name, codes in groups.items():
        change = _compare_answers(before[before["language"].isin(codes)], after[after["language"].isin(codes)])
        rows.append({"name": name, **change})
    return rows


def _compare_answers(before: pd.DataFrame, after: pd.DataFrame) -> dict[str, Any]:
    """Return both accuracies, the gain with its interval, and the numbers of fixed, broken and all answers."""
    key_columns = ["language", "direction", "question"]  # a question has one answer per direction
    right_before = before.set_index(key_columns)["right"].astype(bool)
    right_after = after.set_index(key_columns)["right"].astype(bool)
    scores_before = evidence.score_questions(before)
    scores_after = evidence.score_questions(after)
    interval = paired_bootstrap(scores_after, scores_before)
    return {
        "start": fmean(scores_before.groupby("language").mean()),
        "encoder": fmean(scores_after.groupby("language").mean()),
        "gain": interval.gain,
        "lower": interval.lower,
        "upper": interval.upper,
        "fixed": int((right_after & ~right_before).sum()),
        "broken": int((right_before & ~right_after).sum()),
        "answers": len(right_after),
    }


def find_examples(questions: "Questions", start_answers: pd.DataFrame, encoder_answers: pd.DataFrame) -> Examples:
    """Select example questions from all languages.

    Args:
        questions: held-out questions.
        start_answers: table of answers before the training, made by `held_out.tabulate`.
        encoder_answers: table of answers after the training, in the same order.
    """
    # `served` is the vector that users get. With new row numbers, row i of both tables answers the same question.
    before = start_answers[start_answers["place"] == "served"].reset_index()
    after = encoder_answers[encoder_answers["place"] == "served"].reset_index()
    answers = after[["language", "direction"]].assign(
        row=after.groupby(["language", "direction"]).cumcount(),
        right_before=before["right"],
        right_after=after["right"],
        nearest_before=before["nearest"].astype(int),  # floats, because other tasks leave the column empty
        nearest_after=after["nearest"].astype(int),
    )
    is_broken = answers["right_before"] & ~answers["right_after"]
    is_fixed = answers["right_after"] & ~answers["right_before"]
    # Most questions exist in all L languages. To avoid repetitions, language i shows rows i, i + L, i + 2 L, …
    language_numbers = {code: number for number, code in enumerate(questions.pairs)}
    is_shown_row = answers["row"] % len(questions.pairs) == answers["language"].map(language_numbers)
    shows_neighbours = is_shown_row & (answers["direction"] == "from_pivot")
    return Examples(
        broken=_select_examples(questions, answers[is_broken], MAX_EXAMPLES),
        fixed=_select_examples(questions, answers[is_fixed], MAX_EXAMPLES),
        neighbours=_select_examples(questions, answers[shows_neighbours], MAX_NEIGHBOURS),
    )


def _select_examples(questions: "Questions", answers: pd.DataFrame, limit: int) -> list[Example]:
    """Return up to `limit` answers as examples: the first answer of each language, then the second, and so on.

    Args:
        questions: held-out questions.
        answers: table with one row per answer. Its columns `row`, `nearest_before` and `nearest_after` have the indices
            of the question and of the retrieved sentences in `questions.pairs`.
        limit: largest number of examples.
    """
    rank_in_language = answers.groupby("language").cumcount()
    selected_answers = answers.assign(rank=rank_in_language).sort_values("rank", kind="stable").head(limit)
    examples = []
    for answer in selected_answers.itertuples():
        pivot_sentences, other_sentences = zip(*questions.pairs[answer.language], strict=True)
        if answer.direction == "from_pivot":
            direction = f"{questions.pivot} → {answer.language}"
            sentence = pivot_sentences[answer.row]
            candidates = other_sentences
        else:
            direction = f"{answer.language} → {questions.pivot}"
            sentence = other_sentences[answer.row]
            candidates = pivot_sentences
        example = Example(
            direction,
            sentence,
            translation=candidates[answer.row],
            retrieved_before=candidates[answer.nearest_before],
            retrieved_after=candidates[answer.nearest_after],
        )
        examples.append(example)
    return examples


# ---------------------------------------------------------------- sections of the report


def build_sections(
    model: str, comparison: Mapping[str, Any], examples: Examples, hours: Mapping[str, float]
) -> list[Section]:
    """Build the report sections about the changes made by the training.

    Args:
        model: name of the trained model.
        comparison: result of `compare_outcomes`.
        examples: questions to show.
        hours: costs of the run up to its evaluation, such as {"cost/cpu_hours/all": 0.5}.
    """
    sections = [_build_gains_section(model, comparison, hours)]
    changed_tables = _tabulate_changed_answers(examples, totals=comparison["held_out"][_MEAN_ROW])
    if changed_tables:
        sections.append(Section("Broken and fixed pairs", tables=changed_tables))
    sections.append(_build_neighbours_section(examples.neighbours))
    return sections


def _build_gains_section(model: str, comparison: Mapping[str, Any], hours: Mapping[str, float]) -> Section:
    """Build the section about the gains by language and the hours of the run."""
    totals = comparison["held_out"][_MEAN_ROW]
    text = (
        f"“start” is the encoder before this training. Each of the {totals['answers']:,} answers is for one held-out "
        f"pair and direction. The training fixed {totals['fixed']:,} wrong answers and broke {totals['broken']:,} "
        f"right answers. Below each gain is its paired {INTERVAL}."
    )
    tables = [_tabulate_changes("before-after", "Held-out pairs", model, comparison["held_out"])]
    problems = []
    if "guard" in comparison:
        tables.append(_tabulate_changes("before-after-guard", "Guard: general text", model, comparison["guard"]))
        guard = comparison["guard"][_MEAN_ROW]
        if guard["upper"] < 0:
            problems.append(f"The encoder is worse on general text: the guard lost {-100 * guard['gain']:.2f} points.")
    facts = []
    for name, value in hours.items():
        device = name.split("/")[1].removesuffix("_hours").upper()  # "cost/cpu_hours/all" -> "CPU"
        description = f"{value:.2f}, up to this evaluation, without steps whose results were reused"
        facts.append(Fact(f"{device} hours", description))
    return Section("Before and after", text, problems=problems, tables=tables, facts=facts)


def _tabulate_changed_answers(examples: Examples, totals: Mapping[str, Any]) -> list[PageTable]:
    """Tabulate examples of broken and fixed answers. `totals` contains the counts of all such answers."""
    tables = []
    if examples.broken:
        title = f"Broken: found before the training, but not after it ({len(examples.broken)} of {totals['broken']:,})"
        lines = [_make_line(example, [example.retrieved_after]) for example in examples.broken]
        tables.append(_make_examples_table("broken", title, ["found instead"], lines))
    if examples.fixed:
        title = f"Fixed: found only after the training ({len(examples.fixed)} of {totals['fixed']:,})"
        lines = [_make_line(example, [example.retrieved_before]) for example in examples.fixed]
        tables.append(_make_examples_table("fixed", title, ["found before"], lines))
    return tables


def _build_neighbours_section(examples: Sequence[Example]) -> Section:
    """Build the section about the nearest sentences before and after the training."""
    text = f"The nearest sentence in the other language, for {len(examples)} questions. ✓ marks the right translation."
    lines = [_make_line(example, [example.retrieved_before, example.retrieved_after]) for example in examples]
    table = _make_examples_table("neighbours", "", ["nearest before", "nearest after"], lines)
    return Section("Nearest sentences", text, tables=[table])


def _make_line(example: Example, retrieved: Sequence[str]) -> Line:
    """Make the row of an example. A check mark precedes a retrieved sentence that is the right translation."""
    cells = [example.sentence, example.translation]
    for sentence in retrieved:
        cells.append(f"✓ {sentence}" if sentence == example.translation else sentence)
    return Line(example.direction, tuple(cells))


def _make_examples_table(name: str, title: str, retrieved_headings: Sequence[str], lines: Sequence[Line]) -> PageTable:
    """Make a table of questions, translations and retrieved sentences."""
    headings = ["sentence", "right translation", *retrieved_headings]
    columns = tuple(Column(heading, role=SENTENCE) for heading in headings)
    return PageTable(name, title, columns, tuple(lines), head="direction")


def build_merge_section(merge: Mapping[str, Any]) -> Section:
    """Build the section about the weighted mean of the starting encoder and the trained encoder.

    Args:
        merge: mapping with the chosen `weight`; `passed`, the result of the check on the guard; `largest_loss`, the
            limit of this check; and `curve`, the scores of all weights.
    """
    chosen_weight = f"{merge['weight']:g}"
    columns = (
        Column("held-out pairs, %", _format_percent),
        Column("guard, %", _format_percent),
        Column("lower end of the guard's gain, points", _format_points),
    )
    lines = []
    for scores in merge["curve"]:
        weight = f"{scores['weight']:g}" if scores["weight"] else "0 (start)"
        lines.append(Line(weight, (scores["held_out"], scores["guard"], scores["guard_lower"])))
    text = f"This encoder is start + {chosen_weight} × (trained encoder - start)."
    problems = []
    if merge["passed"]:
        text += (
            f" It has the largest weight at which the paired {INTERVAL} of the guard's gain lies above "
            f"{_format_points(-merge['largest_loss'])} points. The weight was chosen on the guard, so the guard's "
            "score is slightly too high."
        )
    else:
        problems.append("Every weight loses too much on the guard. This encoder has the smallest weight.")
    title = f"Accuracies by weight; the weight of this encoder is {chosen_weight}"
    table = PageTable("merge", title, columns, tuple(lines), head="weight", highlighted=chosen_weight)
    drawings = {"merge": partial(figures.draw_merge, merge["curve"], merge["weight"])}
    return Section("Merge with the start", text, problems=problems, tables=[table], drawings=drawings)


def _tabulate_changes(name: str, title: str, model: str, rows: Iterable[Mapping[str, Any]]) -> PageTable:
    """Tabulate accuracies, gains and counts of answers by language group."""
    columns = (
        Column("start, %", _format_percent),
        Column(f"{model}, %", _format_percent),
        Column("gain, points", _format_points, role="sum", has_intervals=True),
        Column("fixed", format_count),
        Column("broken", format_count),
        Column("answers", format_count),
    )
    lines = []
    for row in rows:
        gain = Statistic(1, row["gain"], interval=(row["lower"], row["upper"]))
        cells = (row["start"], row["encoder"], gain, row["fixed"], row["broken"], row["answers"])
        lines.append(Line(row["name"], cells))
    return PageTable(name, title, columns, tuple(lines), head="language", highlighted="mean")


def _format_points(difference: float) -> str:
    """Format a difference of shares as percentage points with a sign."""
    return f"{100 * difference:+.2f}"

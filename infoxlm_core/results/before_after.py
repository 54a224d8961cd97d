"""Compare an encoder with the model that its training started from: gains, and pairs that were fixed and broken."""

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
from infoxlm_core.results.tables import SENTENCE, Column, Line, PageTable, count, percent
from infoxlm_core.tasks.task import Fact

if TYPE_CHECKING:
    from infoxlm_core.tasks.questions import Questions  # imports torch

MAX_EXAMPLES = 18
"""Fixed pairs, and broken pairs, that a page lists."""
NEIGHBOURS = 10
"""Questions whose nearest sentences a page shows before and after."""
_in_percent = partial(percent, decimals=2)


class Example(NamedTuple):
    """A question with what was retrieved before and after the training."""

    direction: str
    sentence: str
    right: str
    before: str
    after: str


class Examples(NamedTuple):
    """Questions that a page shows."""

    broken: Sequence[Example]
    fixed: Sequence[Example]
    neighbours: Sequence[Example]


# ---------------------------------------------------------------- computation


def compare(start: Outcomes, encoder: Outcomes, trained_languages: Collection[str]) -> dict[str, list[dict[str, Any]]]:
    """Return what changed on the held-out pairs and, if there is one, on the guard.

    Args:
        start: the answers of the model before its training.
        encoder: the answers of the trained model to the same questions.
        trained_languages: two-letter codes of the languages of the training text.

    Returns:
        `held_out` and, if there is a guard, `guard`: rows for the mean, for groups of languages and for each language,
        with the accuracies of both models, the gain with its interval, and how many answers were fixed and broken.
    """
    before = start.select_rows("retrieval/served")
    after = encoder.select_rows("retrieval/served")
    codes = list(dict.fromkeys(after["language"]))
    rows = _compare_groups(before, after, {"mean": codes} | {code: [code] for code in codes})
    if after["unshared"].any():
        unshared_change = _compare_answers(before[before["unshared"]], after[after["unshared"]])
        rows.insert(1, {"name": "no shared token", **unshared_change})
    comparison = {"held_out": rows}
    if "guard" in set(encoder.table["task"]):
        comparison["guard"] = _compare_guard(start, encoder, trained_languages)
    return comparison


def _compare_guard(start: Outcomes, encoder: Outcomes, trained_languages: Collection[str]) -> list[dict[str, Any]]:
    """Return what changed on the guard, and mark the languages that the training text does not have."""
    before = start.select_rows("guard/mean")
    after = encoder.select_rows("guard/mean")
    groups = _group_by_training(after["language"], trained_languages)
    rows = _compare_groups(before, after, groups)
    for row in rows:
        is_language = groups[row["name"]] == [row["name"]]
        if is_language and languages.two_letters(row["name"]) not in trained_languages:
            row["name"] += " (not in the training text)"
    return rows


def _group_by_training(codes: Iterable[str], trained_languages: Collection[str]) -> dict[str, list[str]]:
    """Return name of a row of the comparison -> the languages that the row averages over.

    The mean comes first, then the two groups if both have languages, then each language, those of the training first.
    """
    groups: dict[str, list[str]] = {"mean": [], "languages of the training": [], "other languages": []}
    for code in dict.fromkeys(codes):
        is_trained = languages.two_letters(code) in trained_languages
        group = "languages of the training" if is_trained else "other languages"
        groups[group].append(code)
        groups["mean"].append(code)
    ordered_codes = groups["languages of the training"] + groups["other languages"]
    if not (groups["languages of the training"] and groups["other languages"]):  # the only group is the mean itself
        groups = {"mean": groups["mean"]}
    return groups | {code: [code] for code in ordered_codes}


def _compare_groups(
    before: pd.DataFrame, after: pd.DataFrame, groups: Mapping[str, Sequence[str]]
) -> list[dict[str, Any]]:
    """Return a row for each group of languages."""
    rows = []
    for name, codes in groups.items():
        change = _compare_answers(before[before["language"].isin(codes)], after[after["language"].isin(codes)])
        rows.append({"name": name, **change})
    return rows


def _compare_answers(before: pd.DataFrame, after: pd.DataFrame) -> dict[str, Any]:
    """Return the accuracies of both models, the gain with its interval, and how many answers were fixed and broken."""
    key_columns = ["language", "direction", "question"]  # a question has one answer in each direction
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


def find_examples(questions: "Questions", start: pd.DataFrame, encoder: pd.DataFrame) -> Examples:
    """Return questions that a page shows, spread over all languages.

    Args:
        questions: the held-out questions.
        start: the answers of the model before its training, as `held_out.tabulate` returns them.
        encoder: the answers of the trained model.
    """
    before = start[start["place"] == "served"].reset_index()
    after = encoder[encoder["place"] == "served"].reset_index()
    answers = after[["language", "direction"]].assign(
        row=after.groupby(["language", "direction"]).cumcount(),
        right_before=before["right"],
        right_after=after["right"],
        before=before["nearest"].astype(int),  # a table of several tasks has missing values, and so floats
        after=after["nearest"].astype(int),
    )
    is_broken = answers["right_before"] & ~answers["right_after"]
    is_fixed = answers["right_after"] & ~answers["right_before"]
    # Most questions are the same in all languages, so each of L languages shows every L-th row, from its own number on.
    language_number = answers["language"].map({code: number for number, code in enumerate(questions.pairs)})
    is_shown_row = answers["row"] % len(questions.pairs) == language_number
    is_neighbour = is_shown_row & (answers["direction"] == "from_pivot")
    return Examples(
        broken=_select_examples(questions, answers[is_broken], MAX_EXAMPLES),
        fixed=_select_examples(questions, answers[is_fixed], MAX_EXAMPLES),
        neighbours=_select_examples(questions, answers[is_neighbour], NEIGHBOURS),
    )


def _select_examples(questions: "Questions", answers: pd.DataFrame, limit: int) -> list[Example]:
    """Return up to `limit` answers as examples: the first one of each language, then the second ones, and so on."""
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
            right=candidates[answer.row],
            before=candidates[answer.before],
            after=candidates[answer.after],
        )
        examples.append(example)
    return examples


# ---------------------------------------------------------------- sections of the report


def lay_out(model: str, comparison: Mapping[str, Any], examples: Examples, hours: Mapping[str, float]) -> list[Section]:
    """Return the sections about the training: gains by language, examples, and the hours of the run.

    Args:
        model: name of the trained model.
        comparison: the result of `compare`.
        examples: questions to show.
        hours: costs of the run up to its evaluation, such as {"cost/cpu_hours/all": 0.5}.
    """
    total = comparison["held_out"][0]
    text = (
        f"“start” is the encoder before this training. There are {total['answers']:,} answers, one for each held-out "
        f"pair and direction. The training fixed {total['fixed']:,} wrong answers and broke {total['broken']:,} right "
        f"answers. The paired {INTERVAL} of each gain is below the gain."
    )
    tables = [_tabulate_changes("before-after", "Held-out pairs", model, comparison["held_out"])]
    problems = []
    if "guard" in comparison:
        tables.append(_tabulate_changes("before-after-guard", "Guard: general text", model, comparison["guard"]))
        guard = comparison["guard"][0]
        if guard["upper"] < 0:
            problems.append(f"The encoder is worse on general text: the guard lost {-100 * guard['gain']:.2f} points.")
    facts = []
    for name, value in hours.items():  # such as cost/cpu_hours/all
        device = name.split("/")[1].removesuffix("_hours").upper()  # CPU or GPU
        description = f"{value:.2f}, up to this evaluation, without steps that an earlier run made"
        facts.append(Fact(f"{device} hours", description))
    sections = [Section("Before and after", text, problems=problems, tables=tables, facts=facts)]
    example_tables = []
    if examples.broken:
        title = f"Broken: found before the training, but not after it ({len(examples.broken)} of {total['broken']:,})"
        example_tables.append(_tabulate_examples("broken", title, {"found instead": "after"}, examples.broken))
    if examples.fixed:
        title = f"Fixed: found only after the training ({len(examples.fixed)} of {total['fixed']:,})"
        example_tables.append(_tabulate_examples("fixed", title, {"found before": "before"}, examples.fixed))
    if example_tables:
        sections.append(Section("Broken and fixed pairs", tables=example_tables))
    text = (
        f"The nearest sentence of the other language, for {len(examples.neighbours)} random questions. "
        "✓ is the right translation."
    )
    columns = {"nearest before": "before", "nearest after": "after"}
    neighbours = _tabulate_examples("neighbours", "", columns, examples.neighbours)
    return [*sections, Section("Nearest sentences", text, tables=[neighbours])]


def lay_out_merge(merge: Mapping[str, Any]) -> Section:
    """Return the section about the merge with the start, from the facts of a merged encoder."""
    columns = (
        Column("held-out pairs, %", _in_percent),
        Column("guard, %", _in_percent),
        Column("lower end of the guard's gain, points", _in_points),
    )
    lines = []
    for scores in merge["curve"]:
        cells = (scores["held_out"], scores["guard"], scores["guard_lower"])
        name = f"{scores['weight']:g}" if scores["weight"] else "0 (start)"
        lines.append(Line(name, cells))
    text = f"This encoder is start + {merge['weight']:g} × (trained encoder - start)."
    problems = []
    if merge["passed"]:
        text += (
            f" It has the largest weight at which the paired {INTERVAL} of the guard's gain lies above "
            f"{_in_points(-merge['largest_loss'])} points. The weight was chosen on the guard, so the guard's score "
            "is slightly too high."
        )
    else:
        problems.append("With every weight, the guard loses too much. The smallest weight was taken.")
    title = f"Accuracies by weight; the weight of this encoder is {merge['weight']:g}"
    table = PageTable("merge", title, columns, tuple(lines), head="weight", highlighted=f"{merge['weight']:g}")
    drawings = {"merge": partial(figures.draw_merge, merge["curve"], merge["weight"])}
    return Section("Merge with the start", text, problems=problems, tables=[table], drawings=drawings)


def _tabulate_changes(name: str, title: str, model: str, rows: Iterable[Mapping[str, Any]]) -> PageTable:
    """Tabulate accuracies, gains and counts of answers, a row for each group of languages."""
    columns = (
        Column("start, %", _in_percent),
        Column(f"{model}, %", _in_percent),
        Column("gain, points", _in_points, role="sum", intervals=True),
        Column("fixed", count),
        Column("broken", count),
        Column("answers", count),
    )
    lines = []
    for row in rows:
        gain = Statistic(1, row["gain"], interval=(row["lower"], row["upper"]))
        cells = (row["start"], row["encoder"], gain, row["fixed"], row["broken"], row["answers"])
        lines.append(Line(row["name"], cells))
    return PageTable(name, title, columns, tuple(lines), head="language", highlighted="mean")


def _in_points(difference: float) -> str:
    return f"{100 * difference:+.2f}"


def _tabulate_examples(
    name: str, title: str, answer_columns: Mapping[str, str], examples: Iterable[Example]
) -> PageTable:
    """Tabulate examples. `answer_columns` maps the title of a column to its field of `Example`, `before` or `after`."""
    lines = []
    for example in examples:
        cells = [example.sentence, example.right]
        for field in answer_columns.values():
            sentence = getattr(example, field)
            cells.append(f"✓ {sentence}" if sentence == example.right else sentence)
        lines.append(Line(example.direction, tuple(cells)))
    columns = tuple(Column(column, role=SENTENCE) for column in ("sentence", "right translation", *answer_columns))
    return PageTable(name, title, columns, tuple(lines), head="direction")

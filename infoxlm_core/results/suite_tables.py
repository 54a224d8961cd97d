"""The tables of a suite: rows of ours, and below them what is published for the same task and protocol."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from infoxlm_core import languages
from infoxlm_core.results import published
from infoxlm_core.results.statistics import Statistic, exact
from infoxlm_core.results.summary import Row, Summary, TaskSummary
from infoxlm_core.results.tables import POOLING_TITLES, Column, Line, Table, title_of

BEST = "best on this set"
_BEST = f"“{BEST}”: the layer was chosen by the scores on these very pairs, which flatters it a little"
_GROUPS = {
    "14": "14 languages with parallel training text",
    "22": "22 languages without parallel training text",
    "other": "other languages",
}


def of_suite(summary: Summary) -> dict[str, list[Table]]:
    """All tables by task, and under `transfer` and `mixed` those of several tasks."""
    tables = {task: _of_task(task, found, summary.model) for task, found in summary.tasks.items()}
    tables |= {"transfer": _of_gaps(summary), "mixed": _of_mixed(summary)}
    return {name: found for name, found in tables.items() if found}


def _of_task(task: str, found: TaskSummary, own: str) -> list[Table]:
    if any("vectors" in row.details for row in found.models.values()):
        return list(_of_vectors(task, found, own))
    return [_of_metric(task, found, metric, own) for metric in found.metrics if found.models]


def _columns(codes: Iterable[str]) -> tuple[Column, ...]:
    return (Column("mean", role="sum"), *map(Column, codes))


def _of_metric(task: str, found: TaskSummary, metric: str, own: str) -> Table:
    """One metric by language. Published rows are of the same training sets: zero-shot, or translate-train-all."""
    lines = tuple(
        Line(
            model,
            (row.mean[metric], *(row.languages.get(code, {}).get(metric) for code in found.languages)),
            rule=row.rule,
            own=model == own,
        )
        for model, row in found.models.items()
    )
    key = next((key for key in (found.table, f"{found.table}/{metric}") if key in published.tables()), "")
    rows, notes = _lay_beside(key, found.languages, lambda row: row.kind == found.setting)
    name = task if len(found.metrics) == 1 else f"{task}-{metric.replace('_', '-')}"
    return Table(name, f"{task}: {title_of(metric)}", _columns(found.languages), lines, rows, notes)


def _of_vectors(task: str, found: TaskSummary, own: str) -> Iterable[Table]:
    """By group of languages and direction; a row for every model and vector."""
    pivot = found.settings.get("pivot", "en")
    groups = {"other": list(found.languages)}
    if found.table == "tatoeba":
        groups = {name: [] for name in _GROUPS}
        for code in found.languages:
            two = languages.two_letters(code)
            name = next((name for name in ("14", "22") if two in languages.GROUPS[name]), "other")
            groups[name].append(code)
    for group, codes in groups.items():
        if not codes:
            continue
        for direction, name in (("to_pivot", f"xx_{pivot}"), ("from_pivot", f"{pivot}_xx")):
            lines = tuple(_list_vectors(found.models, codes, direction, own))
            key = f"{found.table}/{group}/{name}" if found.table == "tatoeba" else ""
            rows, notes = _lay_beside(key, codes, lambda _: True, detailed=True)
            notes = (*([_BEST] if any(BEST in line.detail for line in lines) else []), *notes)
            whose = f"{_GROUPS[group]}, " if len(groups) > 1 else ""
            label = f"-{group}" if len(groups) > 1 else ""
            title = f"{task}: {whose}{name.replace('_', ' → ')}"
            yield Table(f"{task}{label}-{name.replace('_', '-')}", title, _columns(codes), lines, rows, notes)


def _list_vectors(models: Mapping[str, Row], codes: Sequence[str], direction: str, own: str) -> Iterable[Line]:
    """Vector by vector every model, as the paper's tables have it."""
    for rank in range(len(next(iter(models.values())).details["vectors"])):
        for model, row in models.items():
            name, vector = list(row.details["vectors"].items())[rank]
            shares = [vector["languages"].get(code, {}).get(direction) for code in codes]
            known = [share for share in shares if share is not None]
            detail = describe_vector(vector, row.details["encoder"]["layers"]) + f", {BEST}" * name.endswith("@best")
            cells = (exact(fmean(known)) if known else None, *map(exact, shares))
            yield Line(model, cells, detail, own=model == own)


def describe_vector(vector: Mapping[str, Any], layers: int) -> str:
    """`mean of tokens, layer 8`."""
    layer = "last layer" if vector["layer"] == layers else f"layer {vector['layer']}"
    return f"{POOLING_TITLES.get(vector['pooling'], vector['pooling'])}, {layer}"


def _lay_beside(
    key: str, codes: Sequence[str], wanted: Callable[[published.Row], bool], detailed: bool = False
) -> tuple[tuple[Line, ...], tuple[str, ...]]:
    """The published rows of a table in our columns, and what must be said of them."""
    table = published.tables().get(key)
    if not table:
        return (), ()
    two = [languages.two_letters(code) for code in codes]
    complete = set(two) == set(table.columns)
    lines, notes = [], []
    for row in filter(wanted, table.rows):
        shares = [row.cells.get(code) for code in two]
        over = [share for share in shares if share is not None]
        mean = row.mean if complete else fmean(over) if len(over) == len(two) else None
        model = row.model + (" large" if row.size == "large" else "")
        rule = (row.rule + f" ({row.runs} runs)" * (row.runs > 1)).strip()
        cells = tuple(map(exact, (mean, *shares)))
        lines.append(Line(model, cells, row.kind if detailed else "", rule, row.source))
        notes += [row.note] if row.note else []
    if lines and not complete:
        notes.append("the languages are not those of the paper's table: published means are over those shown, if known")
    return tuple(lines), tuple(dict.fromkeys(notes))


def choose_transferred(summary: Summary) -> dict[str, TaskSummary]:
    """The tasks in which a model of ours has a transfer gap."""
    return {
        task: found
        for task, found in summary.tasks.items()
        if any(row.transfer_gap for row in found.models.values())
    }  # fmt: skip


def _of_gaps(summary: Summary) -> list[Table]:
    """The transfer gap of every fine-tuned task: score of the source language minus the mean of the others."""
    if not (tasks := choose_transferred(summary)):
        return []
    lines = []
    for model in summary.models:
        rows = {task: found.models.get(model) for task, found in tasks.items()}
        if any(rows.values()):
            gaps = tuple(((row and row.transfer_gap) or {}).get(tasks[task].main) for task, row in rows.items())
            lines.append(Line(model, gaps, own=model == summary.model))
    same = {task: found.table if found.setting == "zero-shot" else "" for task, found in tasks.items()}
    theirs = tuple(
        Line(row.model, tuple(exact(row.cells.get(table)) for table in same.values()), source=row.source)
        for row in published.tables()["transfer_gap"].rows
        if any(table in row.cells for table in same.values())
    )
    notes = _caution(tasks) if theirs else ()
    return [Table("transfer-gap", "Transfer gap, points", tuple(map(Column, tasks)), tuple(lines), theirs, notes)]


def _of_mixed(summary: Summary) -> list[Table]:
    """Premise and hypothesis, or paragraph and question, in one language or in two."""
    tables = []
    columns = (Column("within"), Column("across"))
    for task, found in summary.tasks.items():
        lines = tuple(
            Line(model, (row.within, row.across), rule=row.rule, own=model == summary.model)
            for model, row in found.models.items()
            if row.within
        )
        rows = published.tables()["mixed"].rows if found.table == "xnli" and found.setting == "zero-shot" else ()
        theirs = tuple(Line(row.model, tuple(map(exact, row.cells.values())), source=row.source) for row in rows)
        if lines:
            notes = tuple(row.note for row in rows if row.note) + (_caution({task: found}) if rows else ())
            title = f"{task}: both texts in one language, or in two"
            tables.append(Table(f"{task}-mixed", title, columns, lines, theirs, notes))
    return tables


def _caution(tasks: Mapping[str, TaskSummary]) -> tuple[str, ...]:
    """Which tasks of a table were not measured as the paper did."""
    others = [task for task, found in tasks.items() if found.warning]
    return (f"not by the paper's protocol: {', '.join(others)}",) if others else ()


def of_grid(found: TaskSummary, describe: Callable[[Mapping[str, Any]], str]) -> Table | None:
    """Development scores by place of the grid; nothing where there was no choice."""
    rows = list(found.models.values())
    if not rows or len(rows[0].grid) == 1:
        return None
    lines = tuple(
        Line(
            model,
            tuple(Statistic(len(place.seeds), place.by) for place in row.grid),
            seeds=len(row.chosen.seeds),
            marked=row.grid.index(row.chosen),
        )
        for model, row in found.models.items()
    )
    columns = tuple(Column(describe(place.grid), lambda value, _: f"{100 * value:.2f}") for place in rows[0].grid)
    return Table("grid", "", columns, lines)

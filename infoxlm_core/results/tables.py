"""The tables of all our pages: rows of ours, and below them what is published for the same task and protocol."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import pandas as pd
from tabulate import tabulate

from infoxlm_core import languages
from infoxlm_core.results import published, statistics
from infoxlm_core.results.statistics import Statistic, exact
from infoxlm_core.results.summary import Comparison, Row, Summary, TaskSummary
from infoxlm_core.tasks.task import Scores

Cell = Statistic | float | str | None

TITLES = {"f1": "F1", "mean": "found, both directions"}
BEST = "best on this set"
_BEST = f"“{BEST}”: the layer was chosen by the scores on these very pairs, which flatters it a little"
_GROUPS = {
    "14": "14 languages with parallel training text",
    "22": "22 languages without parallel training text",
    "other": "other languages",
}
_POOLINGS = {"mean": "mean of tokens", "mean_no_special": "mean without special tokens", "cls": "[CLS]"}


def percent(share: float | None, _: float = 0.0) -> str:
    """A share as people read it, without the sign."""
    return "–" if share is None else f"{100 * share:.1f}"


def count(number: float, _: float = 0.0) -> str:
    """A whole number."""
    return f"{number:,.0f}"


def short(number: float, _: float = 0.0) -> str:
    """A figure such as a perplexity."""
    return f"{number:,.1f}" if number < 1000 else f"{number:,.0f}"


def title_of(metric: str) -> str:
    """What people call a metric."""
    return TITLES.get(metric, metric.replace("_", " "))


@dataclass(frozen=True)
class Column:
    """A heading, and how the figures below it are shown: (value, what decides the decimals) -> text."""

    name: str
    show: Callable[[float, float], str] = percent
    role: str = ""
    """`sum` stands before all others; `soft` is beside the matter; `text` is no figure."""

    intervals: bool = False
    """Whether the 95 % interval stands below."""


@dataclass(frozen=True)
class Line:
    """One row: a model of ours, or a published one (`source` says from where)."""

    name: str
    cells: tuple[Cell, ...]
    detail: str = ""
    rule: str = ""
    """#M: how many checkpoints for all languages, and what chose them."""

    source: str = ""
    own: bool = False
    """The model under test."""

    what: str = ""
    """Said below the name."""

    seeds: int = 0
    """That are finished; a figure of fewer says so."""

    marked: int | None = None
    """The cell in colour."""


@dataclass(frozen=True)
class Table:
    """What is compared in one unit."""

    name: str
    """Of its file."""

    title: str
    columns: tuple[Column, ...]
    ours: tuple[Line, ...]
    published: tuple[Line, ...] = ()
    notes: tuple[str, ...] = ()
    head: str = "model"

    @property
    def lines(self) -> tuple[Line, ...]:
        """All of them."""
        return self.ours + self.published


def show(column: Column, cell: Cell, seeds: int = 0) -> tuple[str, str]:
    """A cell as text, and its deviation over seeds: (`76.2`, ` ± 0.3`)."""
    if isinstance(cell, str):
        return cell, ""
    found = cell if isinstance(cell, Statistic) else exact(cell)
    if found is None or found.mean is None:
        return "–", ""
    spread = "" if found.deviation is None else f" ± {column.show(found.deviation, found.mean)}"
    return column.show(found.mean, found.mean), spread + f" (n={found.n})" * (found.n < seeds)


def show_interval(column: Column, cell: Cell) -> str:
    """`39.5 … 40.8`; nothing where it is not known or not asked for."""
    if not column.intervals or not isinstance(cell, Statistic) or cell.interval is None:
        return ""
    low, high = cell.interval
    return f"{column.show(low, low)} … {column.show(high, high)}"


def list_sources(tables: Iterable[Table]) -> list[str]:
    """What the published rows of these tables are from, each once: a row names its place in this list."""
    return list(dict.fromkeys(line.source for table in tables for line in table.published))


def lay_out(table: Table, sources: Sequence[str] = (), published: bool = True) -> list[list[str]]:
    """A table as rows of text, the heading first; a published row names its source by number."""
    lines = table.lines if published else table.ours
    detailed, ruled = any(line.detail for line in lines), any(line.rule for line in lines)
    sourced = any(line.source for line in lines)
    head = [table.head] + ["details"] * detailed + ["#M"] * ruled
    rows = [[*head, *(column.name for column in table.columns), *(["from"] * sourced)]]
    for line in lines:
        cells = ["".join(show(c, cell, line.seeds)) for c, cell in zip(table.columns, line.cells, strict=True)]
        whose = f"[{sources.index(line.source) + 1}]" if line.source else "ours"
        rows.append([line.name] + [line.detail] * detailed + [line.rule] * ruled + cells + [whose] * sourced)
    return rows


def to_markdown(table: Table, sources: Sequence[str] = (), published: bool = True) -> str:
    """A table whose columns also stand under each other on a console."""
    escaped = [[cell.replace("|", r"\|") for cell in row] for row in lay_out(table, sources, published)]
    return tabulate(escaped[1:], escaped[0], tablefmt="github", disable_numparse=True)


def to_csv(table: Table) -> str:
    """A table as CSV: shares from 0 to 1, a column for the deviation after each."""
    rows = []
    for whose, lines in (("ours", table.ours), ("published", table.published)):
        for line in lines:
            row: dict[str, Any] = {"whose": whose, "model": line.name, "detail": line.detail, "#M": line.rule}
            for column, cell in zip(table.columns, line.cells, strict=True):
                found = cell if isinstance(cell, Statistic) else None
                row |= {column.name: found and found.mean, f"{column.name} deviation": found and found.deviation}
            rows.append(row | {"source": line.source})
    return pd.DataFrame(rows).to_csv(index=False, float_format="%.6g")


# A suite


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
    return f"{_POOLINGS.get(vector['pooling'], vector['pooling'])}, {layer}"


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


# An ablation


def of_comparison(comparison: Comparison) -> Table:
    """Variants and their metrics; published numbers stand beside ours where the task is the same."""
    columns = [Column("seeds", role="text")]
    for name in comparison.metrics:
        columns.append(Column(statistics.name_column(name), _as(name), intervals=True))
        columns += [Column("paper", _as(name), "soft")] if name in published.METRICS else []
    lines = []
    for variant, row in comparison.variants.items():
        done = len(row.seeds) - len(row.unfinished)
        cells: list[Cell] = [str(done) if not row.unfinished else f"{done} of {len(row.seeds)}"]
        for name in comparison.metrics:
            cells.append(row.metrics[name])
            if name in published.METRICS:
                cells.append(published.ABLATIONS.get(variant, {}).get(name))
        lines.append(Line(variant, tuple(cells), what=row.what, seeds=done))
    return Table("comparison", "", tuple(columns), tuple(lines), head="variant")


def of_published_ablations(comparison: Comparison) -> list[Table]:
    """What the paper reports for the same variants on tasks that these trials do not have; perhaps nothing."""
    others = [name for name in published.METRICS if name not in comparison.metrics]
    lines = tuple(
        Line(variant, tuple(published.ABLATIONS[variant].get(name) for name in others))
        for variant in comparison.variants
        if variant in published.ABLATIONS and others
    )
    columns = tuple(Column(f"{published.METRICS[name]} %", _as(name)) for name in others)
    return [Table("published", "", columns, lines, head="variant")] if lines else []


def _as(metric: str) -> Callable[[float, float], str]:
    return lambda value, like: statistics.show(metric, value, like)


# An evaluation


def of_scores(
    title: str,
    scores: Mapping[str, Scores],
    metrics: Mapping[str, str],
    show: Callable[[float, float], str] = percent,
) -> Table:
    """Models by language.

    Args:
        title: above it.
        scores: by model, the one under test first.
        metrics: what is shown of each model: words -> metric.
        show: how a figure is shown.
    """
    first = next(iter(scores))
    codes = list(scores[first].languages)
    lines = tuple(
        Line(
            model,
            (one.mean[metric], *(one.languages.get(code, {}).get(metric) for code in codes)),
            detail,
            own=model == first,
        )
        for detail, metric in metrics.items()
        for model, one in scores.items()
    )
    return Table("", title, (Column("mean", show, "sum"), *(Column(code, show) for code in codes)), lines)


def of_layers(scores: Mapping[str, Scores]) -> Table:
    """Retrieval by layer: a row for every model and pooling, the best of each model in colour."""
    depth = max(len(shares) for one in scores.values() for shares in one.details["by_layer"].values())
    lines = []
    for model, one in scores.items():
        best = one.details["best"]
        for pooling, shares in one.details["by_layer"].items():
            cells = (*shares, *[""] * (depth - len(shares)))
            marked = best["layer"] if best["pooling"] == pooling else None
            lines.append(Line(model, cells, _POOLINGS.get(pooling, pooling), marked=marked))
    return Table("layers", "By layer", tuple(Column(str(layer)) for layer in range(depth)), tuple(lines))


def of_counts(head: str, columns: Sequence[str], rows: Mapping[str, Mapping[str, float]]) -> Table:
    """Numbers of lines."""
    shown = tuple(Column(name.replace("_", " "), count) for name in columns)
    lines = tuple(Line(name, tuple(row[column] for column in columns)) for name, row in rows.items())
    return Table(head, "", shown, lines, head=head)

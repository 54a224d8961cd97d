"""What a table of our pages is, and how it is laid out: as text, Markdown and CSV."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
from tabulate import tabulate

from infoxlm_core.results.statistics import Statistic, exact

Cell = Statistic | float | str | None

TITLES = {"f1": "F1", "mean": "found, both directions"}
POOLING_TITLES = {"mean": "mean of tokens", "mean_no_special": "mean without special tokens", "cls": "[CLS]"}


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
    role: str = ""  # `sum` stands before all others; `soft` is beside the matter; `text` is no figure
    intervals: bool = False  # whether the 95 % interval stands below


@dataclass(frozen=True)
class Line:
    """One row: a model of ours, or a published one (`source` says from where)."""

    name: str
    cells: tuple[Cell, ...]
    detail: str = ""
    rule: str = ""  # #M: how many checkpoints for all languages, and what chose them
    source: str = ""
    own: bool = False  # the model under test
    what: str = ""  # said below the name
    seeds: int = 0  # that are finished; a figure of fewer says so
    marked: int | None = None  # the cell in colour


@dataclass(frozen=True)
class Table:
    """What is compared in one unit."""

    name: str  # of its file
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

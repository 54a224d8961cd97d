"""Tables of a page, and how they are written as text, Markdown and CSV."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
from tabulate import tabulate

from infoxlm_core.results.statistics import Statistic

Cell = Statistic | float | str | None
SENTENCE = "sentence"
"""Role of a column with sentences of a corpus, which may contain any character."""


def percent(share: float | None, decimals: int = 1) -> str:
    """Format a share as percent, without the percent sign."""
    return "–" if share is None else f"{100 * share:.{decimals}f}"


def count(number: float) -> str:
    """Format a whole number."""
    return f"{number:,.0f}"


def hours(number: float) -> str:
    """Format a number of hours."""
    return f"{number:,.2f}"


def short(number: float) -> str:
    """Format a figure such as a perplexity."""
    return f"{number:,.1f}" if number < 1000 else f"{number:,.0f}"


def four_digits(number: float, mean: float) -> str:
    """Format a number with the decimals that give `mean` four digits, so that a mean and its deviation match."""
    integer_digits = len(str(int(abs(mean))))
    return f"{number:,.{max(0, 4 - integer_digits)}f}"


@dataclass(frozen=True)
class Column:
    """A heading and the format of its figures."""

    name: str
    show: Callable[[float], str] | None = percent  # None: `four_digits` of the mean
    role: str = ""  # CSS class: `sum` for the mean before all languages, `text` for words, or SENTENCE
    intervals: bool = False  # show the confidence interval of a figure

    def format(self, number: float, mean: float) -> str:
        """Format a figure, or its deviation with the decimals of the figure, which is `mean`."""
        return self.show(number) if self.show else four_digits(number, mean)


@dataclass(frozen=True)
class Line:
    """One row: a model of ours, or a published one, which names its `source`."""

    name: str
    cells: tuple[Cell, ...]
    detail: str = ""
    rule: str = ""  # #M: the number of checkpoints, and how they were chosen
    source: str = ""
    what: str = ""  # shown below the name
    seeds: int = 0  # finished seeds; a figure of fewer seeds shows its number
    marked: int | None = None  # index of the highlighted cell


@dataclass(frozen=True)
class PageTable:
    """Rows of ours, and published rows below them."""

    name: str  # of the CSV file
    title: str
    columns: tuple[Column, ...]
    ours: tuple[Line, ...]
    published: tuple[Line, ...] = ()
    notes: tuple[str, ...] = ()
    head: str = "model"
    highlighted: str = ""  # name of the rows of ours that are emphasised, usually the model under test

    @property
    def lines(self) -> tuple[Line, ...]:
        """All rows."""
        return self.ours + self.published

    @property
    def has_sentences(self) -> bool:
        """Whether a column shows sentences of a corpus."""
        return any(column.role == SENTENCE for column in self.columns)


def to_statistic(cell: Cell) -> Statistic:
    """Return the figure of a cell as a statistic. Text and a missing figure give a statistic without a mean."""
    if isinstance(cell, Statistic):
        return cell
    return Statistic(0, None) if cell is None or isinstance(cell, str) else Statistic(1, cell)


def show(column: Column, cell: Cell, seeds: int = 0) -> tuple[str, str]:
    """Return the mean and the deviation over seeds of a cell as text: (`76.2`, ` ± 0.3`).

    If the cell has fewer seeds than the `seeds` of its row, the deviation ends with their number.
    """
    if isinstance(cell, str):
        return cell, ""
    statistic = to_statistic(cell)
    if statistic.mean is None:
        return "–", ""
    spread = ""
    if statistic.deviation is not None:
        spread = f" ± {column.format(statistic.deviation, statistic.mean)}"
    if statistic.n < seeds:
        spread += f" (n={statistic.n})"
    return column.format(statistic.mean, statistic.mean), spread


def show_interval(column: Column, cell: Cell) -> str:
    """Return the interval of a cell, `39.5 … 40.8`, or "" if it has none or the column does not show it."""
    interval = to_statistic(cell).interval
    if not column.intervals or interval is None:
        return ""
    low, high = interval
    return f"{column.format(low, low)} … {column.format(high, high)}"


def _show_as_text(column: Column, cell: Cell, seeds: int) -> str:
    """Return a cell with its deviation and its interval: `40.1 ± 0.3 (39.5 … 40.8)`."""
    text = "".join(show(column, cell, seeds))
    interval = show_interval(column, cell)
    return f"{text} ({interval})" if interval else text


def list_sources(tables: Iterable[PageTable]) -> list[str]:
    """Return the distinct sources of the published rows. Rows refer to a source by its number in this list."""
    sources: dict[str, None] = {}  # an ordered set
    for table in tables:
        sources |= dict.fromkeys(line.source for line in table.published)
    return list(sources)


def lay_out(table: PageTable, sources: Sequence[str] = (), published: bool = True) -> list[list[str]]:
    """Return a table as rows of text, the heading first."""
    lines = table.lines if published else table.ours
    columns = [[table.head, *(line.name for line in lines)]]
    if any(line.detail for line in lines):
        columns.append(["details", *(line.detail for line in lines)])
    if any(line.rule for line in lines):
        columns.append(["#M", *(line.rule for line in lines)])
    for index, column in enumerate(table.columns):
        columns.append([column.name, *(_show_as_text(column, line.cells[index], line.seeds) for line in lines)])
    if any(line.source for line in lines):
        citations = [f"[{sources.index(line.source) + 1}]" if line.source else "ours" for line in lines]
        columns.append(["from", *citations])
    return [list(row) for row in zip(*columns, strict=True)]


def to_markdown(table: PageTable, sources: Sequence[str] = (), published: bool = True) -> str:
    """Return a table as Markdown, aligned so that it is readable on a console."""
    heading, *rows = [_escape_row(row, table.has_sentences) for row in lay_out(table, sources, published)]
    return tabulate(rows, heading, tablefmt="github", disable_numparse=True)


def _escape_row(row: Sequence[str], has_sentences: bool) -> list[str]:
    """Return a row in which vertical bars do not end a cell. In a table with sentences, escape all Markdown."""
    if has_sentences:
        return [escape_markdown(cell) for cell in row]
    return [cell.replace("|", r"\|") for cell in row]


def escape_markdown(text: str) -> str:
    """Return any text as one line that Markdown shows literally, inside a table too."""
    return re.sub(r"([\\`*_{}\[\]<>#|~&!])", r"\\\1", " ".join(text.split()))


def to_csv(table: PageTable) -> str:
    """Return a table as CSV: shares from 0 to 1, and after each metric columns for its deviation and its interval."""
    rows = []
    for line in table.lines:
        whose = "published" if line.source else "ours"
        row: dict[str, Any] = {"whose": whose, "model": line.name, "detail": line.detail, "#M": line.rule}
        for column, cell in zip(table.columns, line.cells, strict=True):
            if column.role == SENTENCE:
                row[column.name] = cell
                continue
            statistic = to_statistic(cell)
            row[column.name] = statistic.mean
            row[f"{column.name} deviation"] = statistic.deviation
            if column.intervals:
                low, high = statistic.interval or (None, None)
                row[f"{column.name} low"] = low
                row[f"{column.name} high"] = high
        row["source"] = line.source
        rows.append(row)
    return pd.DataFrame(rows).to_csv(index=False, float_format="%.6g")


def tabulate_counts(head: str, columns: Sequence[str], rows: Mapping[str, Mapping[str, float]]) -> PageTable:
    """Tabulate whole numbers: name of a row -> column -> number."""
    lines = []
    for name, counts in rows.items():
        lines.append(Line(name, tuple(counts[column] for column in columns)))
    count_columns = tuple(Column(column.replace("_", " "), count) for column in columns)
    return PageTable(head, "", count_columns, tuple(lines), head=head)

"""The tables of a page, and their formatting as text, Markdown and CSV."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd
from tabulate import tabulate

from infoxlm_core.results.statistics import Statistic

_RULE_HEADING = "#M"  # the paper's name for the number of checkpoints
Cell = Statistic | float | str | None
SENTENCE = "sentence"
"""Role of a column with corpus sentences. They may contain any character."""


def format_percent(share: float | None, decimals: int = 1) -> str:
    """Format a share as percent, without the percent sign."""
    return "–" if share is None else f"{100 * share:.{decimals}f}"


def format_count(number: float) -> str:
    """Format a whole number."""
    return f"{number:,.0f}"


def format_hours(number: float) -> str:
    """Format a number of hours."""
    return f"{number:,.2f}"


def format_figure(number: float) -> str:
    """Format a figure that is not a share, such as a perplexity. Figures below 1000 have one decimal."""
    return f"{number:,.1f}" if number < 1000 else f"{number:,.0f}"


def format_like_mean(number: float, mean: float) -> str:
    """Format a mean or its deviation. The number of decimals is chosen so that the mean has four digits."""
    integer_digits = len(str(int(abs(mean))))
    return f"{number:,.{max(0, 4 - integer_digits)}f}"


@dataclass(frozen=True)
class Column:
    """The heading of a column and the format of its figures."""

    name: str
    format_number: Callable[[float], str] | None = format_percent  # None: `format_like_mean`
    role: str = ""  # CSS class: `sum` for the leading column of means, `text` for words, or SENTENCE
    has_intervals: bool = False  # whether to show confidence intervals

    def format(self, number: float, mean: float) -> str:
        """Format a mean or its deviation. `mean` is the mean in both cases."""
        return self.format_number(number) if self.format_number else format_like_mean(number, mean)


@dataclass(frozen=True)
class Line:
    """One row: one of our models, or a published model with its `source`."""

    name: str
    cells: tuple[Cell, ...]
    detail: str = ""
    rule: str = ""  # number of checkpoints, and how they were chosen; see `_RULE_HEADING`
    source: str = ""
    what: str = ""  # description shown below the model's name
    seeds: int = 0  # expected number of seeds; a figure from fewer seeds shows its number of seeds
    marked: int | None = None  # index of the highlighted cell


@dataclass(frozen=True)
class PageTable:
    """A table with the rows of our models, followed by published rows."""

    name: str  # name of the CSV file
    title: str
    columns: tuple[Column, ...]
    ours: tuple[Line, ...]
    published: tuple[Line, ...] = ()
    notes: tuple[str, ...] = ()
    head: str = "model"
    highlighted: str = ""  # name of our rows to highlight, usually the model under test

    @property
    def lines(self) -> tuple[Line, ...]:
        """All rows."""
        return self.ours + self.published

    @property
    def has_sentences(self) -> bool:
        """Whether a column shows sentences of a corpus."""
        return any(column.role == SENTENCE for column in self.columns)

    def without_published(self) -> "PageTable":
        """Return a copy with only our rows."""
        return replace(self, published=())


def to_statistic(cell: Cell) -> Statistic:
    """Convert a cell to a statistic. The statistic of an empty cell or a text has no mean."""
    if isinstance(cell, Statistic):
        return cell
    if cell is None or isinstance(cell, str):
        return Statistic(0, None)
    return Statistic(1, cell)


def format_cell(column: Column, cell: Cell, seeds: int = 0) -> tuple[str, str]:
    """Format a cell's mean and its deviation over seeds as two texts, such as `76.2` and ` ± 0.3`.

    If the cell has fewer than `seeds` seeds, its number of seeds follows the deviation.
    """
    if isinstance(cell, str):
        return cell, ""
    statistic = to_statistic(cell)
    if statistic.mean is None:
        return "–", ""
    deviation = ""
    if statistic.deviation is not None:
        deviation = f" ± {column.format(statistic.deviation, statistic.mean)}"
    if statistic.n < seeds:
        deviation += f" (n={statistic.n})"
    return column.format(statistic.mean, statistic.mean), deviation


def format_interval(column: Column, cell: Cell) -> str:
    """Format a cell's interval as `39.5 … 40.8`. Return "" without an interval or if the column shows none."""
    interval = to_statistic(cell).interval
    if not column.has_intervals or interval is None:
        return ""
    low, high = interval
    return f"{column.format(low, low)} … {column.format(high, high)}"


def _to_text(column: Column, cell: Cell, seeds: int) -> str:
    """Format a cell with its deviation and its interval: `40.1 ± 0.3 (39.5 … 40.8)`."""
    text = "".join(format_cell(column, cell, seeds))
    interval = format_interval(column, cell)
    return f"{text} ({interval})" if interval else text


def list_sources(tables: Iterable[PageTable]) -> list[str]:
    """List the distinct sources of published rows. Rows cite a source by its position in the list."""
    sources: dict[str, None] = {}  # an ordered set
    for table in tables:
        sources |= dict.fromkeys(line.source for line in table.published)
    return list(sources)


def to_text_rows(table: PageTable, sources: Sequence[str] = ()) -> list[list[str]]:
    """Convert a table to rows of text, the heading first. Optional columns without content are left out."""
    lines = table.lines
    columns = [[table.head, *(line.name for line in lines)]]
    if any(line.detail for line in lines):
        columns.append(["details", *(line.detail for line in lines)])
    if any(line.rule for line in lines):
        columns.append([_RULE_HEADING, *(line.rule for line in lines)])
    for index, column in enumerate(table.columns):
        texts = [_to_text(column, line.cells[index], line.seeds) for line in lines]
        columns.append([column.name, *texts])
    if any(line.source for line in lines):
        citations = [f"[{sources.index(line.source) + 1}]" if line.source else "ours" for line in lines]
        columns.append(["from", *citations])
    return [list(row) for row in zip(*columns, strict=True)]


def to_markdown(table: PageTable, sources: Sequence[str] = ()) -> str:
    """Format a table as Markdown, aligned for reading on a console."""
    heading, *rows = [_escape_row(row, table.has_sentences) for row in to_text_rows(table, sources)]
    return tabulate(rows, heading, tablefmt="github", disable_numparse=True)


def _escape_row(row: Sequence[str], has_sentences: bool) -> list[str]:
    """Escape vertical bars, because they would end a cell. In a table with sentences, escape all Markdown."""
    if has_sentences:
        return [escape_markdown(cell) for cell in row]
    return [cell.replace("|", r"\|") for cell in row]


def escape_markdown(text: str) -> str:
    """Escape a text and put it on one line, so that Markdown shows it literally, even inside a table."""
    return re.sub(r"([\\`*_{}\[\]<>#|~&!])", r"\\\1", " ".join(text.split()))


def to_csv(table: PageTable) -> str:
    """Format a table as CSV, with shares from 0 to 1.

    Columns for the deviation and for the bounds of the interval follow the column of a metric.
    """
    rows = []
    for line in table.lines:
        origin = "published" if line.source else "ours"
        row: dict[str, Any] = {"whose": origin, "model": line.name, "detail": line.detail, _RULE_HEADING: line.rule}
        for column, cell in zip(table.columns, line.cells, strict=True):
            if column.role == SENTENCE:
                row[column.name] = cell
                continue
            statistic = to_statistic(cell)
            row[column.name] = statistic.mean
            row[f"{column.name} deviation"] = statistic.deviation
            if column.has_intervals:
                low, high = statistic.interval or (None, None)
                row[f"{column.name} low"] = low
                row[f"{column.name} high"] = high
        row["source"] = line.source
        rows.append(row)
    return pd.DataFrame(rows).to_csv(index=False, float_format="%.6g")


def tabulate_counts(head: str, columns: Sequence[str], rows: Mapping[str, Mapping[str, float]]) -> PageTable:
    """Build a table of whole numbers.

    Args:
        head: heading of the first column, and name of the CSV file.
        columns: column names.
        rows: numbers by row name and column.
    """
    lines = []
    for name, counts in rows.items():
        lines.append(Line(name, tuple(counts[column] for column in columns)))
    count_columns = tuple(Column(column.replace("_", " "), format_count) for column in columns)
    return PageTable(head, "", count_columns, tuple(lines), head=head)

"""Tables and lists of a suite as text: cells, Markdown rows, CSV."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from infoxlm_core.results.suite import points
from infoxlm_core.results.suite.tables import Cell, Table

SHOWN = 12
"""Unfinished points that are named on a page."""


def list_sources(tables: Iterable[Table]) -> list[str]:
    """What the published rows of these tables are from, each once: a row names its place in this list."""
    return list(dict.fromkeys(line.source for table in tables for line in table.published))


def list_unfinished(names: Sequence[str]) -> str:
    """The first of them by name; all are in suite.json."""
    return ", ".join(names[:SHOWN]) + f" and {len(names) - SHOWN} more" * (len(names) > SHOWN)


def show(cell: Cell | None) -> str:
    """`76.2`, or `76.2 ± 0.3` over seeds."""
    if cell is None or cell["mean"] is None:
        return "–"
    spread = f" ± {100 * cell['deviation']:.1f}" if cell["deviation"] is not None else ""
    return f"{100 * cell['mean']:.1f}{spread}"


def write_csv(table: Table) -> str:
    """A table as CSV: shares from 0 to 1, a column for the deviation after each."""
    columns = [*([table.mean] if table.mean else []), *table.columns]
    head = ["whose", "model", "detail", "#M", *(f"{name}{part}" for name in columns for part in ("", " deviation"))]
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([*head, "source"])
    for whose, lines in (("ours", table.ours), ("published", table.published)):
        for line in lines:
            cells = [*([line.mean] if table.mean else []), *line.cells]
            values = [_round(cell[part]) if cell else "" for cell in cells for part in ("mean", "deviation")]
            writer.writerow([whose, line.model, line.detail, line.rule, *values, line.source])
    return file.getvalue()


def _round(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def lay_out(table: Table, sources: list[str], published: bool = True) -> list[list[str]]:
    """A table as rows of text for Markdown, the heading first; a published row names its source by number."""
    lines = [*table.ours, *(table.published if published else ())]
    shown = {
        "details": any(line.detail for line in lines),
        "rule": any(line.rule for line in lines),
        "source": any(line.source for line in lines),
    }
    head = ["model"] + ["details"] * shown["details"] + ["#M"] * shown["rule"]
    rows = [head + [table.mean] * bool(table.mean) + list(table.columns) + ["from"] * shown["source"]]
    for line in lines:
        cells = [line.model] + [line.detail] * shown["details"] + [line.rule] * shown["rule"]
        cells += [show(line.mean)] * bool(table.mean)
        cells += map(show, line.cells)
        number = f"[{sources.index(line.source) + 1}]" if line.source else "ours"
        rows.append(cells + [number] * shown["source"])
    return rows


def tabulate_grid(found: Mapping[str, Any]) -> list[tuple[str, list[tuple[str, bool]]]]:
    """Development scores by place of the grid: (place, [(score, whether it was chosen) of each model]); or nothing."""
    rows = list(found["models"].values())
    if not rows or len(rows[0]["grid"]) == 1:
        return []

    def show_dev(row: Mapping[str, Any], cell: Mapping[str, Any]) -> tuple[str, bool]:
        text = "–" if cell["by"] is None else f"{100 * cell['by']:.2f}"
        fewer = f" ({len(cell['seeds'])} seeds)" if 0 < len(cell["seeds"]) < len(row["chosen"]["seeds"]) else ""
        return text + fewer, cell["grid"] == row["chosen"]["grid"]

    return [
        (points.describe(place["grid"]), [show_dev(row, row["grid"][number]) for row in rows])
        for number, place in enumerate(rows[0]["grid"])
    ]

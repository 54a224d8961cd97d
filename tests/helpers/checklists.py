"""Read the checklists of the documents, and report which items a test run has shown."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = {"acceptance": ("A",), "promises": ("P", "F", "B", "S", "RB")}
"""Page of docs/ -> prefixes of its items, in their order."""
NEEDS_MORE = "needs a cluster or a GPU"
NOT_SHOWN = "not shown"


@dataclass(frozen=True)
class Row:
    """A row of a checklist: what is expected of an item, and the other items that also show it."""

    expected: str
    items: tuple[str, ...]


@dataclass(frozen=True)
class Run:
    """The result of one test for one item."""

    item: str
    test: str
    figure: str
    outcome: str


def kind(item: str) -> str:
    return item.rstrip("0123456789")


def order(item: str) -> tuple[int, int]:
    """Return a sort key: the order of the pages, then the number."""
    kinds = [prefix for prefixes in PAGES.values() for prefix in prefixes]
    return kinds.index(kind(item)), int(item.removeprefix(kind(item)))


def rows_of(page: str) -> dict[str, Row]:
    """Return the rows of docs/PAGE.md by item, in the order of the page."""
    prefixes = "|".join(PAGES[page])
    rows = {}
    for line in (ROOT / f"docs/{page}.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if not cells or not re.fullmatch(rf"({prefixes})\d+", cells[0]):
            continue
        item, *expected = cells
        items = ()
        if kind(item) == "P":
            items = tuple(expected.pop().split())
        elif kind(item) == "RB":
            expected.pop()  # a link to the runbook
        rows[item] = Row(": ".join(expected), items)  # a fault and its result are two cells
    return rows


def items_shown_by(references: Sequence[str], rows: dict[str, Row]) -> list[str]:
    """Return the items that references name; the reference `F` names all F items."""
    return [item for reference in references for item in rows if reference in (item, kind(item))]


def outcome(item: str, runs: Sequence[Run], rows: dict[str, Row]) -> str:
    """Return the worst outcome of an item's tests and of the items that also show it."""
    if kind(item) == "RB":
        return NEEDS_MORE
    outcomes = {run.outcome for run in runs if run.item == item}
    if item in rows:
        outcomes |= {outcome(other_item, runs, rows) for other_item in items_shown_by(rows[item].items, rows)}
    if "error" in outcomes:  # an error in the set-up of a test
        return "failed"
    for worst_outcome in ("failed", NOT_SHOWN, "skipped", "passed"):
        if worst_outcome in outcomes:
            return worst_outcome
    return NOT_SHOWN


def observed(item: str, runs: Sequence[Run], rows: dict[str, Row]) -> str:
    """Describe each test of an item with its cases and figures, then the items that also show it."""
    counts = Counter((run.test.partition("[")[0], run.outcome) for run in runs if run.item == item)
    figures = {(run.test.partition("[")[0], run.figure) for run in runs if run.item == item and run.figure}
    descriptions = []
    for (test, result), number in sorted(counts.items()):
        description = f"{test}: {number} {result}"
        figures_of_test = "; ".join(figure for name, figure in sorted(figures) if name == test)
        if figures_of_test:
            description += f", {figures_of_test}"
        descriptions.append(description)
    if item in rows:
        other_items = items_shown_by(rows[item].items, rows)
        descriptions += [f"{other_item} {outcome(other_item, runs, rows)}" for other_item in other_items]
    return " · ".join(descriptions)


def report(page: str, runs: Sequence[Run]) -> str:
    """Return a table of a page's items, including those without a test in this run."""
    rows = rows_of(page)
    tested_items = {run.item for run in runs if kind(run.item) in PAGES[page]}
    lines = ["| item | expected | observed | outcome |", "|---|---|---|---|"]
    for item in sorted(rows.keys() | tested_items, key=order):
        expected = rows[item].expected if item in rows else ""
        lines.append(f"| {item} | {expected} | {observed(item, runs, rows)} | {outcome(item, runs, rows)} |")
    return "\n".join(lines) + "\n"

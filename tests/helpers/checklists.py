"""Read the checklists of the documents, and report which items a test run has proved."""

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
    """A row of a checklist: what is expected of an item, and the tests that prove it."""

    expected: str
    tests: frozenset[str]
    items: tuple[str, ...]
    """Other items that prove it."""


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
    """Return the rows of docs/PAGE.md by item, in the order of the page; a row that names F refers to all F items."""
    cells_of = {}
    for line in (ROOT / f"docs/{page}.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) == 5 and re.fullmatch(rf"({'|'.join(PAGES[page])})\d+", cells[1]):
            cells_of[cells[1]] = cells[2], cells[3]
    rows = {}
    for item, (expected, proof) in cells_of.items():
        names = re.findall(r"\b(?:RB\d+|[PFBS]\d*)\b", re.sub(r"`[^`]*`|\(.*\)", "", proof))
        items = [other for name in names for other in cells_of if name in (other, kind(other))]
        rows[item] = Row(expected, frozenset(re.findall(r"`(test_\w+)`", proof)), tuple(items))
    return rows


def outcome(item: str, runs: Sequence[Run], rows: dict[str, Row]) -> str:
    """Return the worst outcome of an item's tests and of the items that prove it."""
    if kind(item) == "RB":
        return NEEDS_MORE
    outcomes = {run.outcome for run in runs if run.item == item}
    if item in rows:
        outcomes |= {outcome(other, runs, rows) for other in rows[item].items if other != item}
    for worst in ("failed", "error", NOT_SHOWN, "skipped", "passed"):
        if worst in outcomes:
            return "failed" if worst == "error" else worst
    return NOT_SHOWN


def observed(item: str, runs: Sequence[Run], rows: dict[str, Row]) -> str:
    """Describe each test of an item with its cases and figures, then the items that prove the item."""
    counts = Counter((run.test.partition("[")[0], run.outcome) for run in runs if run.item == item)
    figures = {(run.test.partition("[")[0], run.figure) for run in runs if run.item == item and run.figure}
    descriptions = []
    for (test, result), number in sorted(counts.items()):
        of_test = "; ".join(figure for name, figure in sorted(figures) if name == test)
        descriptions.append(f"{test}: {number} {result}" + (f", {of_test}" if of_test else ""))
    if item in rows:
        descriptions += [f"{other} {outcome(other, runs, rows)}" for other in rows[item].items]
    return " · ".join(descriptions)


def report(page: str, runs: Sequence[Run]) -> str:
    """Return a table of a page's items, including those without a test in this run."""
    rows = rows_of(page)
    items = sorted({*rows, *(run.item for run in runs if kind(run.item) in PAGES[page])}, key=order)
    lines = [
        f"| {item} | {rows[item].expected if item in rows else ''} | {observed(item, runs, rows)} "
        f"| {outcome(item, runs, rows)} |"
        for item in items
    ]
    return "\n".join(["| item | expected | observed | outcome |", "|---|---|---|---|", *lines]) + "\n"

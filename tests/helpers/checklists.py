"""The checklists of the documents: what each item says and which tests its row names; and the report of a test run."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = {"acceptance": ("A",), "promises": ("P", "F", "B", "S", "RB")}
"""Page of docs/ -> what its items begin with, in their order."""
NEEDS_MORE = "needs a cluster or a GPU"
NOT_SHOWN = "not shown"


@dataclass(frozen=True)
class Row:
    """A line of a table: what is expected of an item, and what shows it."""

    expected: str
    tests: frozenset[str]
    items: tuple[str, ...]
    """Other items that show it."""


@dataclass(frozen=True)
class Run:
    """That a test of an item has run."""

    item: str
    test: str
    figure: str
    outcome: str


def kind(item: str) -> str:
    return item.rstrip("0123456789")


def order(item: str) -> tuple[int, int]:
    """By the order of the pages, then by number."""
    kinds = [one for page in PAGES.values() for one in page]
    return kinds.index(kind(item)), int(item.removeprefix(kind(item)))


def rows_of(page: str) -> dict[str, Row]:
    """The rows of docs/PAGE.md by item, in the order of the page; F alone names all items of that kind."""
    lines = (ROOT / f"docs/{page}.md").read_text(encoding="utf-8").splitlines()
    tables = [cells for line in lines if len(cells := [cell.strip() for cell in line.split("|")]) == 5]
    cells_of = {row[1]: (row[2], row[3]) for row in tables if re.fullmatch(rf"({'|'.join(PAGES[page])})\d+", row[1])}
    found = {}
    for item, (expected, shown) in cells_of.items():
        names = re.findall(r"\b(?:RB\d+|[PFBS]\d*)\b", re.sub(r"`[^`]*`|\(.*\)", "", shown))
        items = [one for name in names for one in cells_of if one == name or kind(one) == name]
        found[item] = Row(expected, frozenset(re.findall(r"`(test_\w+)`", shown)), tuple(items))
    return found


def outcome(item: str, runs: Sequence[Run], rows: dict[str, Row]) -> str:
    """What a test run says of an item: of its own tests, and of the items that show it."""
    if kind(item) == "RB":
        return NEEDS_MORE
    found = {run.outcome for run in runs if run.item == item}
    found |= {outcome(one, runs, rows) for one in rows[item].items if one != item} if item in rows else set()
    for worst in ("failed", "error", NOT_SHOWN, "skipped", "passed"):
        if worst in found:
            return "failed" if worst == "error" else worst
    return NOT_SHOWN


def observed(item: str, runs: Sequence[Run], rows: dict[str, Row]) -> str:
    """Each test of an item with its cases and figures, then what was observed of the items that show it."""
    counts = Counter((run.test.partition("[")[0], run.outcome) for run in runs if run.item == item)
    figures = Counter((run.test.partition("[")[0], run.figure) for run in runs if run.item == item and run.figure)
    said = []
    for (test, ended), number in sorted(counts.items()):
        of_test = "; ".join(figure for name, figure in sorted(figures) if name == test)
        said.append(f"{test}: {number} {ended}" + (f", {of_test}" if of_test else ""))
    said += [f"{one} {outcome(one, runs, rows)}" for one in rows[item].items] if item in rows else []
    return " · ".join(said)


def report(page: str, runs: Sequence[Run]) -> str:
    """A table of a page's items, those of which no test ran included."""
    rows = rows_of(page)
    items = sorted({*rows, *(run.item for run in runs if kind(run.item) in PAGES[page])}, key=order)
    lines = [
        f"| {item} | {rows[item].expected if item in rows else ''} | {observed(item, runs, rows)} "
        f"| {outcome(item, runs, rows)} |"
        for item in items
    ]
    return "\n".join(["| item | expected | observed | outcome |", "|---|---|---|---|", *lines]) + "\n"

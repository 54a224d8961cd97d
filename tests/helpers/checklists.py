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
    prefixes = "|".join(PAGES[page])
    cells_of_item = {}
    for line in (ROOT / f"docs/{page}.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) in (5, 6) and re.fullmatch(rf"({prefixes})\d+", cells[1]):
            item, *expected, proof = cells[1:-1]  # a fault and its result are two cells
            cells_of_item[item] = (": ".join(expected), proof)
    rows = {}
    for item, (expected, proof) in cells_of_item.items():
        test_names = re.findall(r"`(test_\w+)`", proof)
        proof_without_tests = re.sub(r"`[^`]*`|\(.*\)", "", proof)  # also without the addresses of links
        proving_items: list[str] = []
        for reference in re.findall(r"\b(?:RB\d+|[PFBS]\d*)\b", proof_without_tests):
            proving_items += [candidate for candidate in cells_of_item if reference in (candidate, kind(candidate))]
        rows[item] = Row(expected, frozenset(test_names), tuple(proving_items))
    return rows


def outcome(item: str, runs: Sequence[Run], rows: dict[str, Row]) -> str:
    """Return the worst outcome of an item's tests and of the items that prove it."""
    if kind(item) == "RB":
        return NEEDS_MORE
    outcomes = {run.outcome for run in runs if run.item == item}
    if item in rows:
        outcomes |= {outcome(proving_item, runs, rows) for proving_item in rows[item].items if proving_item != item}
    if "error" in outcomes:  # an error in the set-up of a test
        return "failed"
    for worst_outcome in ("failed", NOT_SHOWN, "skipped", "passed"):
        if worst_outcome in outcomes:
            return worst_outcome
    return NOT_SHOWN


def observed(item: str, runs: Sequence[Run], rows: dict[str, Row]) -> str:
    """Describe each test of an item with its cases and figures, then the items that prove the item."""
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
        descriptions += [f"{proving_item} {outcome(proving_item, runs, rows)}" for proving_item in rows[item].items]
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

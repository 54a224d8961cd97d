"""Every item of the checklists has a test that asserts something."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import checklists
from tests.helpers.checklists import Row, Run, kind

TESTS = Path(__file__).parent
ITEMS = {
    "acceptance": [f"A{number}" for number in range(1, 33)],
    "promises": [
        *(f"P{number}" for number in range(1, 22)),
        *(
            f"{letter}{number:02}"
            for letter, last in (("F", 27), ("B", 18), ("S", 12))
            for number in range(1, last + 1)
        ),
        *(f"RB{number:02}" for number in range(1, 14)),
    ],
}
Function = ast.FunctionDef | ast.AsyncFunctionDef


def marks(function: Function) -> set[str]:
    """Return the items of `@pytest.mark.item(...)` above a function."""
    items = set()
    for decorator in function.decorator_list:
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.item":
            items |= {argument.value for argument in decorator.args if isinstance(argument, ast.Constant)}
    return items


def checks(function: Function, helpers: dict[str, Function]) -> bool:
    """Return whether a function asserts something, by itself, by a library, or in a helper of its file."""
    for node in ast.walk(function):
        if isinstance(node, ast.Assert):
            return True
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name == "pytest.raises" or name.rpartition(".")[2].startswith("assert_"):
                return True
            if name in helpers and helpers[name] is not function and checks(helpers[name], {}):
                return True
    return False


def marked() -> Iterator[tuple[str, str, bool]]:
    """Yield the item and name of every marked test, and whether the test asserts something."""
    for path in sorted(TESTS.rglob("test_*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        functions = {node.name: node for node in ast.walk(tree) if isinstance(node, Function)}
        for name, function in functions.items():
            yield from ((item, name, checks(function, functions)) for item in marks(function))


MARKED = list(marked())
ROWS = {page: checklists.rows_of(page) for page in ITEMS}
EVERY = [(page, item) for page, items in ITEMS.items() for item in items]


@pytest.mark.parametrize("page", ITEMS)
def test_a_page_has_a_row_for_every_item_and_tests_mark_no_other_items(page):
    assert list(ROWS[page]) == ITEMS[page]
    assert {item for item, _, _ in MARKED if kind(item) in checklists.PAGES[page]} <= set(ITEMS[page])


@pytest.mark.parametrize(("page", "item"), EVERY)
def test_an_item_has_a_marked_test_or_is_shown_by_other_items(page, item):
    row = ROWS[page][item]
    marked_items = {marked_item for marked_item, _, _ in MARKED}

    assert item in marked_items or row.items or kind(item) == "RB"
    assert all(checklists.items_shown_by([reference], ROWS[page]) not in ([], [item]) for reference in row.items)


def test_every_test_of_an_item_asserts_something():
    assert [name for _, name, checked in MARKED if not checked] == []


@pytest.mark.parametrize(
    ("body", "checked"),
    [
        ("assert x", True),
        ("torch.testing.assert_close(x, y)", True),
        ("with pytest.raises(ValueError):\n        f()", True),
        ("compare(x)", True),
        ("x = 1  # assert x", False),
        ("'assert'", False),
        ("print(x)", False),
    ],
)
def test_a_test_without_an_assertion_is_noticed(body, checked):
    tree = ast.parse(f"def compare(x):\n    assert x\ndef test_it():\n    {body}")
    helper, test = tree.body

    assert checks(test, {"compare": helper}) is checked


def test_the_report_of_a_run_names_items_that_no_test_has_shown():
    rows = {
        "P1": Row("the run is interruptible", ("F", "RB01")),
        "F01": Row("the run continues", ()),
        "F02": Row("the fault is detected", ()),
        "RB01": Row("a check on a GPU", ()),
    }
    f01_runs = [Run("F01", "x.py::test_a[1]", "3 kills", "passed"), Run("F01", "x.py::test_a[2]", "3 kills", "passed")]
    all_runs = [*f01_runs, Run("F02", "x.py::test_b", "", "passed")]
    runs_with_error = [*all_runs, Run("F02", "x.py::test_c", "", "error")]

    def outcomes(runs: list[Run]) -> list[str]:
        return [checklists.outcome(item, runs, rows) for item in ("P1", "F01", "F02")]

    assert checklists.observed("F01", f01_runs, rows) == "x.py::test_a: 2 passed, 3 kills"
    assert outcomes(f01_runs) == ["not shown", "passed", "not shown"]
    assert outcomes(all_runs) == ["passed"] * 3
    assert checklists.observed("P1", all_runs, rows) == "F01 passed · F02 passed · RB01 needs a cluster or a GPU"
    assert outcomes(runs_with_error) == ["failed", "passed", "failed"]


def test_every_design_decision_links_to_its_tests():
    pages = [page.read_text(encoding="utf-8") for page in (TESTS.parent / "docs/design").glob("*.md")]
    sections = [section for page in pages for section in re.split(r"^## (?=\d)", page, flags=re.MULTILINE)[1:]]

    links = [re.findall(r"\(\.\./\.\./(tests/\S+\.py)\)", section) for section in sections]
    assert len(sections) == 15 and all(links)
    assert [path for paths in links for path in paths if not (TESTS.parent / path).is_file()] == []

"""Every item of the checklists has a test that asserts something, and the documents name these tests."""

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
def test_a_row_names_tests_that_are_marked_with_its_item_or_other_items(page, item):
    row = ROWS[page][item]

    assert row.tests or row.items or kind(item) == "RB"
    assert row.tests <= {name for marked_item, name, _ in MARKED if marked_item == item}
    assert set(row.items) <= set(ITEMS[page]) - {item}


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


def test_the_report_of_a_run_names_items_that_no_test_has_proved():
    rows = {
        "P1": Row("all of it", frozenset(), ("F01", "F02", "RB01")),
        "F01": Row("goes on", frozenset({"test_a"}), ()),
        "F02": Row("is found", frozenset({"test_b"}), ()),
    }
    one = [Run("F01", "x.py::test_a[1]", "3 kills", "passed"), Run("F01", "x.py::test_a[2]", "3 kills", "passed")]
    both = [*one, Run("F02", "x.py::test_b", "", "passed")]

    assert checklists.observed("F01", one, rows) == "x.py::test_a: 2 passed, 3 kills"
    assert [checklists.outcome(item, one, rows) for item in rows] == ["not shown", "passed", "not shown"]
    assert [checklists.outcome(item, both, rows) for item in rows] == ["passed"] * 3
    assert checklists.observed("P1", both, rows) == "F01 passed · F02 passed · RB01 needs a cluster or a GPU"
    broken = [*both, Run("F02", "x.py::test_c", "", "error")]
    assert [checklists.outcome(item, broken, rows) for item in rows] == ["failed", "passed", "failed"]


def test_every_design_decision_links_to_its_tests():
    pages = [page.read_text(encoding="utf-8") for page in (TESTS.parent / "docs/design").glob("*.md")]
    sections = [section for page in pages for section in re.split(r"^## (?=\d)", page, flags=re.MULTILINE)[1:]]

    links = [re.findall(r"\(\.\./\.\./(tests/\S+\.py)\)", section) for section in sections]
    assert len(sections) == 15 and all(links)
    assert [path for paths in links for path in paths if not (TESTS.parent / path).is_file()] == []

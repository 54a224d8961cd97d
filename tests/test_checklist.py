"""No item of the acceptance checklist is without a test that checks something, and docs/acceptance.md names them."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
ITEMS = [f"A{number}" for number in range(1, 33)]
Function = ast.FunctionDef | ast.AsyncFunctionDef


def marks(function: Function) -> set[str]:
    """The items of `@pytest.mark.item(...)` above a function."""
    calls = [one for one in function.decorator_list if isinstance(one, ast.Call)]
    named = [call for call in calls if ast.unparse(call.func) == "pytest.mark.item"]
    return {argument.value for call in named for argument in call.args if isinstance(argument, ast.Constant)}


def checks(function: Function, helpers: dict[str, Function]) -> bool:
    """Whether a function asserts something: itself, by an assertion of a library, or in a helper of its file."""
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
    """Of every test with a mark: item, name, whether it checks something."""
    for path in sorted(TESTS.rglob("test_*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        functions = {one.name: one for one in ast.walk(tree) if isinstance(one, Function)}
        for name, function in functions.items():
            yield from ((item, name, checks(function, functions)) for item in marks(function))


MARKED = list(marked())
ROWS = {
    row[1]: set(re.findall(r"`(test_\w+)`", row[3]))
    for line in (TESTS.parent / "docs/acceptance.md").read_text(encoding="utf-8").splitlines()
    if len(row := [cell.strip() for cell in line.split("|")]) == 5 and re.fullmatch(r"A\d+", row[1])
}


def test_items_are_those_of_the_checklist_and_each_has_a_row():
    assert list(ROWS) == ITEMS
    assert {item for item, _, _ in MARKED} == set(ITEMS)


@pytest.mark.parametrize("item", ITEMS)
def test_what_a_row_names_is_a_test_of_this_item(item):
    assert ROWS[item]
    assert ROWS[item] <= {name for one, name, _ in MARKED if one == item}


def test_every_test_of_an_item_checks_something():
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
def test_a_test_that_checks_nothing_is_found(body, checked):
    tree = ast.parse(f"def compare(x):\n    assert x\ndef test_it():\n    {body}")
    helper, test = tree.body

    assert checks(test, {"compare": helper}) is checked


def test_the_tests_that_the_decisions_name_exist():
    named = set(re.findall(r"`(test_\w+)`", (TESTS.parent / "docs/architecture.md").read_text(encoding="utf-8")))
    text = "\n".join(path.read_text(encoding="utf-8") for path in TESTS.rglob("test_*.py"))

    assert named
    assert {name for name in named if f"def {name}(" not in text} == set()

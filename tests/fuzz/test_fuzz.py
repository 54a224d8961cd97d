"""No damaged file from outside ends otherwise than in an error of ours (B18); `make fuzz` looks for longer."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.fuzz.mutations import mutate
from tests.fuzz.targets import TARGETS, attack

FOUND = sorted(path for path in (Path(__file__).parent / "inputs").rglob("*") if path.is_file())
"""Inputs that once failed: `inputs/TARGET/…`."""


@pytest.fixture(scope="module", params=TARGETS)
def target(request, tmp_path_factory):
    """Name of a target, its folder and its valid examples."""
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, folder, TARGETS[request.param].examples(folder)


@pytest.mark.item("B18")
def test_what_is_valid_is_read(target):
    name, folder, examples = target

    assert [attack(name, folder, content) for content in examples] == [None] * len(examples)


@pytest.mark.item("B18")
def test_what_is_damaged_is_read_or_refused_in_one_line(target, record_property):
    name, folder, examples = target
    count = 0

    @settings(
        max_examples=8 if TARGETS[name].slow else 40, derandomize=True, database=None, deadline=None,
        phases=[Phase.generate], suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(st.data())
    def look(data):
        nonlocal count
        count += 1
        choose = lambda n: data.draw(st.integers(0, n - 1))  # noqa: E731
        attack(name, folder, mutate(examples[choose(len(examples))], examples, choose))

    look()
    assert count >= 8
    record_property("figure", f"{count} inputs")


def test_what_once_failed_does_not_fail_again(target):
    name, folder, _ = target

    for path in FOUND:
        if path.parent.name == name:
            attack(name, folder, path.read_bytes())


def test_every_input_that_is_kept_is_of_a_target():
    assert {path.parent.name for path in FOUND} <= TARGETS.keys()

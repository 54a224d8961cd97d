"""Damaged user files end in a result or in an `InfoXLMError` (B18). `make fuzz` tries more of them.

`FUZZ_INPUTS` is the number of damaged files of each target; with it they differ from run to run. An input that ends in
any other way is saved in `inputs/TARGET/` and read by every later run.
"""

import hashlib
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.fuzz.mutations import mutate
from tests.fuzz.targets import TARGETS, attack

INPUTS = Path(__file__).parent / "inputs"
SAVED_INPUTS = sorted(path for path in INPUTS.rglob("*") if path.is_file())
FUZZ_INPUTS = int(os.environ.get("FUZZ_INPUTS", "0"))


@pytest.fixture(scope="module", params=TARGETS)
def target(request, tmp_path_factory):
    """Name of a target, its folder and its valid examples."""
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, folder, TARGETS[request.param].examples(folder)


@pytest.mark.item("B18")
def test_valid_files_are_read(target):
    name, folder, examples = target

    assert [attack(name, folder, content) for content in examples] == [None] * len(examples)


@pytest.mark.item("B18")
def test_damaged_files_are_read_or_refused_in_one_line(target, record_property):
    name, folder, examples = target
    count = 0

    @settings(
        max_examples=FUZZ_INPUTS or (8 if TARGETS[name].slow else 40), derandomize=not FUZZ_INPUTS, database=None,
        deadline=20_000 if FUZZ_INPUTS else None, phases=[Phase.generate], suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(st.data())
    def read_damaged(data):
        nonlocal count
        count += 1
        choose = lambda n: data.draw(st.integers(0, n - 1))  # noqa: E731
        content = mutate(examples[choose(len(examples))], examples, choose)
        try:
            attack(name, folder, content)
        except BaseException:
            path = INPUTS / name / hashlib.sha256(content).hexdigest()[:12]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            raise

    read_damaged()
    assert count >= 8
    record_property("figure", f"{count} inputs")


def test_saved_inputs_do_not_fail_again(target):
    name, folder, _ = target

    for path in SAVED_INPUTS:
        if path.parent.name == name:
            attack(name, folder, path.read_bytes())


def test_every_saved_input_belongs_to_a_target():
    assert {path.parent.name for path in SAVED_INPUTS} <= TARGETS.keys()

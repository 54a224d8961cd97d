"""No item of the acceptance checklist is without a test."""

import re
from pathlib import Path


def test_every_item_of_the_checklist_has_a_test():
    marked = set()
    for path in Path(__file__).parent.rglob("test_*.py"):
        for names in re.findall(r"mark\.item\(([^)]*)\)", path.read_text(encoding="utf-8")):
            marked |= set(re.findall(r"A\d+", names))

    assert marked == {f"A{number}" for number in range(1, 33)}

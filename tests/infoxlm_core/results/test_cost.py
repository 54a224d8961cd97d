import re

import pytest

from infoxlm_core.results import cost
from infoxlm_core.results.cost import StepCost

STEPS = [
    StepCost("prepare_corpus", "CPU", 0.5, 1, 0.0),
    StepCost("pretrain", "GPU", 12.0, 2, 0.0),
    StepCost("finetune", "GPU", 0.0, 0, 3.0),
    StepCost("evaluate", "", 0.0, 0, 0.0),
]


def test_hours_of_gpus_and_of_processes_are_summed_apart():
    assert cost.sum_up(STEPS) == {"CPU": 0.5, "GPU": 12.0}


@pytest.mark.parametrize(
    ("step", "said"),
    list(zip(STEPS, ["0.5 CPU-hours in 1 attempt", "12 GPU-hours in 2 attempts",
                "0 hours, it was found, and 3 GPU-hours by other runs", "0 hours, it was found"], strict=True)),
)  # fmt: skip
def test_a_step_says_what_it_has_cost(step, said):
    assert str(step) == said


def test_the_table_stands_at_the_end_of_the_page_and_changes_nothing_before_it():
    page = "<main>\n<p>scores</p>\n</main>\n</body>"

    shown = cost.add_to_page(page, STEPS)

    assert shown.startswith("<main>\n<p>scores</p>\n<h2>Cost</h2>") and shown.endswith("</div>\n</main>\n</body>")
    rows = [[cell.strip() for cell in re.findall(r"<td[^>]*>(.*?)</td>", row)] for row in shown.split("<tr>")[2:]]
    assert rows == [
        ["prepare corpus", "0.5", "CPU", "1", ""],
        ["pretrain", "12", "GPU", "2", ""],
        ["finetune", "0", "GPU", "found", "3"],
        ["evaluate", "0", "", "found", ""],
        ["all", "0.5", "CPU", "", ""],
        ["all", "12", "GPU", "", ""],
    ]
    assert cost.add_to_page(page, []) == page

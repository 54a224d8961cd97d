"""The costs of a run, as a table in the copy of the report that the run shows.

The report in the artifact has no costs: it is the same for every run that uses it, and its digest depends on no clock.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tabulate import tabulate

NOTE = (
    "Hours of GPUs, or of processes where no GPU computes. All attempts of a step count; an artifact that existed"
    " already costs nothing. Not included are waiting for a pod or a GPU, and steps that Kubeflow skipped."
)


@dataclass(frozen=True)
class StepCost:
    """One step of a run."""

    step: str
    device: str
    """GPU or CPU; empty if its artifact was found and nobody had measured when it was made."""
    hours: float
    attempts: int
    """0: its artifact was found."""
    others: float
    """Hours that other runs have spent on the same artifact."""

    def __str__(self) -> str:
        spent = f"{self.hours:.3g} {self.device}-hours in {self.attempts} attempt{'s' * (self.attempts != 1)}"
        before = f", and {self.others:.3g} {self.device}-hours by other runs" if self.others else ""
        return (spent if self.attempts else "0 hours, it was found") + before


def sum_up(steps: Iterable[StepCost]) -> dict[str, float]:
    """Hours of all steps by device."""
    total: dict[str, float] = {}
    for step in steps:
        if step.device:
            total[step.device] = total.get(step.device, 0.0) + step.hours
    return total


def add_to_page(page: str, steps: Sequence[StepCost]) -> str:
    """Return a report with a table of costs at its end."""
    rows = [
        [step.step.replace("_", " "), f"{step.hours:.3g}", step.device, step.attempts or "found",
         f"{step.others:.3g}" if step.others else ""]
        for step in steps
    ]  # fmt: skip
    rows += [["all", f"{hours:.3g}", device, "", ""] for device, hours in sum_up(steps).items()]
    table = tabulate(rows, ["step", "hours", "of", "attempts", "hours by other runs"], tablefmt="html")
    before, end, after = page.rpartition("</main>")
    if not steps or not end:
        return page
    return f'{before}<h2>Cost</h2>\n<p>{NOTE}</p>\n<div class="scroll">{table}</div>\n{end}{after}'

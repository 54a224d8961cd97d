"""What a run has cost, as a table in the copies of its report and model card that the run shows.

The page in the artifact has none: it is the same for every run that finds it, and its digest depends on no clock.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tabulate import tabulate

NOTE = (
    "Hours of GPUs, or of processes where no GPU computes: time measured where the work was done, times their number."
    " All attempts of a step count, and what was found made before costs nothing again. Waiting for a pod or a GPU is"
    " not in it, nor is a step that Kubeflow left out."
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
    """The page of a report with the table at its end."""
    found = f'<h2>Cost</h2>\n<p>{NOTE}</p>\n<div class="scroll">{_table(steps, "html")}</div>\n'
    before, end, after = page.rpartition("</main>")
    return before + found + end + after if steps and end else page


def add_to_card(card: str, steps: Sequence[StepCost]) -> str:
    """A model card with the table at its end."""
    return f"{card.rstrip()}\n\n## Cost\n\n{NOTE}\n\n{_table(steps, 'github')}\n" if steps else card


def _table(steps: Sequence[StepCost], form: str) -> str:
    rows = [
        [one.step.replace("_", " "), f"{one.hours:.3g}" if one.attempts else "0", one.device, one.attempts or "found",
         f"{one.others:.3g}" if one.others else ""]
        for one in steps
    ]  # fmt: skip
    rows += [["all", f"{hours:.3g}", device, "", ""] for device, hours in sum_up(steps).items()]
    return tabulate(rows, ["step", "hours", "of", "attempts", "hours by other runs"], tablefmt=form)

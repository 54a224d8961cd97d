"""A plan of a run: tables of what it would take. What stands in them is the system's to say (`System.plan`)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

UTILISATIONS = (0.25, 0.40, 0.50)  # share of a GPU's peak that may be reached: assumed, not measured


class Row(NamedTuple):
    """A line of the plan: what, how much, and how that follows."""

    name: str
    value: float
    unit: str
    formula: str


@dataclass(frozen=True)
class Plan:
    """A plan, table by table."""

    parameters: list[Row]
    memory: list[Row]
    steps: list[Row]
    run: list[Row]


def times(by_shape: Mapping[str, float], updates: int, gpus: int, peak: float) -> list[Row]:
    """Duration of the run for each shape and assumed utilisation."""
    rows = []
    for shape, amount in by_shape.items():
        for mfu in UTILISATIONS:
            gpu_hours = updates * amount / (peak * mfu) / 3600
            said = f"{gpu_hours:,.0f} GPU-hours, {gpus} GPUs, assuming MFU {mfu:.2f} of {peak / 1e12:.0f} TFLOP/s"
            rows.append(Row(f"{shape} sequences", gpu_hours / gpus, "h", said))
    return rows


def describe(tables: Plan) -> Sequence[str]:
    """The plan as lines of text, columns aligned."""
    lines: list[str] = []
    for title, rows in vars(tables).items():
        lines += [title, *(f"  {row.name:28}{_say(row):>16}   {row.formula}" for row in rows)]
    return lines


def _say(row: Row) -> str:
    if row.unit == "B":
        return f"{row.value / 1e9:,.3f} GB"
    if row.unit == "FLOP":
        return f"{row.value / 1e15:,.4g} PFLOP"
    return f"{row.value:,.1f} {row.unit}" if row.unit in ("h", "steps") else f"{row.value:,.0f} {row.unit}".strip()

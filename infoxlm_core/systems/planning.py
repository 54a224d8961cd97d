"""A plan of a run: tables of what it would take. What stands in them is the system's to say (`System.plan`)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


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
    time: list[Row]
    run: list[Row]


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
    digits = 1 if row.unit in ("h", "ms", "steps") else 0
    return f"{row.value:,.{digits}f} {row.unit}".strip()

"""What the InfoXLM paper and others report, to stand beside ours where the task is the same; shares from 0 to 1.

The numbers and their sources are in published.yaml; here is how to read them.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

SOURCE = "InfoXLM (Chi et al. 2020, arXiv 2007.07834v1), Tables 6 and 7: base15 models, means of five runs"

METRICS = {"xnli/mean": "XNLI, accuracy", "mlqa/f1": "MLQA, F1", "mlqa/exact_match": "MLQA, exact match"}
"""The names under which a run must log the same tasks to stand beside the paper; the demo has others."""


@dataclass(frozen=True)
class Row:
    """One published row: a model under one protocol."""

    model: str
    size: str  # base or large
    kind: str  # zero-shot, translate-train-all; for Tatoeba which vector
    source: str
    cells: dict[str, float | None]  # column -> share; None where the copy at hand is not legible
    mean: float | None = None  # as printed, which is rounded and, in two rows, wrong (`note`)
    rule: str = ""  # #M: 1, one checkpoint for all languages · N, one for each · empty: not said
    runs: int = 1  # fine-tunings it is the mean of; 1: not said
    note: str = ""


@dataclass(frozen=True)
class Table:
    title: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]


@cache
def _load() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    return found


def ablations() -> dict[str, dict[str, float]]:
    """Variant -> metric -> share."""
    found: dict[str, dict[str, float]] = _load()["ablations"]
    return found


def protocols() -> dict[str, dict[str, Any]]:
    """Table -> sizes of `test` and `dev` sets by language, and of fine-tuning `settings`, `rates` and `rule`."""
    found: dict[str, dict[str, Any]] = _load()["protocols"]
    return found


@cache
def tables() -> dict[str, Table]:
    """All tables of published.yaml by name: `xnli`, `mlqa/f1`, `tatoeba/14/xx_en`, `transfer_gap`, `mixed`."""
    found = _load()
    return {
        name: Table(table["title"], tuple(columns := table["columns"].split()),
                    tuple(_read(row, columns, found["sources"]) for row in table["rows"]))
        for name, table in found["tables"].items()
    }  # fmt: skip


def _read(row: dict[str, Any], columns: list[str], sources: dict[str, str]) -> Row:
    shares = (None if cell == "?" else float(cell) / 100 for cell in row["cells"].split())
    read: dict[str, Any] = {"source": sources[row["source"]], "cells": dict(zip(columns, shares, strict=True))}
    read |= {"rule": str(row.get("rule", "")), "mean": row["mean"] / 100 if "mean" in row else None}
    return Row(**row | read)

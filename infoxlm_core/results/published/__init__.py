"""Results published in the InfoXLM paper and elsewhere, as shares from 0 to 1. They are stored in published.yaml."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

SOURCE = "InfoXLM (Chi et al. 2020, arXiv 2007.07834v1), Tables 6 and 7: base15 models, means of five runs"

METRICS = {"xnli/mean": "XNLI, accuracy", "mlqa/f1": "MLQA, F1", "mlqa/exact_match": "MLQA, exact match"}
"""Metric of the paper's ablations -> column title."""


@dataclass(frozen=True)
class PublishedRow:
    """One published row: a model under one protocol."""

    model: str
    size: str  # base or large
    kind: str  # zero-shot, translate-train-all or translate-test; for Tatoeba, the vector
    source: str
    cells: dict[str, float | None]  # column -> share; None if illegible in our copy
    mean: float | None = None  # as printed: rounded, and wrong in two rows (see `note`)
    rule: str = ""  # #M: `1` checkpoint for all languages, `N` for one per language; empty if not reported
    runs: int = 1  # number of averaged fine-tuning runs; 1 if not reported
    note: str = ""


@dataclass(frozen=True)
class PublishedTable:
    """A published table: column names and rows."""

    columns: tuple[str, ...]
    rows: tuple[PublishedRow, ...]


@cache
def _load() -> dict[str, Any]:
    """Read published.yaml."""
    content: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("published.yaml").read_text(encoding="utf-8"))
    return content


def ablations() -> dict[str, dict[str, float]]:
    """Return the results of the paper's ablations: variant -> metric -> share."""
    variants: dict[str, dict[str, float]] = _load()["ablations"]
    return variants


def protocols() -> dict[str, dict[str, str]]:
    """Return the paper's protocols: table -> aspect -> choice."""
    protocol_by_table: dict[str, dict[str, str]] = _load()["protocols"]
    return protocol_by_table


def translation() -> PublishedTable:
    """Return XLM's results in unsupervised translation: BLEU in percent by direction, one row per initialisation."""
    table = _load()["translation"]
    columns = table["columns"].split()
    rows = []
    for model, cells in table["rows"].items():
        scores = dict(zip(columns, map(float, cells.split()), strict=True))
        rows.append(PublishedRow(model, "6 layers", "unsupervised", table["source"], scores))
    return PublishedTable(tuple(columns), tuple(rows))


@cache
def tables() -> dict[str, PublishedTable]:
    """Return all published tables by name, such as `xnli`, `mlqa/f1`, `tatoeba/14/xx_en` and `transfer_gap`."""
    content = _load()
    tables = {}
    for name, table in content["tables"].items():
        columns = table["columns"].split()
        rows = tuple(_read_row(row, columns, content["sources"]) for row in table["rows"])
        tables[name] = PublishedTable(tuple(columns), rows)
    return tables


def _read_row(row: dict[str, Any], columns: list[str], sources: dict[str, str]) -> PublishedRow:
    """Parse a row of published.yaml. Scores are percentages, or `?` if unknown.

    Args:
        row: fields of the row.
        columns: column names of the table.
        sources: descriptions of the sources by name.
    """
    shares: dict[str, float | None] = {}
    for column, percentage in zip(columns, row["cells"].split(), strict=True):
        shares[column] = None if percentage == "?" else float(percentage) / 100
    fields = row | {
        "source": sources[row["source"]],
        "cells": shares,
        "rule": str(row.get("rule", "")),
        "mean": row["mean"] / 100 if "mean" in row else None,
    }
    return PublishedRow(**fields)

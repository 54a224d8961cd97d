"""What the InfoXLM paper and others report, read from published.yaml; shares from 0 to 1."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

SOURCE = "InfoXLM (Chi et al. 2020, arXiv 2007.07834v1), Tables 6 and 7: base15 models, means of five runs"

METRICS = {"xnli/mean": "XNLI, accuracy", "mlqa/f1": "MLQA, F1", "mlqa/exact_match": "MLQA, exact match"}
"""Metrics of the paper's ablations, with their titles."""


@dataclass(frozen=True)
class PublishedRow:
    """One published row: a model under one protocol."""

    model: str
    size: str  # base or large
    kind: str  # zero-shot, translate-train-all or translate-test; for Tatoeba the vector
    source: str
    cells: dict[str, float | None]  # column -> share; None if our copy is not legible there
    mean: float | None = None  # as printed: rounded, and wrong in two rows (see `note`)
    rule: str = ""  # #M: `1` checkpoint for all languages, `N` for one each; empty if not reported
    runs: int = 1  # fine-tunings that were averaged; 1 if not reported
    note: str = ""


@dataclass(frozen=True)
class PublishedTable:
    """The rows of a published table and the names of its columns."""

    columns: tuple[str, ...]
    rows: tuple[PublishedRow, ...]


@cache
def _load() -> dict[str, Any]:
    """Return the content of published.yaml."""
    content: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("published.yaml").read_text(encoding="utf-8"))
    return content


def ablations() -> dict[str, dict[str, float]]:
    """Return the paper's ablations: variant -> metric -> share."""
    variants: dict[str, dict[str, float]] = _load()["ablations"]
    return variants


def protocols() -> dict[str, dict[str, str]]:
    """Return how the paper measured: table -> aspect of the protocol -> the paper's choice."""
    protocol_by_table: dict[str, dict[str, str]] = _load()["protocols"]
    return protocol_by_table


def translation() -> PublishedTable:
    """Return XLM's unsupervised translation: BLEU in percent by direction, a row for each initialisation."""
    table = _load()["translation"]
    columns = table["columns"].split()
    rows = []
    for model, cells in table["rows"].items():
        scores = dict(zip(columns, map(float, cells.split()), strict=True))
        rows.append(PublishedRow(model, "6 layers", "unsupervised", table["source"], scores))
    return PublishedTable(tuple(columns), tuple(rows))


@cache
def tables() -> dict[str, PublishedTable]:
    """Return all published tables by name: `xnli`, `mlqa/f1`, `tatoeba/14/xx_en`, `transfer_gap`, `mixed`."""
    content = _load()
    tables = {}
    for name, table in content["tables"].items():
        columns = table["columns"].split()
        rows = tuple(_read_row(row, columns, content["sources"]) for row in table["rows"])
        tables[name] = PublishedTable(tuple(columns), rows)
    return tables


def _read_row(row: dict[str, Any], columns: list[str], sources: dict[str, str]) -> PublishedRow:
    """Parse a row of published.yaml. Its scores are percentages, or `?` if they are unknown.

    Args:
        row: the fields of the row.
        columns: names of the columns of its table.
        sources: name of a source -> its description.
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

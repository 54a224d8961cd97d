"""What the InfoXLM paper and others report, to stand beside ours where the task is the same; shares from 0 to 1.

The tables are in published.yaml; here is how to read them, and the paper's ablations. Source of the ablations: Chi et
al. 2020, "InfoXLM", arXiv 2007.07834 version 1, Tables 6 and 7: base-sized models trained on 15 languages, means of
five runs. XNLI is accuracy, MLQA is F1 and exact match.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

SOURCE = "InfoXLM (Chi et al. 2020, arXiv 2007.07834v1), Tables 6 and 7: base15 models, means of five runs"

METRICS = {
    "xnli/mean": "XNLI, accuracy",
    "mlqa/f1": "MLQA, F1",
    "mlqa/exact_match": "MLQA, exact match",
}
"""The names under which a run must log the same tasks to stand beside the paper; the demo has others."""

ABLATIONS: dict[str, dict[str, float]] = {
    "full": {"xnli/mean": 0.7645, "mlqa/f1": 0.6787, "mlqa/exact_match": 0.4958},
    "-XLCO": {"xnli/mean": 0.7624, "mlqa/f1": 0.6743, "mlqa/exact_match": 0.4923},
    "-TLM": {"xnli/mean": 0.7585, "mlqa/f1": 0.6784, "mlqa/exact_match": 0.4954},
    "-TLM:universal": {"mlqa/f1": 0.6742, "mlqa/exact_match": 0.4927},
    "-TLM-XLCO": {"xnli/mean": 0.7533, "mlqa/f1": 0.6686, "mlqa/exact_match": 0.4882},
    "-TLM-Mixup": {"xnli/mean": 0.7543, "mlqa/f1": 0.6721, "mlqa/exact_match": 0.4919},
    "-TLM-Momentum": {"xnli/mean": 0.7532, "mlqa/f1": 0.6658, "mlqa/exact_match": 0.4866},
    "-Universal": {"xnli/mean": 0.7612, "mlqa/f1": 0.6783, "mlqa/exact_match": 0.4950},
}
"""By variant. -TLM of Table 7 is the row of the last layer in Table 6; with the universal layer (`-TLM:universal`) the
paper gives MLQA alone. For -TLM-Mixup and -TLM-Momentum it does not say the layer."""


@dataclass(frozen=True)
class Row:
    """One published row: a model under one protocol."""

    model: str
    size: str  # base or large
    kind: str  # zero-shot, translate-train-all; for Tatoeba which vector
    rule: str  # #M: 1, one checkpoint for all languages · N, one for each · empty: not said
    runs: int  # fine-tunings it is the mean of; 1: not said
    source: str
    note: str
    cells: dict[str, float | None]  # column -> share; None where the copy at hand is not legible
    mean: float | None  # as printed, which is rounded and, in two rows, wrong (`note`)


@dataclass(frozen=True)
class Table:
    title: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]


@cache
def tables() -> dict[str, Table]:
    """All tables of published.yaml by name: `xnli`, `mlqa/f1`, `tatoeba/14/xx_en`, `transfer_gap`, `mixed`."""
    found = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    return {
        name: Table(table["title"], tuple(columns := table["columns"].split()),
                    tuple(_read(row, columns, found["sources"]) for row in table["rows"]))
        for name, table in found["tables"].items()
    }  # fmt: skip


def _read(row: dict[str, Any], columns: list[str], sources: dict[str, str]) -> Row:
    shares = (None if cell == "?" else float(cell) / 100 for cell in row["cells"].split())
    return Row(
        row["model"],
        row["size"],
        row["kind"],
        str(row.get("rule", "")),
        row.get("runs", 1),
        sources[row["source"]],
        row.get("note", ""),
        dict(zip(columns, shares, strict=True)),
        row["mean"] / 100 if "mean" in row else None,
    )

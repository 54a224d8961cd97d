"""Read the training curves and checkpoints of pre-training runs, to compare two runs."""

import json
from pathlib import Path

from infoxlm_core.training import tracker


def losses(run: Path) -> list[tuple]:
    """Return the losses of every logged step, bit by bit."""
    names = ("loss/mlm", "loss/tlm", "loss/xlco", "xlco/accuracy", "gradient_norm")
    rows = []
    for step, values in tracker.read(run / tracker.METRICS):
        exact_values = [values[name].hex() for name in names]
        rows.append((step, *exact_values))
    return rows


def numbers(run: Path) -> list[float]:
    """Return the losses of MLM, TLM and contrast of every logged step, one after the other."""
    return [float.fromhex(value) for row in losses(run) for value in row[1:4]]


def state_of(run: Path, step: int) -> dict[str, str]:
    """Return the size and digest of the training state in the checkpoint of a step."""
    return json.loads((run / f"step={step:010d}" / "manifest.json").read_text())["files"]["state.safetensors"]

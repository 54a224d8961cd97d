"""Read the training curves and checkpoints of pre-training runs, to compare two runs."""

import json
from pathlib import Path

from infoxlm_core.training import tracker


def losses(run: Path) -> list[tuple]:
    """Return the losses of every logged step, bit by bit."""
    names = ("loss/mlm", "loss/tlm", "loss/xlco", "xlco/accuracy", "gradient_norm")
    return [(step, *(values[name].hex() for name in names)) for step, values in tracker.read(run / tracker.METRICS)]


def numbers(run: Path) -> list[float]:
    return [float.fromhex(value) for row in losses(run) for value in row[1:4]]


def state_of(run: Path, step: int) -> dict[str, str]:
    return json.loads((run / f"step={step:010d}" / "manifest.json").read_text())["files"]["state.safetensors"]

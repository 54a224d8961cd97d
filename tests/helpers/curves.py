"""What the training curves and checkpoints of two pre-training runs are compared by."""

import json
from pathlib import Path

from infoxlm_core.training import tracker


def losses(run: Path) -> list[tuple]:
    """Every logged step's losses, bit by bit."""
    wanted = ("loss/mlm", "loss/tlm", "loss/xlco", "xlco/accuracy", "gradient_norm")
    return [(step, *(values[name].hex() for name in wanted)) for step, values in tracker.read(run / tracker.METRICS)]


def numbers(run: Path) -> list[float]:
    return [float.fromhex(value) for row in losses(run) for value in row[1:4]]


def state_of(run: Path, step: int) -> dict[str, str]:
    return json.loads((run / f"step={step:010d}" / "manifest.json").read_text())["files"]["state.safetensors"]

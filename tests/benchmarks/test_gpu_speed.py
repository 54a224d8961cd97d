"""The benchmark of a GPU keeps what it has when something does not fit."""

import pytest
import torch

from benchmarks.gpu import speed as gpu


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch):
    """A machine whose every measurement is one row."""
    monkeypatch.setattr(gpu, "free", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu, "ceilings", lambda: [{"what": "a product", "TFLOP/s": 600.0, "TB/s": 0.0}])
    monkeypatch.setattr(gpu, "hugging_face", lambda name, shape: [{"model": name, "shape": shape}])
    monkeypatch.setattr(gpu, "data_wait", lambda: {"steps": 1})


def test_a_batch_that_does_not_fit_costs_its_own_row_alone(monkeypatch):
    def step(name, objective, shape, reached):
        if name == "large" and shape == "full":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4 GiB\nand more words")
        return {"model": name, "objective": objective, "shape": shape, "reached": reached}

    monkeypatch.setattr(gpu, "step", step)

    sheets = {sheet.name: sheet.rows for sheet in gpu.run(quick=False)}

    kept = [(row["model"], row["objective"], row["shape"]) for row in sheets["gpu, steps"]]
    assert ("large", "MLM", "ragged") in kept and ("base", "MLM", "full") in kept
    assert ("large", "MLM", "full") not in kept and len(kept) == 2 * 2 * len(gpu.inputs.SHAPES) - 2
    assert {row["what"]: row["why"] for row in sheets["gpu, skipped"]} == dict.fromkeys(
        ["large MLM full", "large InfoXLM full"], "CUDA out of memory. Tried to allocate 4 GiB"
    )
    assert len(sheets["gpu, Hugging Face"]) == 2 * len(gpu.inputs.SHAPES) and sheets["gpu, waiting for data"]


def test_what_fits_is_measured_against_the_fastest_product(monkeypatch):
    monkeypatch.setattr(gpu, "step", lambda *given: {"reached": given[-1]})

    sheets = {sheet.name: sheet.rows for sheet in gpu.run(quick=True)}

    assert {row["reached"] for row in sheets["gpu, steps"]} == {600.0} and "gpu, skipped" not in sheets

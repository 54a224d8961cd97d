"""The checks of a GPU pass where all is right, notice what is not, and go on after a crash."""

import argparse
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import checks as gpu_checks
from benchmarks.gpu import speed as gpu
from infoxlm_core.model import encoder


@pytest.mark.parametrize("check", [gpu_checks.attention, gpu_checks.dropout, gpu_checks.loss,
                                   gpu_checks.inference_then_training, gpu_checks.fewer_gpus_than_workers])  # fmt: skip
def test_on_a_cpu_a_check_of_numbers_passes(check):
    rows = list(check(True))

    assert rows and all(row["ok"] for row in rows)


def test_attention_that_looks_into_the_next_sequence_is_noticed(monkeypatch):
    right = encoder.attend

    def leaking(query, *more, **named):
        return right(query, *more, **named) if query.dtype == torch.float64 else query

    monkeypatch.setattr(encoder, "attend", leaking)

    assert not any(row["ok"] for row in gpu_checks.attention(True) if row["lengths"] == "ragged")


CHECKS = """
import os, sys, time
from benchmarks.gpu import checks

def raises(cpu):
    yield {"ok": True}
    raise RuntimeError("CUDA error: an illegal memory access")

def dies(cpu):
    yield {"seen": 1}
    os.abort()

gpu_checks.CHECKS = {"raises": raises, "dies": dies, "hangs": lambda cpu: time.sleep(600), "last": lambda cpu: [{"figure": 1}]}
sys.exit(gpu_checks.main())
"""  # noqa: E501


def test_a_check_that_raises_dies_or_hangs_is_told_and_the_next_one_runs(monkeypatch, tmp_path):
    script = tmp_path / "checks.py"
    script.write_text(CHECKS)
    monkeypatch.setattr(gpu_checks, "COMMAND", [sys.executable, str(script)])
    monkeypatch.setattr(gpu_checks, "CHECKS", dict.fromkeys(("raises", "dies", "last")))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    options, kept = argparse.Namespace(cpu=True, full=False), []

    failed = gpu_checks._run(options, kept.append)

    assert failed == 2
    assert {"check": "raises", "ok": False, "why": "RuntimeError: CUDA error: an illegal memory access"} in kept
    assert {"check": "dies", "seen": 1} in kept and {"check": "dies", "ok": False, "why": "it ended with -6"} in kept
    assert {"figure": 1} in kept
    monkeypatch.setattr(gpu_checks, "LONGEST", 1.0)
    assert list(gpu_checks._apart("hangs", options)) == [{"ok": False, "why": "it did not end within 1 s"}]


def test_neither_checks_nor_figures_need_what_a_machine_with_torch_and_little_else_lacks():
    absent = ("transformers", "tokenizers", "pandas", "matplotlib", "kfp", "ray", "mlflow", "typer", "rich", "boto3")
    code = f"import sys; sys.modules.update(dict.fromkeys({absent})); from benchmarks.gpu import speed"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

    assert done.returncode == 0, done.stderr


def test_a_step_of_full_blocks_stands_beside_its_plan_part_by_part():
    batch = gpu.make_batch("InfoXLM", "full")
    config = gpu.inputs.config(gpu.SIZES["base"], contrast={"layer": 8, "queue_size": gpu.QUEUE})

    predicted = gpu.planned(config, batch, "NVIDIA H200")
    rows = {row.pop("part"): row for row in gpu_checks.beside_the_plan(
        {"attention": 20.0, "products": 70.0, "elementwise": 30.0, "copies": 5.0}, predicted
    )}  # fmt: skip

    assert sum(row["ms"] for row in rows.values()) == 125.0 and rows["all else, through memory"]["ms"] == 35.0
    kernels = predicted["a step"] - predicted["end of the step"] - predicted["saving"]
    assert sum(row["planned ms"] for row in rows.values()) == pytest.approx(kernels)
    assert 40 < rows["products"]["planned ms"] < 80  # 48 items: one and a half times the 39 ms of 32
    assert gpu.planned(config, batch, "a GPU of next year") == {}
    assert gpu.planned(config, gpu.make_batch("InfoXLM", "ragged"), "NVIDIA H200") == {}
    mlm = gpu.inputs.config(gpu.SIZES["base"], objectives={"tlm": 0, "xlco": 0}, contrast={"layer": 8})
    assert gpu.planned(mlm, gpu.make_batch("MLM", "full"), "NVIDIA H200")["queue"] == 0

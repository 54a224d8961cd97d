"""The checks of a GPU pass where all is right, notice what is not, and go on after a crash."""

import argparse

import pytest
import torch

from benchmarks import gpu_checks
from infoxlm_core.model import encoder


@pytest.mark.parametrize("check", [gpu_checks.attention, gpu_checks.loss, gpu_checks.inference_then_training])
def test_on_a_cpu_a_check_of_numbers_passes(check):
    rows = list(check(True))

    assert rows and all(row["ok"] for row in rows)


def test_attention_that_looks_into_the_next_sequence_is_noticed(monkeypatch):
    right = encoder.attend

    def leaking(query, *more, **named):
        return right(query, *more, **named) if query.dtype == torch.float64 else query

    monkeypatch.setattr(encoder, "attend", leaking)

    assert not any(row["ok"] for row in gpu_checks.attention(True) if row["lengths"] == "ragged")


def test_a_check_that_crashes_is_told_and_the_next_one_runs(monkeypatch):
    def crashes(cpu):
        yield {"ok": True}
        raise RuntimeError("CUDA error: an illegal memory access")

    monkeypatch.setattr(gpu_checks, "CHECKS", {"one": crashes, "two": lambda cpu: iter([{"figure": 1}])})
    kept = []

    failed = gpu_checks._run(argparse.Namespace(cpu=True, full=False), kept.append)

    assert failed == 1
    assert {"check": "one", "ok": False, "why": "RuntimeError: CUDA error: an illegal memory access"} in kept
    assert {"check": "two", "figure": 1} in kept

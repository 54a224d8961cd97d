"""The GPU checks pass on a CPU, notice wrong results, and go on after a crash."""

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import __main__ as runner
from benchmarks.gpu import checks, speed, trainings
from infoxlm_core.model import encoder


@pytest.mark.parametrize(
    "check",
    [
        checks.check_attention,
        checks.check_dropout,
        checks.check_loss,
        checks.check_training_after_inference,
        checks.check_fewer_gpus_than_workers,
    ],
)
def test_check_passes_on_a_cpu(check):
    rows = list(check(small=True))

    assert rows
    assert all(row["ok"] for row in rows)


def test_attention_to_another_sequence_fails_the_check(monkeypatch):
    correct = encoder.attend

    def leaking(query, *arguments, **options):
        return correct(query, *arguments, **options) if query.dtype == torch.float64 else query

    monkeypatch.setattr(encoder, "attend", leaking)

    assert not any(row["ok"] for row in checks.check_attention(small=True) if row["lengths"] == "ragged")


def test_checks_without_a_gpu_do_not_pass(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu"])

    assert runner.main() == 2
    assert "no CUDA device" in capsys.readouterr().out


CHECKS = """
import os, sys, time
from benchmarks.gpu import __main__ as runner, checks

def raises(small):
    yield {"ok": True}
    raise RuntimeError("CUDA error: an illegal memory access")

def dies(small):
    yield {"figure": 1}
    os.abort()

def hangs(small):
    time.sleep(600)

checks.CHECKS = {"raises": raises, "dies": dies, "hangs": hangs, "last": lambda small: [{"ok": 1}]}
sys.exit(runner.main())
"""


def test_failed_check_is_reported_and_the_next_check_runs(monkeypatch, tmp_path):
    script = tmp_path / "checks.py"
    script.write_text(CHECKS)
    monkeypatch.setattr(runner, "COMMAND", [sys.executable, str(script)])
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    options = argparse.Namespace(cpu=True, full=False)
    rows = []

    failures = runner.run_all(["raises", "dies", "last"], options, rows.append)

    assert failures == 2
    assert {"check": "raises", "ok": False, "why": "RuntimeError: CUDA error: an illegal memory access"} in rows
    assert {"check": "dies", "figure": 1} in rows
    assert {"check": "dies", "ok": False, "why": "The process ended with code -6."} in rows
    assert {"check": "last", "ok": 1} in rows
    monkeypatch.setattr(runner, "SECONDS", 1.0)
    late_rows = list(runner.run_in_process("hangs", options))
    assert late_rows == [{"ok": False, "why": "The process did not end within 1 s."}]


def test_checks_and_measurements_import_only_the_required_packages():
    absent = ("transformers", "tokenizers", "pandas", "matplotlib", "kfp", "ray", "mlflow", "typer", "rich", "boto3")
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({absent}))\n"
        "from benchmarks import machine\nfrom benchmarks.gpu import checks, speed"
    )

    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

    assert completed.returncode == 0, completed.stderr


def test_step_that_does_not_fit_into_memory_skips_only_its_own_row(monkeypatch):
    def step(name, objective, shape, fastest_product):
        if name == "large" and shape == "full":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4 GiB\nand more words")
        return {"fastest product": fastest_product}

    monkeypatch.setattr(speed, "free_memory", lambda: None)
    monkeypatch.setattr(speed, "product_flops", lambda *shape: 6e14)
    monkeypatch.setattr(speed, "measure_step", step)

    rows = list(speed.measure_steps(full=True))

    skipped = [row for row in rows if "skipped" in row]
    assert len(rows) == 8
    assert [(row["model"], row["objective"], row["shape"]) for row in skipped] == [
        ("large", "MLM", "full"), ("large", "InfoXLM", "full")
    ]  # fmt: skip
    assert {row["skipped"] for row in skipped} == {"CUDA out of memory. Tried to allocate 4 GiB"}


@pytest.fixture
def in_this_process(monkeypatch):
    """Run the training's one worker in this process, and again if it kills itself: torchrun has its own tests."""

    class Killed(Exception):
        pass

    def kill(process, number):
        assert process == os.getpid()
        raise Killed

    def launch_training(train, workers, run, **arguments):
        try:
            train(run=run, **arguments)
        except Killed:
            train(run=run, **arguments)

    monkeypatch.setattr(trainings.os, "kill", kill)
    monkeypatch.setattr(trainings.torchrun, "launch_training", launch_training)
    monkeypatch.setattr(trainings, "TRAININGS", trainings.TRAININGS[:3])


@pytest.mark.usefixtures("in_this_process")
def test_killed_training_and_two_workers_have_the_losses_of_one_undisturbed_worker():
    rows = list(trainings.compare_losses(gpus=2, limit=1e-4))

    assert [row["training"] for row in rows] == ["one worker", "one worker, killed and resumed", "two workers"]
    assert [row["killed"] for row in rows] == [False, True, False]
    assert all(row["ok"] for row in rows)
    assert [row["off"] for row in rows[1:]] == [0.0, 0.0]


@pytest.mark.usefixtures("in_this_process")
def test_different_losses_fail_and_two_workers_need_two_gpus(monkeypatch):
    read = trainings.tracker.read

    def read_wrong_losses(path):
        factor = 1.001 if "killed" in str(path) else 1.0
        return [(step, {name: factor * value for name, value in values.items()}) for step, values in read(path)]

    monkeypatch.setattr(trainings.tracker, "read", read_wrong_losses)

    undisturbed, killed, two_workers = trainings.compare_losses(gpus=1, limit=1e-4)

    assert undisturbed["ok"]
    assert not killed["ok"]
    assert killed["off"] > 1e-4
    assert two_workers == {"training": "two workers", "skipped": "1 GPU"}

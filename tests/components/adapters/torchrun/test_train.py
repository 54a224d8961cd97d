"""Processes that torch starts train as Ray workers do: the same losses, restarts, errors and stops."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from components.adapters.torchrun import train as torchrun_train
from infoxlm_core.errors import ConfigMismatch, Preempted, WorkerLost
from infoxlm_core.stages.pretraining import pretrain
from infoxlm_core.training import distributed, tracker, workers
from tests.components.conftest import LONGER, kill_first_worker, losses
from tests.toys.pretraining import tiny_config

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def train(shards: Path, base: Path, **changes) -> list[tuple[int, dict]]:
    (base / "run").mkdir(parents=True, exist_ok=True)
    config = tiny_config(**changes)
    torchrun_train.run(pretrain, 2, config=config, shards_path=shards, output=base / "out", run=base / "run")
    return tracker.read(base / "run" / tracker.METRICS)


@pytest.mark.item("F01", "F19")
def test_a_killed_worker_is_replaced_sigterm_lets_the_workers_save_and_the_same_call_ends_as_if_nothing_had_happened(
    undisturbed, tiny_shards, tmp_path
):
    def stop() -> None:
        while not (tmp_path / "run/step=0000000020/manifest.json").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    killed = kill_first_worker(tmp_path / "run")
    threading.Thread(target=stop, daemon=True).start()
    (tmp_path / "run").mkdir()
    with workers.stopping_on_signals(tmp_path / "run"), pytest.raises(Preempted):
        train(tiny_shards, tmp_path, **LONGER)
    (tmp_path / "run/stop").unlink(missing_ok=True)

    found = train(tiny_shards, tmp_path, **LONGER)

    assert killed, "the fault never fired"
    assert losses(found) == losses(tracker.read(undisturbed / tracker.METRICS)) and len(found) == 60
    assert (tmp_path / "out/encoder/model.safetensors").exists()


def test_an_error_of_ours_comes_back_as_itself_without_restarts(undisturbed, tiny_shards, tmp_path):
    shutil.copytree(undisturbed, tmp_path / "run")

    with pytest.raises(ConfigMismatch, match="seed was 1, is 5"):
        train(tiny_shards, tmp_path, seed=5, **LONGER)


def train_until_stopped(shards: Path, base: Path) -> None:
    """What a command does, in a process of its own: train for long without saving, and end with the error's code."""
    run = base / "run"
    run.mkdir()
    try:
        with workers.stopping_on_signals(run):
            train(shards, base, optimization={"steps": 100_000}, checkpoints={"every": 100_000})
    except Preempted as stopped:
        sys.exit(stopped.exit_code)


@pytest.mark.item("F19")
def test_sigterm_to_all_processes_of_a_command_lets_the_workers_save_too(tiny_shards, tmp_path):
    code = f"from {__name__} import *; train_until_stopped(Path({str(tiny_shards)!r}), Path({str(tmp_path)!r}))"
    command = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    try:
        curve = tmp_path / "run" / tracker.METRICS
        while command.poll() is None and (not curve.exists() or len(tracker.read(curve)) < 10):
            time.sleep(0.05)
        os.killpg(command.pid, signal.SIGTERM)
        ended = command.wait(timeout=120)
    finally:
        if command.poll() is None:
            os.killpg(command.pid, signal.SIGKILL)

    assert ended == 75
    assert [path.name for path in (tmp_path / "run").glob("step=*") if path.name >= "step=0000000010"]


def die(run: Path) -> dict:
    with (run / "attempts").open("a") as file:
        file.write("x")
    os._exit(3)


def test_workers_that_die_each_time_end_the_run_with_one_clear_line(tmp_path, monkeypatch):
    monkeypatch.setattr(torchrun_train, "MAX_RESTARTS", 1)

    with pytest.raises(WorkerLost, match=r"worker 0 ended with exit code 3, even after 1 restarts: run again"):
        torchrun_train.run(die, 1, run=tmp_path)

    assert (tmp_path / "attempts").read_text() == "xx"


def test_two_workers_on_a_machine_with_one_gpu_become_one(tmp_path, monkeypatch):
    monkeypatch.setattr(torchrun_train.devices, "count_gpus", lambda: 1)

    assert torchrun_train.run(count_workers, 2, run=tmp_path) == {"workers": 1}


def count_workers(run: Path) -> dict:
    return {"workers": distributed.world_size()}

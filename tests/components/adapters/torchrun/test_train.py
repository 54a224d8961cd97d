"""Processes that torch starts train as Ray workers do: with the same losses, restarts, errors and signals."""

import os
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

pytestmark = pytest.mark.slow


def train(shards: Path, base: Path, **changes) -> list[tuple[int, dict]]:
    (base / "run").mkdir(parents=True, exist_ok=True)
    config = tiny_config(**changes)
    torchrun_train.launch_training(
        pretrain, 2, config=config, shards_path=shards, output=base / "out", run=base / "run"
    )
    return tracker.read(base / "run" / tracker.METRICS)


@pytest.mark.item("F01", "F19")
def test_killed_worker_is_restarted_and_sigterm_saves_without_changing_a_loss(undisturbed, tiny_shards, tmp_path):
    def send_sigterm() -> None:
        while not (tmp_path / "run/step=0000000020/manifest.json").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    killed_workers = kill_first_worker(tmp_path / "run")
    threading.Thread(target=send_sigterm, daemon=True).start()
    (tmp_path / "run").mkdir()
    with workers.stop_training_on_signals(tmp_path / "run"), pytest.raises(Preempted):
        train(tiny_shards, tmp_path, **LONGER)
    (tmp_path / "run/stop").unlink(missing_ok=True)

    points = train(tiny_shards, tmp_path, **LONGER)

    assert killed_workers, "the fault did not occur"
    assert len(points) == 60
    assert losses(points) == losses(tracker.read(undisturbed / tracker.METRICS))
    assert (tmp_path / "out/encoder/model.safetensors").exists()


def train_until_stopped(shards: Path, base: Path) -> None:
    """Train for long without saving, and end with the exit code of the error, as a command does."""
    run = base / "run"
    run.mkdir()
    try:
        with workers.stop_training_on_signals(run):
            train(shards, base, optimization={"steps": 100_000}, checkpoints={"every": 100_000})
    except Preempted as error:
        sys.exit(error.exit_code)


@pytest.mark.item("F19")
def test_sigterm_to_all_processes_of_a_command_saves_a_checkpoint(tiny_shards, tmp_path):
    code = f"from {__name__} import *; train_until_stopped(Path({str(tiny_shards)!r}), Path({str(tmp_path)!r}))"
    command = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    try:
        curve = tmp_path / "run" / tracker.METRICS
        while command.poll() is None and (not curve.exists() or len(tracker.read(curve)) < 10):
            time.sleep(0.05)
        os.killpg(command.pid, signal.SIGTERM)
        exit_code = command.wait()
    finally:
        if command.poll() is None:
            os.killpg(command.pid, signal.SIGKILL)

    assert exit_code == 75
    assert any(path.name >= "step=0000000010" for path in (tmp_path / "run").glob("step=*"))


def record_attempt_and_die(run: Path) -> dict:
    with (run / "attempts").open("a") as file:
        file.write("x")
    os._exit(3)


def test_workers_that_always_die_are_restarted_a_limited_number_of_times(tmp_path, monkeypatch):
    monkeypatch.setattr(torchrun_train, "MAX_RESTARTS", 1)

    with pytest.raises(WorkerLost, match=r"worker 0 ended with exit code 3, even after 1 restarts: run again"):
        torchrun_train.launch_training(record_attempt_and_die, 1, run=tmp_path)

    assert (tmp_path / "attempts").read_text() == "xx"


def record_attempt_and_fail(run: Path) -> dict:
    with (run / "attempts").open("a") as file:
        file.write("x")
    raise ConfigMismatch(f"{distributed.world_size()} workers")


def test_workers_are_limited_to_the_gpus_and_their_error_is_raised_without_restart(tmp_path, monkeypatch):
    monkeypatch.setattr(torchrun_train.devices, "count_gpus", lambda: 1)

    with pytest.raises(ConfigMismatch, match=r"^1 workers$"):
        torchrun_train.launch_training(record_attempt_and_fail, 2, run=tmp_path)

    assert (tmp_path / "attempts").read_text() == "x"

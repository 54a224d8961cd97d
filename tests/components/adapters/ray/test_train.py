"""Training on real Ray workers gives the losses of one process, and a killed worker is replaced."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from components.adapters.ray import train as ray_train
from infoxlm_core.errors import ConfigMismatch, Preempted
from infoxlm_core.stages.pretraining import pretrain
from infoxlm_core.training import tracker
from tests.conftest import tiny_config

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
LONGER = {"optimization": {"steps": 60}, "checkpoints": {"every": 5}}


def train(workers: int, shards: Path, base: Path, work=pretrain, **changes) -> list[tuple[int, dict]]:
    config = tiny_config(**changes)
    ray_train.run(work, workers, config=config, shards_path=shards, output=base / "out", run=base / "run")
    return tracker.read(base / "run" / tracker.METRICS)


def losses(points: list[tuple[int, dict]]) -> list[float]:
    return [values[name] for _, values in points for name in ("loss/mlm", "loss/tlm", "loss/xlco")]


@pytest.mark.item("A3", "A11")
def test_zero_one_two_and_four_workers_give_the_same_losses(ray_here, tiny_shards, tmp_path, in_fp64, record_property):
    def in_fp64_too(**arguments) -> dict:
        torch.set_default_dtype(torch.float64)
        return pretrain(**arguments)

    none, one, two, four = (train(n, tiny_shards, tmp_path / str(n), in_fp64_too) for n in (0, 1, 2, 4))

    assert losses(one) == losses(none)
    off = max(abs(a / b - 1) for found in (two, four) for a, b in zip(losses(found), losses(none), strict=True))
    record_property("figure", f"losses on Ray workers within {off:.1e}")
    assert off <= 1e-9
    assert (tmp_path / "2/out/encoder/model.safetensors").exists()


def test_sigterm_before_the_first_step_is_not_lost(tiny_shards, tmp_path):
    def preempted_early(**arguments) -> dict:
        os.kill(os.getpid(), signal.SIGTERM)  # while shards are read and the queue is filled
        return pretrain(**arguments)

    with pytest.raises(Preempted, match="after step 1"):
        ray_train.run(
            preempted_early, 0, config=tiny_config(), shards_path=tiny_shards, output=tmp_path / "out",
            run=tmp_path / "run",
        )  # fmt: skip

    assert len(train(0, tiny_shards, tmp_path)) == 6


def test_an_error_of_ours_comes_back_as_itself_without_retries(ray_here, tiny_shards, tmp_path):
    train(1, tiny_shards, tmp_path)

    with pytest.raises(ConfigMismatch, match="seed was 1, is 5"):
        train(2, tiny_shards, tmp_path, seed=5)


def test_a_killed_worker_is_replaced_and_the_run_ends_the_same(ray_here, tiny_shards, tmp_path):
    expected = train(2, tiny_shards, tmp_path / "a", **LONGER)
    killed = []

    def kill_one() -> None:
        while not (tmp_path / "b/run/step=0000000010/manifest.json").exists():  # the test's own time-out ends this
            time.sleep(0.01)
        for process in Path("/proc").iterdir():
            if not process.name.isdigit() or killed:
                continue
            try:
                command = (process / "cmdline").read_bytes().replace(b"\0", b" ")
                # whoever holds the lock of this very run is its first worker
                held = any(fd.readlink() == tmp_path / "b/run/lock" for fd in (process / "fd").iterdir())
            except OSError:
                continue
            if held and b"ray::" in command:
                os.kill(int(process.name), signal.SIGKILL)
                killed.append(process.name)

    threading.Thread(target=kill_one, daemon=True).start()
    found = train(2, tiny_shards, tmp_path / "b", **LONGER)

    assert killed, "the fault never fired"
    assert [values["loss/xlco"].hex() for _, values in found] == [values["loss/xlco"].hex() for _, values in expected]

"""Training on real Ray workers gives the losses of one process, and a killed worker is replaced."""

import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from components.adapters.ray import train
from components.settings import environment
from infoxlm_core.config import PretrainingConfig
from infoxlm_core.errors import ConfigMismatch, WorkerLost
from infoxlm_core.stages.pretraining import pretrain
from infoxlm_core.training import tracker
from tests.components.conftest import LONGER, kill_first_worker, losses
from tests.toys.pretraining import tiny_config

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def train_infoxlm(workers: int, shards: Path, base: Path, work=pretrain, **changes) -> list[tuple[int, dict]]:
    config = tiny_config(**changes)
    start = functools.partial(train.run, work, workers) if workers else work
    start(config=config, shards_path=shards, output=base / "out", run=base / "run")
    return tracker.read(base / "run" / tracker.METRICS)


def train_and_go_on_with_another_seed(config: PretrainingConfig, **arguments) -> dict:
    torch.set_default_dtype(torch.float64)
    pretrain(config=config, **arguments)
    return pretrain(config=tiny_config(seed=5), **arguments)


@pytest.mark.item("A3", "A11")
def test_four_workers_give_the_losses_of_none_and_an_error_of_ours_comes_back_as_itself_without_retries(
    ray_here, tiny_shards, tmp_path, in_fp64, record_property
):
    none = train_infoxlm(0, tiny_shards, tmp_path / "0")

    with pytest.raises(ConfigMismatch, match="seed was 1, is 5"):
        train_infoxlm(4, tiny_shards, tmp_path / "4", train_and_go_on_with_another_seed)

    four = tracker.read(tmp_path / "4/run" / tracker.METRICS)
    found, expected = ([float.fromhex(value) for value in losses(points)] for points in (four, none))
    off = max(abs(a / b - 1) for a, b in zip(found, expected, strict=True))
    record_property("figure", f"losses on Ray workers within {off:.1e}")
    assert off <= 1e-9
    assert (tmp_path / "4/out/encoder/model.safetensors").exists()


@pytest.mark.parametrize(("there", "expected"), [(64, 64), (63, 63), (56, 56), (8, 8), (7, None)])
def test_of_64_workers_as_many_go_on_as_there_are_places_for_and_few_numbers_are_tried(monkeypatch, there, expected):
    asked: list[int] = []

    def group(bundles: list[dict[str, float]]) -> SimpleNamespace:
        asked.append(len(bundles))
        return SimpleNamespace(wait=lambda _: len(bundles) <= there)

    monkeypatch.setattr("ray.util.placement_group", group)
    monkeypatch.setattr("ray.util.remove_placement_group", lambda _: None)

    if expected is None:
        with pytest.raises(WorkerLost, match=r"fewer than 8 of 64 workers can start \(ray.min_workers\)"):
            train._count_available_workers(64, 8, "GPU")
    else:
        assert train._count_available_workers(64, 8, "GPU") == expected
    assert asked[0] == 64 and len(asked) <= 7


@pytest.mark.item("S07")
def test_workers_know_the_tracker_and_its_run_but_no_secret(monkeypatch):
    for name in ("INFOXLM_TRACKER", "MLFLOW_RUN_ID", "MLFLOW_TRACKING_PASSWORD", "HOME"):
        monkeypatch.setenv(name, f"the {name}")

    known = train._make_worker_environment()

    assert known["INFOXLM_TRACKER"] == "the INFOXLM_TRACKER" and known["MLFLOW_RUN_ID"] == "the MLFLOW_RUN_ID"
    assert not {"MLFLOW_TRACKING_PASSWORD", "HOME"} & set(known)


def test_workers_allocate_gpu_memory_in_segments_that_grow_unless_the_user_says_otherwise(monkeypatch):
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    assert train._make_worker_environment()["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"

    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "backend:cudaMallocAsync")
    assert train._make_worker_environment()["PYTORCH_ALLOC_CONF"] == "backend:cudaMallocAsync"


@pytest.mark.item("F01", "F03")
def test_a_killed_worker_is_replaced_and_a_killed_controller_ends_the_call_with_75_and_the_same_call_goes_on(
    ray_here, undisturbed, tiny_shards, tmp_path
):
    worker = kill_first_worker(tmp_path / "run")
    controller = kill_first_worker(tmp_path / "run", instead=b"ray::TrainController", after=20)

    with pytest.raises(WorkerLost, match="run again to continue") as lost:
        train_infoxlm(2, tiny_shards, tmp_path, **LONGER)
    saved = max(path.name for path in (tmp_path / "run").glob("step=*"))
    found = train_infoxlm(2, tiny_shards, tmp_path, **LONGER)

    assert worker and controller and lost.value.exit_code == 75, "the fault never fired"
    assert "step=0000000020" <= saved < "step=0000000060"
    assert losses(found) == losses(tracker.read(undisturbed / tracker.METRICS))


def wait(run: Path) -> dict:
    time.sleep(60)
    return {}


def train_with_too_little_memory(run: Path) -> tuple[str, str]:
    """Train on a Ray that may use a thousandth of this machine's memory; return class and message of the error."""
    os.environ |= {"RAY_memory_usage_threshold": "0.001", "RAY_memory_monitor_refresh_ms": "100"}
    os.environ |= {"RAY_TMPDIR": tempfile.mkdtemp(prefix="raym-", dir="/tmp")}  # names of sockets must be short
    os.environ.pop("RAY_ADDRESS", None)
    try:
        train.run(wait, 1, run=run)
    except Exception as error:
        return type(error).__name__, str(error)
    finally:
        shutil.rmtree(os.environ["RAY_TMPDIR"], ignore_errors=True)
    return "", "it trained"


def test_a_worker_that_ray_kills_for_its_memory_is_reported_with_what_it_used_and_the_setting_to_raise(tmp_path):
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        name, message = pool.submit(train_with_too_little_memory, tmp_path / "run").result()

    assert name == "OutOfMemory"
    figures = r"\([\d.]+GB used of [\d.]+GB\)"
    assert re.fullmatch(rf".*/run: a worker ran out of memory {figures}: raise pool.memory, .* to continue", message)


INIT_CONTAINER_MEMORY = 256 << 20  # bytes, the limit that KubeRay gives to its init container
HEALTH_CHECK = """
import atexit, pathlib, sys
from ray.scripts.scripts import main
atexit.register(lambda: print(pathlib.Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]))
sys.argv = ["ray", "health-check", "--address", sys.argv[1]]
main()
"""
"""The command `ray health-check`, which prints its peak resident memory in KiB at its end."""


def test_the_health_check_of_kuberay_fits_into_its_init_container(ray_here, record_property):
    """KubeRay starts `ray health-check` in our image before each worker, in a container with a limit of 256 MiB."""
    import ray

    known = {name: os.environ[name] for name in ("PATH", "HOME")} | environment.RAY | {"RAY_AUTH_MODE": "token"}
    command = [sys.executable, "-c", HEALTH_CHECK, ray.get_runtime_context().gcs_address]

    result = subprocess.run(command, env=known, capture_output=True, text=True, check=True, timeout=60)

    peak = int(result.stdout.split()[-1]) * 1024
    record_property("figure", f"`ray health-check` used {peak / 1e6:.0f} MB")
    assert 50 << 20 < peak < INIT_CONTAINER_MEMORY

"""Training on real Ray workers has the losses of one process, and survives killed processes."""

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

pytestmark = pytest.mark.slow


def train_infoxlm(num_workers: int, shards: Path, base: Path, work=pretrain, **changes) -> list[tuple[int, dict]]:
    """Train on Ray workers, or with 0 workers in this process. Return the curve."""
    config = tiny_config(**changes)
    start = functools.partial(train.launch_training, work, num_workers) if num_workers else work
    start(config=config, shards_path=shards, output=base / "out", run=base / "run")
    return tracker.read(base / "run" / tracker.METRICS)


def train_twice_with_different_seeds(config: PretrainingConfig, **arguments) -> dict:
    torch.set_default_dtype(torch.float64)
    pretrain(config=config, **arguments)
    return pretrain(config=tiny_config(seed=5), **arguments)


@pytest.mark.item("A3", "A11")
def test_four_workers_have_the_losses_of_one_process_and_report_their_error(
    ray_here, tiny_shards, tmp_path, in_fp64, record_property
):
    expected_points = train_infoxlm(0, tiny_shards, tmp_path / "0")

    with pytest.raises(ConfigMismatch, match="seed was 1, is 5"):
        train_infoxlm(4, tiny_shards, tmp_path / "4", train_twice_with_different_seeds)

    points = tracker.read(tmp_path / "4/run" / tracker.METRICS)
    actual_losses = torch.tensor([float.fromhex(loss) for loss in losses(points)])
    expected_losses = torch.tensor([float.fromhex(loss) for loss in losses(expected_points)])
    deviation = float((actual_losses / expected_losses - 1).abs().max())
    record_property("figure", f"losses on Ray workers within {deviation:.1e}")
    assert len(actual_losses) == len(expected_losses) > 0
    assert deviation <= 1e-9
    assert (tmp_path / "4/out/encoder/model.safetensors").exists()


@pytest.mark.parametrize(("has_recovered", "expected_workers"), [(True, 64), (False, 56)])
def test_training_continues_with_a_worker_for_each_remaining_gpu(monkeypatch, has_recovered, expected_workers):
    group = SimpleNamespace(wait=lambda _: has_recovered)
    monkeypatch.setattr("ray.util.placement_group", lambda _: group)
    monkeypatch.setattr("ray.util.remove_placement_group", lambda _: None)
    monkeypatch.setattr("ray.cluster_resources", lambda: {"GPU": 56.0})

    assert train._count_available_workers(64, 8, "GPU") == expected_workers

    if not has_recovered:
        with pytest.raises(WorkerLost, match=r"only 56 of 64 workers can start, and ray.min_workers is 60"):
            train._count_available_workers(64, 60, "GPU")


@pytest.mark.item("S07")
def test_workers_get_the_settings_of_the_tracker_but_no_secret(monkeypatch):
    for name in ("INFOXLM_TRACKER", "MLFLOW_RUN_ID", "MLFLOW_TRACKING_PASSWORD", "HOME"):
        monkeypatch.setenv(name, f"the {name}")

    variables = train._make_worker_environment()

    assert variables["INFOXLM_TRACKER"] == "the INFOXLM_TRACKER"
    assert variables["MLFLOW_RUN_ID"] == "the MLFLOW_RUN_ID"
    assert not {"MLFLOW_TRACKING_PASSWORD", "HOME"} & set(variables)


def test_user_can_change_how_workers_allocate_gpu_memory(monkeypatch):
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    assert train._make_worker_environment()["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"

    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "backend:cudaMallocAsync")
    assert train._make_worker_environment()["PYTORCH_ALLOC_CONF"] == "backend:cudaMallocAsync"


@pytest.mark.item("F01", "F03")
def test_killed_worker_is_restarted_and_a_run_with_a_killed_controller_is_resumed(
    ray_here, undisturbed, tiny_shards, tmp_path
):
    killed_workers = kill_first_worker(tmp_path / "run")
    killed_controllers = kill_first_worker(tmp_path / "run", instead=b"ray::TrainController", after=20)

    with pytest.raises(WorkerLost, match="run again to continue") as raised:
        train_infoxlm(2, tiny_shards, tmp_path, **LONGER)
    last_checkpoint = max(path.name for path in (tmp_path / "run").glob("step=*"))
    points = train_infoxlm(2, tiny_shards, tmp_path, **LONGER)

    assert killed_workers, "the fault did not occur"
    assert killed_controllers, "the fault did not occur"
    assert raised.value.exit_code == 75
    assert "step=0000000020" <= last_checkpoint < "step=0000000060"
    assert losses(points) == losses(tracker.read(undisturbed / tracker.METRICS))


def sleep_for_a_minute(run: Path) -> dict:
    time.sleep(60)
    return {}


def train_with_too_little_memory(run: Path) -> tuple[str, str]:
    """Train on a Ray that may use a thousandth of this machine's memory. Return class and message of the error."""
    os.environ |= {"RAY_memory_usage_threshold": "0.001", "RAY_memory_monitor_refresh_ms": "100"}
    os.environ |= {"RAY_TMPDIR": tempfile.mkdtemp(prefix="raym-", dir="/tmp")}  # Ray's socket paths must be short
    os.environ.pop("RAY_ADDRESS", None)
    try:
        train.launch_training(sleep_for_a_minute, 1, run=run)
    except Exception as error:
        return type(error).__name__, str(error)
    finally:
        shutil.rmtree(os.environ["RAY_TMPDIR"], ignore_errors=True)
    return "", "no error"


def test_worker_killed_for_its_memory_is_reported_with_usage_and_setting(tmp_path):
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        name, message = process.submit(train_with_too_little_memory, tmp_path / "run").result()

    assert name == "OutOfMemory"
    usage = r"\([\d.]+GB used of [\d.]+GB\)"
    assert re.fullmatch(rf".*/run: a worker ran out of memory {usage}: raise pool.memory, .* to continue", message)


INIT_CONTAINER_MEMORY = 256 << 20  # bytes, the limit of KubeRay's init container
HEALTH_CHECK = """
import atexit, pathlib, sys
from ray.scripts.scripts import main
atexit.register(lambda: print(pathlib.Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]))
sys.argv = ["ray", "health-check", "--address", sys.argv[1]]
main()
"""
"""The command `ray health-check`, which prints its peak resident memory in KiB at its end."""


def test_health_check_fits_into_the_init_container_of_kuberay(ray_here, record_property):
    """KubeRay starts `ray health-check` in our image before each worker."""
    import ray

    variables = {name: os.environ[name] for name in ("PATH", "HOME")} | environment.RAY | {"RAY_AUTH_MODE": "token"}
    command = [sys.executable, "-c", HEALTH_CHECK, ray.get_runtime_context().gcs_address]

    result = subprocess.run(command, env=variables, capture_output=True, text=True, check=True, timeout=60)

    peak_bytes = int(result.stdout.split()[-1]) * 1024
    record_property("figure", f"`ray health-check` used {peak_bytes / 1e6:.0f} MB")
    assert 50 << 20 < peak_bytes < INIT_CONTAINER_MEMORY

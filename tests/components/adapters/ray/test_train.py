"""Training on real Ray workers gives the losses of one process, and a killed worker is replaced."""

import functools
import multiprocessing
import os
import threading
import time
from pathlib import Path

import pytest
import torch

from components.adapters.ray import train as ray_train
from infoxlm_core.errors import ConfigMismatch
from infoxlm_core.stages.pretraining import pretrain
from infoxlm_core.training import tracker
from tests.components.conftest import kill_first_worker
from tests.conftest import tiny_config

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
LONGER = {"optimization": {"steps": 60}, "checkpoints": {"every": 5}}


def train(workers: int, shards: Path, base: Path, work=pretrain, **changes) -> list[tuple[int, dict]]:
    config = tiny_config(**changes)
    start = functools.partial(ray_train.run, work, workers) if workers else work
    start(config=config, shards_path=shards, output=base / "out", run=base / "run")
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


def test_workers_know_the_tracker_and_its_run_but_no_secret(monkeypatch):
    for name in ("INFOXLM_TRACKER", "MLFLOW_RUN_ID", "MLFLOW_TRACKING_PASSWORD", "HOME"):
        monkeypatch.setenv(name, f"the {name}")

    known = ray_train._variables()

    assert known["INFOXLM_TRACKER"] == "the INFOXLM_TRACKER" and known["MLFLOW_RUN_ID"] == "the MLFLOW_RUN_ID"
    assert not {"MLFLOW_TRACKING_PASSWORD", "HOME"} & set(known)


def test_workers_allocate_gpu_memory_in_segments_that_grow_unless_the_user_says_otherwise(monkeypatch):
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    assert ray_train._variables()["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"

    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "backend:cudaMallocAsync")
    assert ray_train._variables()["PYTORCH_ALLOC_CONF"] == "backend:cudaMallocAsync"


def test_an_error_of_ours_comes_back_as_itself_without_retries(ray_here, tiny_shards, tmp_path):
    train(1, tiny_shards, tmp_path)

    with pytest.raises(ConfigMismatch, match="seed was 1, is 5"):
        train(2, tiny_shards, tmp_path, seed=5)


def test_a_killed_worker_is_replaced_and_the_run_ends_the_same(ray_here, tiny_shards, tmp_path):
    expected = train(2, tiny_shards, tmp_path / "a", **LONGER)
    killed = kill_first_worker(tmp_path / "b/run")
    found = train(2, tiny_shards, tmp_path / "b", **LONGER)

    assert killed, "the fault never fired"
    assert [values["loss/xlco"].hex() for _, values in found] == [values["loss/xlco"].hex() for _, values in expected]


def in_double(**arguments) -> dict:
    torch.set_default_dtype(torch.float64)
    return pretrain(**arguments)


def lose_a_node(shards: Path, base: Path) -> None:
    """Train on two workers, each on a node of its own, of which one is lost after step 10; a process of its own."""
    import ray
    from ray.cluster_utils import Cluster

    ray_train._SECONDS_FOR_ALL, ray_train._SECONDS_FOR_SOME = 5.0, 300.0
    for name, value in (("initial_delay_ms", "1000"), ("period_ms", "500"), ("failure_threshold", "4")):
        os.environ[f"RAY_health_check_{name}"] = value  # by default a dead node is noticed after 20 seconds
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    spot = cluster.add_node(num_cpus=1)
    ray.init(address=cluster.address, runtime_env={"env_vars": ray_train._variables()})

    def lose() -> None:
        while not (base / "run/step=0000000010/manifest.json").exists():
            time.sleep(0.01)
        cluster.remove_node(spot, allow_graceful=False)
        (base / "lost").touch()

    threading.Thread(target=lose, daemon=True).start()
    train(0, shards, base, functools.partial(ray_train.run, in_double, 2, min_workers=1), **LONGER)
    ray.shutdown()
    cluster.shutdown()


def test_a_training_goes_on_with_fewer_workers_when_a_node_is_lost(tiny_shards, tmp_path, in_fp64):
    expected = train(0, tiny_shards, tmp_path / "a", in_double, **LONGER)
    child = multiprocessing.get_context("spawn").Process(target=lose_a_node, args=(tiny_shards, tmp_path / "b"))

    child.start()
    child.join()

    assert child.exitcode == 0 and (tmp_path / "b/lost").exists(), "the fault never fired"
    found = tracker.read(tmp_path / "b/run" / tracker.METRICS)
    assert len(found) == len(expected)
    assert losses(found) == pytest.approx(losses(expected), rel=1e-9)

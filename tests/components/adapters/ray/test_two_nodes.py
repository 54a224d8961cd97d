"""Training on two Ray nodes continues on one of them after the other is lost.

The cluster and its driver run in their own process, so that no other Ray of this machine joins them.
"""

import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch

from components.adapters.ray import train
from infoxlm_core.stages.pretraining import pretrain
from infoxlm_core.training import tracker
from tests.components.conftest import LONGER, losses
from tests.toys.pretraining import tiny_config

pytestmark = pytest.mark.slow
LAST_STEP = 10
"""The node is lost after the checkpoint of this step."""


@contextmanager
def cluster_of_two_nodes() -> Iterator[Any]:
    """Start a head without CPU cores and two nodes with one core each, on loopback, with a token."""
    folder = tempfile.mkdtemp(prefix="ray2-", dir="/tmp")  # Ray's socket paths must be short
    os.environ |= {
        "RAY_TMPDIR": folder,  # also for the file with the address of the cluster, which only this process may read
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_health_check_initial_delay_ms": "1000",
        "RAY_health_check_period_ms": "500",
        "RAY_health_check_failure_threshold": "4",
    }
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=1)
        os.environ["RAY_ADDRESS"] = cluster.address
        yield cluster
    finally:
        cluster.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def pretrain_and_record_node(run: Path, **arguments: Any) -> dict:
    """Write the node of this worker to a file of the run, then train in fp64."""
    import ray
    import ray.train

    node_id = ray.get_runtime_context().get_node_id()
    rank = ray.train.get_context().get_world_rank()
    (run / f"rank-{rank}-{time.time_ns()}").write_text(node_id)
    torch.set_default_dtype(torch.float64)
    return pretrain(run=run, **arguments)


def start_training(shards: Path, base: Path) -> None:
    (base / "run").mkdir()
    arguments = {"config": tiny_config(**LONGER), "shards_path": shards, "output": base / "out"}
    train.launch_training(pretrain_and_record_node, 2, run=base / "run", min_workers=1, **arguments)


def kill_a_node(cluster: Any, training: Future[None], run: Path) -> str:
    """Wait for the checkpoint of `LAST_STEP`, kill all processes of one node, and return the node's id."""
    import ray

    while not (run / f"step={LAST_STEP:010}" / "manifest.json").exists():
        assert not training.done(), training.result()
        time.sleep(0.01)
    drivers_node_id = ray.get_runtime_context().get_node_id()
    node = next(node for node in cluster.worker_nodes if node.node_id != drivers_node_id)
    cluster.remove_node(node, allow_graceful=False)
    return node.node_id


def train_and_kill_a_node(shards: Path, base: Path) -> str:
    """Train on two nodes of a new cluster, kill one of them, and return its id."""
    train._ALL_WORKERS_SECONDS = 5.0  # longer than Ray needs here to notice the lost node
    with cluster_of_two_nodes() as cluster, ThreadPoolExecutor(1) as driver:
        training = driver.submit(start_training, shards, base)
        lost_node_id = kill_a_node(cluster, training, base / "run")
        training.result()
    return lost_node_id


def read_node_ids(run: Path) -> list[str]:
    """Return the nodes of all workers in the order in which the workers started."""
    files = sorted(run.glob("rank-*"), key=lambda path: path.name.rpartition("-")[2])
    return [path.read_text() for path in files]


@pytest.mark.item("F01")
def test_training_that_loses_one_of_two_nodes_continues_on_the_other(tiny_shards, tmp_path, in_fp64):
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        lost_node_id = process.submit(train_and_kill_a_node, tiny_shards, tmp_path).result()
    pretrain(tiny_config(**LONGER), tiny_shards, tmp_path / "alone/out", tmp_path / "alone/run")

    node_ids = read_node_ids(tmp_path / "run")
    first_node_ids, later_node_ids = set(node_ids[:2]), set(node_ids[2:])
    assert len(first_node_ids) == 2
    assert later_node_ids == first_node_ids - {lost_node_id}
    points = tracker.read(tmp_path / "run" / tracker.METRICS)
    expected_points = tracker.read(tmp_path / "alone/run" / tracker.METRICS)
    assert len(points) == 60
    actual_losses = [float.fromhex(loss) for loss in losses(points)]
    expected_losses = [float.fromhex(loss) for loss in losses(expected_points)]
    assert actual_losses == pytest.approx(expected_losses, rel=1e-9)

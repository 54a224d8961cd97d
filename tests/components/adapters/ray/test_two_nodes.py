"""Training on two Ray nodes, joined by RAY_ADDRESS, outlives the loss of one of them.

The cluster and its driver live in a process of their own, so that no other Ray of this machine meets them.
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

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
LOST_AFTER = 10
"""Step of the checkpoint after which a node is lost."""


@contextmanager
def cluster_of_two() -> Iterator[Any]:
    """A head without a core to work on and two nodes with one core each, on loopback, with a token."""
    folder = tempfile.mkdtemp(prefix="ray2-", dir="/tmp")  # names of sockets must be short
    os.environ |= {
        "RAY_TMPDIR": folder,  # also for the file that says where a cluster is: only this process reads it
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


def pretrain_where(run: Path, **arguments: Any) -> dict:
    """Note on which node this worker is, then train."""
    import ray
    import ray.train

    node, rank = ray.get_runtime_context().get_node_id(), ray.train.get_context().get_world_rank()
    (run / f"rank-{rank}-{time.time_ns()}").write_text(node)
    return pretrain(run=run, **arguments)


def in_double(**arguments: Any) -> dict:
    torch.set_default_dtype(torch.float64)
    return pretrain_where(**arguments)


def train_infoxlm(shards: Path, base: Path) -> None:
    (base / "run").mkdir()  # as the launcher does
    given = {"config": tiny_config(**LONGER), "shards_path": shards, "output": base / "out", "run": base / "run"}
    train.run(in_double, 2, min_workers=1, **given)


def lose_a_node(cluster: Any, run: Path, training: Future[None]) -> str:
    """When the training is on its way, kill all processes of one node; return its id."""
    import ray

    while not (run / f"step={LOST_AFTER:010}" / "manifest.json").exists():
        assert not training.done(), training.result()
        time.sleep(0.01)
    drivers = ray.get_runtime_context().get_node_id()  # any node of this host; it stays, as a head does
    node = next(node for node in cluster.worker_nodes if node.node_id != drivers)
    cluster.remove_node(node, allow_graceful=False)
    return node.node_id


def train_and_lose_a_node(shards: Path, base: Path) -> str:
    """Train on two nodes, and lose one of them; return its id. Runs in a process of its own."""
    train._ALL_WORKERS_SECONDS = 5.0
    with cluster_of_two() as cluster, ThreadPoolExecutor(1) as driver:
        training = driver.submit(train_infoxlm, shards, base)
        lost_node = lose_a_node(cluster, base / "run", training)
        training.result()
    return lost_node


def nodes(run: Path) -> list[str]:
    """The nodes of the workers, in the order in which they began."""
    return [path.read_text() for path in sorted(run.glob("rank-*"), key=lambda path: path.name.rpartition("-")[2])]


@pytest.mark.item("F01")
def test_a_run_that_loses_one_of_two_nodes_goes_on_with_the_other_alone(tiny_shards, tmp_path, in_fp64):
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        lost_node = pool.submit(train_and_lose_a_node, tiny_shards, tmp_path).result()
    pretrain(tiny_config(**LONGER), tiny_shards, tmp_path / "alone/out", tmp_path / "alone/run")

    worker_nodes = nodes(tmp_path / "run")
    assert len(set(worker_nodes[:2])) == 2 and lost_node in worker_nodes[:2], "the fault never fired"
    assert {lost_node, *worker_nodes[2:]} == set(worker_nodes[:2]) and lost_node not in worker_nodes[2:]
    expected, found = (tracker.read(run / tracker.METRICS) for run in (tmp_path / "alone/run", tmp_path / "run"))
    values = [[float.fromhex(value) for value in losses(points)] for points in (found, expected)]
    assert len(found) == 60 and values[0] == pytest.approx(values[1], rel=1e-9)

"""Training on two Ray nodes, joined by RAY_ADDRESS, outlives one of them: with a new node it ends the same.

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

from components.adapters.ray import train as ray_train
from infoxlm_core.stages.pretraining import pretrain
from infoxlm_core.training import tracker
from tests.conftest import tiny_config

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
STEPS, EVERY, LOST_AFTER = 60, 5, 10
RUNS = ("undisturbed", "disturbed")


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

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
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
    from ray import train

    node, rank = ray.get_runtime_context().get_node_id(), train.get_context().get_world_rank()
    (run / f"rank-{rank}-{time.time_ns()}").write_text(node)
    return pretrain(run=run, **arguments)


def train(shards: Path, base: Path) -> None:
    config = tiny_config(optimization={"steps": STEPS}, checkpoints={"every": EVERY})
    (base / "run").mkdir(parents=True)  # as the launcher does
    ray_train.run(pretrain_where, 2, config=config, shards_path=shards, output=base / "out", run=base / "run")


def lose_a_node(cluster: Any, run: Path, training: Future[None]) -> str:
    """When the training is on its way: kill all processes of one node, and bring a new one; return which was lost."""
    import ray

    while not (run / f"step={LOST_AFTER:010}" / "manifest.json").exists():
        assert not training.done(), training.result()
        time.sleep(0.01)
    drivers = ray.get_runtime_context().get_node_id()  # any node of this host; it stays, as a head does
    node = next(node for node in cluster.worker_nodes if node.node_id != drivers)
    cluster.remove_node(node, allow_graceful=False)
    cluster.add_node(num_cpus=1)
    return node.node_id


def both(shards: Path, base: Path) -> str:
    """Train undisturbed, and with the loss of a node; return the node lost. Runs in a process of its own."""
    undisturbed, disturbed = (base / name for name in RUNS)
    with cluster_of_two() as cluster, ThreadPoolExecutor(1) as driver:  # nodes are added in the main thread only
        driver.submit(train, shards, undisturbed).result()
        training = driver.submit(train, shards, disturbed)
        lost = lose_a_node(cluster, disturbed / "run", training)
        training.result()
    return lost


def losses(run: Path) -> list[tuple[int, str, str]]:
    return [
        (step, name, values[name].hex())
        for step, values in tracker.read(run / tracker.METRICS)
        for name in ("loss/mlm", "loss/tlm", "loss/xlco")
    ]


def test_a_run_on_two_nodes_loses_one_and_ends_with_the_same_losses(tiny_shards, tmp_path):
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        lost = pool.submit(both, tiny_shards, tmp_path).result()

    nodes = {name: [path.read_text() for path in sorted((tmp_path / name / "run").glob("rank-*"))] for name in RUNS}
    assert len(set(nodes["undisturbed"])) == 2, "both workers were on one node"
    assert lost in nodes["disturbed"] and len(set(nodes["disturbed"])) == 3, "the fault never fired"
    expected, found = (losses(tmp_path / name / "run") for name in RUNS)
    assert len(expected) == 3 * STEPS
    assert found == expected

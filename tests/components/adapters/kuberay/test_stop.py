"""Stopping a job: Ray's job server on the head gives the training as much time to save as our manifest says."""

import os
import secrets
import shutil
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from components.adapters.kuberay.manifest import render
from components.adapters.ray import train
from components.settings.cluster import ClusterConfig
from infoxlm_core.training import workers
from tests.servers.processes import free_port, until

pytestmark = pytest.mark.slow
SAVE_SECONDS = 8
"""Longer than the 3 seconds for which Ray waits by default."""


def save_slowly(run: Path) -> dict[str, float]:
    """Act as a worker that trains until RUN/stop exists, and then takes `SAVE_SECONDS` to save."""
    (run / "training").touch()
    while not (run / "stop").exists():
        time.sleep(0.05)
    time.sleep(SAVE_SECONDS)
    (run / "saved").touch()
    return {}


def train_with_worker(run: Path) -> None:
    """Act as the driver of a job, with one Ray worker."""
    run.mkdir(parents=True)
    with workers.stop_training_on_signals(run):
        train.launch_training(save_slowly, 1, run=run)


def train_without_worker(run: Path) -> None:
    """Train in the driver. That is sufficient to show that Ray kills a driver after its default time."""
    run.mkdir(parents=True)
    with workers.stop_training_on_signals(run):
        save_slowly(run)


def submit(client: Any, entrypoint: str, runtime_env: dict) -> str:
    """Submit a job when the agent of the cluster, which starts after the cluster, accepts jobs."""
    deadline = time.monotonic() + 120
    while True:
        try:
            return client.submit_job(entrypoint=entrypoint, runtime_env=runtime_env)
        except RuntimeError as error:
            if "No available agent" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.5)


def stop_two_jobs(base: Path, head_variables: dict[str, str]) -> None:
    """Start a Ray head with the variables of our manifest, and stop a job of ours and one with Ray's default."""
    folder = tempfile.mkdtemp(prefix="rayj-", dir="/tmp")  # Ray's socket paths must be short
    os.environ |= {
        "RAY_TMPDIR": folder,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        **head_variables,
    }
    from ray.cluster_utils import Cluster
    from ray.job_submission import JobStatus, JobSubmissionClient

    # By default, the agents of all Rays of a machine use the same port.
    ports = {"dashboard_port": free_port(), "dashboard_agent_listen_port": free_port()}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 3, "include_dashboard": True, **ports})
    try:
        client = JobSubmissionClient(f"http://127.0.0.1:{ports['dashboard_port']}")
        default_variables = {"RAY_JOB_STOP_WAIT_TIME_S": "3"}
        job_ids = []
        for name, driver, variables in (
            ("ours", "train_with_worker", {}),
            ("default", "train_without_worker", default_variables),
        ):
            code = f"from tests.components.adapters.kuberay.test_stop import *; {driver}(Path({str(base / name)!r}))"
            job_ids.append(submit(client, f'{sys.executable} -c "{code}"', {"env_vars": variables}))
        until(lambda: (base / "ours/training").exists() and (base / "default/training").exists())

        for job_id in job_ids:
            client.stop_job(job_id)  # KubeRay's finalizer sends the same request

        until(lambda: all(client.get_job_status(job_id) == JobStatus.STOPPED for job_id in job_ids))
    finally:
        cluster.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def test_stopped_job_has_the_grace_period_of_the_manifest_to_save(tmp_path):
    settings = {"image": f"registry.example/infoxlm@sha256:{'1' * 64}", "grace_seconds": 60}
    cluster = ClusterConfig.parse(settings, "cluster")
    rendered = render("j-toy", "s3://infoxlm/store/work/j-toy.json", cluster, 1, [], version("ray"), {})
    [head] = rendered["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"]
    variables = {entry["name"]: entry["value"] for entry in head["env"] if entry["name"].startswith("RAY_JOB_STOP")}

    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        process.submit(stop_two_jobs, tmp_path, variables).result()

    assert (tmp_path / "ours/saved").exists()
    assert not (tmp_path / "default/saved").exists(), "Ray waits that long by default, so this test proves nothing"

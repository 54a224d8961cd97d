"""Deleting a RayJob: KubeRay stops the job on the head, and Ray's own job server gives the training time to save."""

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

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
SAVES_FOR = 8
"""Seconds: longer than the three that Ray leaves a job by default."""


def save_slowly(run: Path) -> dict[str, float]:
    """The body of a worker: train until the driver has left a note; then save for a while."""
    (run / "training").touch()
    while not (run / "stop").exists():
        time.sleep(0.05)
    time.sleep(SAVES_FOR)
    (run / "saved").touch()
    return {}


def drive(run: Path) -> None:
    """The entrypoint of the job, as `components.platform.job` is one."""
    run.mkdir(parents=True)
    with workers.stopping_on_signals(run):
        train.run(save_slowly, 1, run=run)


def drive_here(run: Path) -> None:
    """One that trains without workers: to show what Ray does to a job that says nothing, one is enough."""
    run.mkdir(parents=True)
    with workers.stopping_on_signals(run):
        save_slowly(run)


def submit(client: Any, entrypoint: str, runtime_env: dict) -> str:
    """Submit a job, as soon as the cluster's agent, which starts after it, takes one."""
    deadline = time.monotonic() + 120
    while True:
        try:
            return client.submit_job(entrypoint=entrypoint, runtime_env=runtime_env)
        except RuntimeError as error:
            if "No available agent" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.5)


def stop_two_jobs(base: Path, head: dict[str, str]) -> None:
    """Start a cluster that has the environment of our head; submit and stop a job as KubeRay does, and one as usual."""
    folder = tempfile.mkdtemp(prefix="rayj-", dir="/tmp")  # names of sockets must be short
    os.environ |= {
        "RAY_TMPDIR": folder,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        **head,
    }
    from ray.cluster_utils import Cluster
    from ray.job_submission import JobStatus, JobSubmissionClient

    # The agent that takes jobs has the same port on every Ray, unless it is told another: a second one would wait.
    ports = {"dashboard_port": free_port(), "dashboard_agent_listen_port": free_port()}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 3, "include_dashboard": True, **ports})
    try:
        client = JobSubmissionClient(f"http://127.0.0.1:{ports['dashboard_port']}")
        submitted = {}
        usual = {"RAY_JOB_STOP_WAIT_TIME_S": "3"}
        for name, main, variables in (("ours", "drive", {}), ("as-usual", "drive_here", usual)):
            script = f"from tests.components.adapters.kuberay.test_stop import *; {main}(Path({str(base / name)!r}))"
            entrypoint = f'{sys.executable} -c "{script}"'
            submitted[name] = submit(client, entrypoint, {"env_vars": variables})
        until(lambda: all((base / name / "training").exists() for name in submitted), 120)

        for job in submitted.values():
            client.stop_job(job)  # POST /api/jobs/ID/stop: what KubeRay's finalizer calls

        until(lambda: all(client.get_job_status(job) == JobStatus.STOPPED for job in submitted.values()), 120)
    finally:
        cluster.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def test_a_training_whose_job_is_stopped_saves_although_that_takes_longer_than_ray_waits_by_default(tmp_path):
    cluster = ClusterConfig.parse(
        {"image": f"registry.example/infoxlm@sha256:{'1' * 64}", "grace_seconds": 60}, "cluster"
    )
    job = render("j-toy", "s3://infoxlm/store/work/j-toy.json", cluster, 1, [], version("ray"), {})
    [head] = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"]
    ours = {entry["name"]: entry.get("value") for entry in head["env"]}
    head = {name: value for name, value in ours.items() if name.startswith("RAY_JOB_STOP")}

    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        pool.submit(stop_two_jobs, tmp_path, head).result()

    assert (tmp_path / "ours/saved").exists()
    assert not (tmp_path / "as-usual/saved").exists(), "nothing was shown: Ray waits that long by itself"

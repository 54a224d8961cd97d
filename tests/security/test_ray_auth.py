"""Ray requires a token, whether this machine or KubeRay starts it: without the token, nobody can run anything."""

import json
import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from components.adapters.kuberay import manifest as ray_job_manifest
from components.settings.cluster import ClusterConfig
from tests.servers.processes import free_port

pytestmark = pytest.mark.slow
TOKEN = "a" * 64
RAY_START = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block"]

LOCAL_DRIVER = """
import sys
from components.adapters.ray import train
train.start_ray(1)
import ray
print(ray.init(ignore_reinit_error=True).dashboard_url, ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
"""
JOIN_PROGRAM = "import ray, sys; ray.init(sys.argv[1]); print('inside')"


@dataclass(frozen=True)
class Head:
    """A running head of a Ray cluster."""

    dashboard: str  # URL
    cluster: str  # HOST:PORT to which drivers and nodes connect
    token: str


def environment(home: Path, **variables: str) -> dict[str, str]:
    """Return the environment of a user without a token and without settings of Ray, but with these variables."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return inherited | {"HOME": str(home), "RAY_USAGE_STATS_ENABLED": "0"} | variables


def request_status(url: str, token: str | None = None, method: str = "GET", body: dict | None = None) -> int:
    """Send a request to the dashboard and return the status of the answer."""
    headers = {"Content-Type": "application/json"}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers, method=method), timeout=30) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


def can_join(head: Head, home: Path, **authentication: str) -> bool:
    """Return whether a driver with this authentication can connect to the cluster."""
    variables = environment(home, RAY_NUM_REDIS_GET_RETRIES="1", **authentication)
    command = [sys.executable, "-c", JOIN_PROGRAM, head.cluster]
    result = subprocess.run(command, env=variables, capture_output=True, timeout=60)
    return b"inside" in result.stdout


def environment_of_head_pod() -> dict[str, str]:
    """Return the environment of the head pod in our RayJob. Check that all pods of the job require a token."""
    cluster = ClusterConfig(image="registry.example/infoxlm@sha256:" + 64 * "0")
    spec = ray_job_manifest.render("j", "s3://b/work/j.json", cluster, 1, [], "2.60.0", environment={})["spec"]
    ray = spec["rayClusterSpec"]
    groups = [ray["headGroupSpec"], *ray["workerGroupSpecs"]]
    templates = [*(group["template"] for group in groups), spec["submitterPodTemplate"]]
    environments = []
    for template in templates:
        variables = template["spec"]["containers"][0]["env"]
        environments.append({variable["name"]: variable.get("value", "") for variable in variables})
    assert all(variables["RAY_AUTH_MODE"] == "token" for variables in environments)
    return environments[0]


@contextmanager
def local_cluster(home: Path) -> Iterator[Head]:
    """Start the cluster that a training starts on this machine."""
    command = [sys.executable, "-c", LOCAL_DRIVER]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, env=environment(home), text=True, **pipes) as driver:
        dashboard, cluster = driver.stdout.readline().split()
        yield Head(f"http://{dashboard}", cluster, (home / ".ray/auth_token").read_text())
        driver.stdin.close()


@contextmanager
def kuberay_cluster(home: Path) -> Iterator[Head]:
    """Start a head as KubeRay does for our RayJob, with the token of its Secret. Only the dashboard is on loopback."""
    ports = {"port": free_port(), "dashboard-port": free_port(), "dashboard-agent-grpc-port": free_port()}
    ports |= {"dashboard-agent-listen-port": free_port(), "metrics-export-port": free_port()}
    command = [*RAY_START, "--dashboard-host=127.0.0.1", "--num-cpus=0", f"--temp-dir={home}/r"]
    command += [f"--{name}={port}" for name, port in ports.items()]
    variables = environment(home, **environment_of_head_pod() | {"HOME": str(home), "RAY_AUTH_TOKEN": TOKEN})
    head = subprocess.Popen(command, env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        dashboard = f"http://127.0.0.1:{ports['dashboard-port']}"
        _wait_for_jobs(dashboard, head)
        yield Head(dashboard, f"127.0.0.1:{ports['port']}", TOKEN)
    finally:
        head.send_signal(signal.SIGTERM)  # the head then stops all its processes
        head.wait(timeout=60)


def _wait_for_jobs(dashboard: str, head: subprocess.Popen) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and head.poll() is None:
        try:
            if request_status(f"{dashboard}/api/jobs/", TOKEN) == 200:
                return
        except OSError:
            pass
        time.sleep(0.2)
    raise RuntimeError(f"the head does not answer; exit code {head.poll()}")


@pytest.fixture
def home() -> Iterator[Path]:
    """Return a home directory with a short path, because the length of the paths of sockets in it is limited."""
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as name:
        yield Path(name)


@pytest.mark.item("S02")
@pytest.mark.parametrize("start_cluster", [local_cluster, kuberay_cluster])
def test_without_the_token_nobody_can_read_run_jobs_or_join(start_cluster, tmp_path, home):
    job = {"entrypoint": f"touch {tmp_path}/marker"}
    with start_cluster(home) as head:
        for path in ("/api/jobs/", "/api/version", "/nodes?view=summary", "/api/v0/actors", "/logs?glob=*"):
            assert request_status(head.dashboard + path) == 401, path
            assert request_status(head.dashboard + path, "b" * 64) == 403, path
        assert request_status(f"{head.dashboard}/api/jobs/", method="POST", body=job) == 401
        assert request_status(f"{head.dashboard}/api/jobs/", "b" * 64, "POST", job) == 403
        assert request_status(f"{head.dashboard}/api/jobs/", head.token) == 200
        if start_cluster is kuberay_cluster:  # its other ports are open to the network
            assert not can_join(head, tmp_path, RAY_AUTH_MODE="disabled")
            assert can_join(head, tmp_path, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=head.token)

        assert len(head.token) == 64
        assert head.dashboard.startswith("http://127.0.0.1:")
        if start_cluster is local_cluster:
            assert stat.S_IMODE((home / ".ray/auth_token").stat().st_mode) == 0o600
    assert not (tmp_path / "marker").exists()


@pytest.mark.item("S02")
def test_a_head_without_a_token_does_not_start(tmp_path):
    variables = environment(tmp_path, **environment_of_head_pod() | {"HOME": str(tmp_path)})

    result = subprocess.run([*RAY_START, f"--port={free_port()}"], env=variables, capture_output=True, text=True)

    assert result.returncode != 0
    assert "no authentication token was found" in result.stdout + result.stderr

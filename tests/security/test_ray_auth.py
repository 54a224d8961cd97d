"""Ray as we start it, on this machine and as KubeRay does on a cluster: whoever has not the token runs nothing."""

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

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
TOKEN = "a" * 64
RAY_START = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block"]

OURS = """
import sys
from components.adapters.ray import train
train.start(1)
import ray
print(ray.init(ignore_reinit_error=True).dashboard_url, ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
"""
ENTER = "import ray, sys; ray.init(sys.argv[1]); print('inside')"


@dataclass(frozen=True)
class Head:
    """What is to be known of a head that runs."""

    dashboard: str
    """URL."""
    cluster: str
    """Where drivers and nodes join: host:port."""
    token: str


def environment(home: Path, **more: str) -> dict[str, str]:
    """A user without a token, and without what others have told Ray."""
    known = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return known | {"HOME": str(home), "RAY_USAGE_STATS_ENABLED": "0"} | more


def ask(url: str, token: str | None = None, method: str = "GET", body: dict | None = None) -> int:
    """Status of an answer."""
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers, method=method), timeout=30) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


def may_join(head: Head, home: Path, **authentication: str) -> bool:
    """Whether somebody becomes a driver of the cluster."""
    known = environment(home, RAY_NUM_REDIS_GET_RETRIES="1", **authentication)
    joined = subprocess.run([sys.executable, "-c", ENTER, head.cluster], env=known, capture_output=True, timeout=60)
    return b"inside" in joined.stdout


def of_our_pods() -> dict[str, str]:
    """Constants in the environment of the head that our RayJob asks for; all its pods have them alike."""
    cluster = ClusterConfig(image="registry.example/infoxlm@sha256:" + 64 * "0")
    spec = ray_job_manifest.render("j", "s3://b/work/j.json", cluster, 1, [], "2.60.0", environment={})["spec"]
    ray = spec["rayClusterSpec"]
    templates = [ray["headGroupSpec"], *ray["workerGroupSpecs"]]
    pods = [*(group["template"] for group in templates), spec["submitterPodTemplate"]]
    environments = [{v["name"]: v.get("value", "") for v in p["spec"]["containers"][0]["env"]} for p in pods]
    assert all(known["RAY_AUTH_MODE"] == "token" for known in environments)
    return environments[0]


@contextmanager
def our_start(home: Path) -> Iterator[Head]:
    """The cluster that `train` starts on this machine."""
    command = [sys.executable, "-c", OURS]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, env=environment(home), text=True, **pipes) as driver:
        dashboard, cluster = driver.stdout.readline().split()
        yield Head(f"http://{dashboard}", cluster, (home / ".ray/auth_token").read_text())
        driver.stdin.close()


@contextmanager
def head_of_a_cluster(home: Path) -> Iterator[Head]:
    """A head as KubeRay starts it for our RayJob, with the token of its Secret; only its pages are on loopback."""
    ports = {"port": free_port(), "dashboard-port": free_port(), "dashboard-agent-grpc-port": free_port()}
    ports |= {"dashboard-agent-listen-port": free_port(), "metrics-export-port": free_port()}
    command = [*RAY_START, "--dashboard-host=127.0.0.1", "--num-cpus=0", f"--temp-dir={home}/r"]
    command += [f"--{name}={port}" for name, port in ports.items()]
    known = environment(home, **of_our_pods() | {"HOME": str(home), "RAY_AUTH_TOKEN": TOKEN})
    head = subprocess.Popen(command, env=known, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        dashboard = f"http://127.0.0.1:{ports['dashboard-port']}"
        _wait_for_jobs(dashboard, head)
        yield Head(dashboard, f"127.0.0.1:{ports['port']}", TOKEN)
    finally:
        head.send_signal(signal.SIGTERM)  # it ends all that it has started
        head.wait(timeout=60)


def _wait_for_jobs(dashboard: str, head: subprocess.Popen) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and head.poll() is None:
        try:
            if ask(f"{dashboard}/api/jobs/", TOKEN) == 200:
                return
        except OSError:
            pass
        time.sleep(0.2)
    raise RuntimeError(f"the head does not answer; exit code {head.poll()}")


@pytest.fixture
def home() -> Iterator[Path]:
    """Short, since the paths of sockets below it are limited."""
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as name:
        yield Path(name)


@pytest.mark.item("S02")
@pytest.mark.parametrize("start", [our_start, head_of_a_cluster])
def test_without_the_token_nobody_reads_runs_or_joins(start, tmp_path, home):
    job = {"entrypoint": f"touch {tmp_path}/marker"}
    with start(home) as head:
        for path in ("/api/jobs/", "/api/version", "/nodes?view=summary", "/api/v0/actors", "/logs?glob=*"):
            assert ask(head.dashboard + path) == 401, path
            assert ask(head.dashboard + path, "b" * 64) == 403, path
        assert ask(f"{head.dashboard}/api/jobs/", method="POST", body=job) == 401
        assert ask(f"{head.dashboard}/api/jobs/", "b" * 64, "POST", job) == 403
        assert ask(f"{head.dashboard}/api/jobs/", head.token) == 200
        if start is head_of_a_cluster:  # its other ports are open to the network
            assert not may_join(head, tmp_path, RAY_AUTH_MODE="disabled")
            assert may_join(head, tmp_path, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=head.token)

        assert len(head.token) == 64 and head.dashboard.startswith("http://127.0.0.1:")
        if (written := home / ".ray/auth_token").exists():
            assert stat.S_IMODE(written.stat().st_mode) == 0o600
    assert not (tmp_path / "marker").exists()


@pytest.mark.item("S02")
def test_a_head_of_ours_without_a_token_does_not_start(tmp_path):
    known = environment(tmp_path, **of_our_pods() | {"HOME": str(tmp_path)})

    result = subprocess.run(
        [*RAY_START, f"--port={free_port()}"], env=known, capture_output=True, text=True, timeout=120
    )

    assert result.returncode != 0
    assert "no authentication token was found" in result.stdout + result.stderr

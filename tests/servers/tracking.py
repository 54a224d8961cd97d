"""MLflow: as a laptop would start it, open and on SQLite; and locked, on PostgreSQL and S3, as a cluster runs it."""

import base64
import json
import os
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.servers import postgres, s3
from tests.servers.processes import free_port, port_of, serving

ADMIN = ("admin", "canary-of-the-admin-90ab")
USER = ("infoxlm", "canary-of-mlflow-3e6d")
READER = ("reader", "canary-of-a-reader-41c9")
ROOT = Path(__file__).parents[2]
SECRETS = {
    ("mlflow-database", "username"): postgres.USER,
    ("mlflow-database", "password"): postgres.PASSWORD,
    ("mlflow-server", "admin-password"): ADMIN[1],
    ("mlflow-server", "flask-secret-key"): "canary-of-flask-e07b",
    ("mlflow-store", "AWS_ACCESS_KEY_ID"): "canary",
    ("mlflow-store", "AWS_SECRET_ACCESS_KEY"): s3.KEYS["canary"],
}
"""Entries of the Secrets that the manifests name."""


@contextmanager
def running_mlflow(directory: Path, port: int) -> Iterator[subprocess.Popen]:
    """Run an open server on loopback, with its data in a directory."""
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{directory}/server.db", "--artifacts-destination", f"{directory}/a"]
    quiet = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with serving(command, f"http://127.0.0.1:{port}/health", directory / "server.log", os.environ | quiet) as server:
        yield server


@dataclass(frozen=True)
class LockedMlflow:
    """A server that asks who you are."""

    url: str
    log: Path
    service: socket.socket
    """Listens at a port of which the server knows, for a test that puts a Service before several servers."""

    def environment(self, user: tuple[str, str] = USER) -> dict[str, str]:
        """What a client needs, and nothing else."""
        name, password = user
        return {
            "MLFLOW_TRACKING_URI": self.url,
            "MLFLOW_TRACKING_USERNAME": name,
            "MLFLOW_TRACKING_PASSWORD": password,
        }

    def call(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, user: tuple[str, str] | None = None,
        **headers: str,
    ) -> tuple[int, str]:  # fmt: skip
        """Status and text of an answer to a request, as anybody may send it."""
        sent = {"Content-Type": "application/json", **headers}
        if user:
            sent["Authorization"] = "Basic " + base64.b64encode(":".join(user).encode()).decode()
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, sent, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status, response.read().decode(errors="replace")
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode(errors="replace")


@contextmanager
def logged_in(login: tuple[str, str]) -> Iterator[None]:
    """Let this process act as a user of MLflow."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_USERNAME", login[0])
        patch.setenv("MLFLOW_TRACKING_PASSWORD", login[1])
        yield


@contextmanager
def locked_mlflow(directory: Path, database_port: int, s3_url: str) -> Iterator[LockedMlflow]:
    """Run a server as the manifests of `k8s/overlays/small` start it, but on other ports of loopback.

    Its tables are in PostgreSQL, its artifacts in `s3://infoxlm/mlflow`. It knows an administrator, a user for
    pipelines (`USER`) and somebody who may nothing (`READER`).
    """
    s3.bucket(s3_url, "infoxlm")
    with (
        socket.create_server(("127.0.0.1", 0)) as service,
        replica(directory, database_port, s3_url, port_of(service)) as (port, _),
    ):
        locked = LockedMlflow(f"http://localhost:{port}", directory / "server.log", service)
        for name, password in (USER, READER):
            account = {"username": name, "password": password}
            status, text = locked.call("POST", "/api/2.0/mlflow/users/create", account, ADMIN)
            if status != 200:
                raise RuntimeError(f"MLflow makes no user: {status} {text}")
        yield locked


@contextmanager
def replica(
    directory: Path, database_port: int, s3_url: str, service: int
) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """One server of those that share a database and a bucket: its port, and its process."""
    port = free_port()
    pod = _pod_of_mlflow(directory)
    here = {
        "HOME": str(directory),
        "PGHOST": "127.0.0.1",
        "PGPORT": str(database_port),
        "MLFLOW_AUTH_CONFIG_PATH": f"{directory}/basic_auth.ini",
        "MLFLOW_S3_ENDPOINT_URL": s3_url.replace("127.0.0.1", "localhost"),  # a name, as on a cluster
    }
    (server,) = pod["containers"]
    for upgrade in pod["initContainers"]:
        command = _command(upgrade, port, service)
        subprocess.run(command, env=_environment(upgrade) | here, check=True, capture_output=True)
    url, log = f"http://localhost:{port}", directory / "server.log"
    with serving(_command(server, port, service), f"{url}/health", log, _environment(server) | here) as process:
        yield port, process


def _pod_of_mlflow(directory: Path) -> dict[str, Any]:
    """Specification of the server's pod; the file that it mounts is written into a directory."""
    command = [str(Path(sys.executable).with_name("kubectl")), "kustomize", str(ROOT / "k8s/overlays/small")]
    rendered = subprocess.run(command, check=True, capture_output=True).stdout
    found = {(thing["kind"], thing["metadata"]["name"]): thing for thing in yaml.safe_load_all(rendered)}
    (directory / "basic_auth.ini").write_text(found["ConfigMap", "mlflow-auth"]["data"]["basic_auth.ini"])
    return found["Deployment", "mlflow"]["spec"]["template"]["spec"]


def _command(container: Mapping[str, Any], port: int, service: int) -> list[str]:
    """How a container is started, with an address and port of loopback."""
    words: list[str] = [*container["command"], *container.get("args", [])]
    program, *arguments = words
    given = [word.replace("0.0.0.0", "127.0.0.1").replace("--port=5000", f"--port={port}") for word in arguments]
    given = [word.replace("localhost:5000", f"localhost:{port},localhost:{service}") for word in given]
    return [str(Path(sys.executable).with_name(program)), *given]


def _environment(container: Mapping[str, Any]) -> dict[str, str]:
    """Environment of a container, nothing else but where programs are."""
    known = {"PATH": os.environ["PATH"]}
    for variable in container["env"]:
        secret = variable.get("valueFrom", {}).get("secretKeyRef", {})
        known[variable["name"]] = SECRETS[secret["name"], secret["key"]] if secret else variable["value"]
    return known

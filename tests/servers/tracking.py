"""MLflow servers: one without accounts, as on a laptop, and one with accounts, PostgreSQL and S3, as on a cluster."""

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
"""(Secret, key) -> value, for the Secrets that the manifests name."""


@contextmanager
def running_mlflow(directory: Path, port: int) -> Iterator[subprocess.Popen]:
    """Run a server without accounts on loopback, with its data in a directory."""
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{directory}/server.db", "--artifacts-destination", f"{directory}/a"]
    quiet = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with serving(command, f"http://127.0.0.1:{port}/health", directory / "server.log", os.environ | quiet) as server:
        yield server


@dataclass(frozen=True)
class LockedMlflow:
    """A running server with accounts."""

    url: str
    log: Path
    service: socket.socket
    """Listens at a port that the server accepts as its own, for tests with a Service in front of several servers."""

    def environment(self, user: tuple[str, str] = USER) -> dict[str, str]:
        """Return the environment variables that a client needs."""
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
        """Send a request, with a login or without, and return the status and text of the answer."""
        all_headers = {"Content-Type": "application/json", **headers}
        if user:
            all_headers["Authorization"] = "Basic " + base64.b64encode(":".join(user).encode()).decode()
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, all_headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status, response.read().decode(errors="replace")
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode(errors="replace")


@contextmanager
def logged_in(login: tuple[str, str]) -> Iterator[None]:
    """Use this login of MLflow in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_USERNAME", login[0])
        patch.setenv("MLFLOW_TRACKING_PASSWORD", login[1])
        yield


@contextmanager
def locked_mlflow(directory: Path, database_port: int, s3_url: str) -> Iterator[LockedMlflow]:
    """Run a server as the manifests of `k8s/overlays/small` start it, but on other ports of loopback.

    Its tables are in PostgreSQL, and its artifacts are in `s3://infoxlm/mlflow`. It has an administrator, a user for
    pipelines (`USER`) and a user without permissions (`READER`).
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
                raise RuntimeError(f"MLflow cannot create a user: {status} {text}")
        yield locked


@contextmanager
def replica(
    directory: Path, database_port: int, s3_url: str, service: int
) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """Run one of several servers that share a database and a bucket. Yield its port and its process."""
    port = free_port()
    pod = _pod_of_mlflow(directory)
    local_variables = {
        "HOME": str(directory),
        "PGHOST": "127.0.0.1",
        "PGPORT": str(database_port),
        "MLFLOW_AUTH_CONFIG_PATH": f"{directory}/basic_auth.ini",
        "MLFLOW_S3_ENDPOINT_URL": s3_url.replace("127.0.0.1", "localhost"),  # a host name, as on a cluster
    }
    (server,) = pod["containers"]
    for upgrade in pod["initContainers"]:
        command = _command(upgrade, port, service)
        subprocess.run(command, env=_environment(upgrade) | local_variables, check=True, capture_output=True)
    url = f"http://localhost:{port}/health"
    variables = _environment(server) | local_variables
    with serving(_command(server, port, service), url, directory / "server.log", variables) as process:
        yield port, process


def _pod_of_mlflow(directory: Path) -> dict[str, Any]:
    """Return the specification of the server's pod, and write the file that the pod mounts to a directory."""
    command = [str(Path(sys.executable).with_name("kubectl")), "kustomize", str(ROOT / "k8s/overlays/small")]
    rendered = subprocess.run(command, check=True, capture_output=True).stdout
    manifests = {(item["kind"], item["metadata"]["name"]): item for item in yaml.safe_load_all(rendered)}
    (directory / "basic_auth.ini").write_text(manifests["ConfigMap", "mlflow-auth"]["data"]["basic_auth.ini"])
    return manifests["Deployment", "mlflow"]["spec"]["template"]["spec"]


def _command(container: Mapping[str, Any], port: int, service: int) -> list[str]:
    """Return the command of a container, with a port of loopback and with both ports as allowed host names."""
    program, *arguments = [*container["command"], *container.get("args", [])]
    replacements = {
        "0.0.0.0": "127.0.0.1",
        "--port=5000": f"--port={port}",
        "localhost:5000": f"localhost:{port},localhost:{service}",
    }
    for cluster_value, local_value in replacements.items():
        arguments = [argument.replace(cluster_value, local_value) for argument in arguments]
    return [str(Path(sys.executable).with_name(program)), *arguments]


def _environment(container: Mapping[str, Any]) -> dict[str, str]:
    """Return the environment of a container, with this machine's PATH."""
    variables = {"PATH": os.environ["PATH"]}
    for variable in container["env"]:
        secret = variable.get("valueFrom", {}).get("secretKeyRef", {})
        variables[variable["name"]] = SECRETS[secret["name"], secret["key"]] if secret else variable["value"]
    return variables

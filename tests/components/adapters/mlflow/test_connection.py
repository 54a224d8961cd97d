"""Addresses of MLflow that are refused, and the errors of its servers and databases."""

import contextlib
import http.server
import os
import socket
import sqlite3
from pathlib import Path

import pytest

from components.adapters.mlflow import connection, errors
from components.settings import environment
from infoxlm_core.errors import InputError, StorageUnavailable
from tests.components.conftest import open_run
from tests.servers.processes import answering, free_port


def test_unreachable_server_is_reported_without_its_password(store, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://user:secret@127.0.0.1:{free_port()}")
    monkeypatch.setitem(environment.MLFLOW, "MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")

    with pytest.raises(StorageUnavailable, match=r"MLflow run demo: MLflow does not answer .* run again") as raised:
        open_run(store)

    assert "secret" not in str(raised.value)
    assert "\n" not in str(raised.value)


class FailingMlflow(http.server.BaseHTTPRequestHandler):
    """An MLflow that answers every request with one status, and records the requests."""

    status = 500
    requests: list[str]
    body = b'{"error_code": "INTERNAL_ERROR", "message": "0xe2 has no equivalent in encoding SQL_ASCII"}'

    def do_GET(self) -> None:
        if self.path != "/health":
            self.requests.append(self.path)
        self.send_response(200 if self.path == "/health" else self.status)
        self.end_headers()
        self.wfile.write(self.body)

    do_POST = do_PUT = do_GET


def upload_artifact(folder: Path) -> None:
    from mlflow.store.artifact.mlflow_artifacts_repo import MlflowArtifactsRepository

    (folder / "file").write_text("x")
    with errors.translate_errors("artifacts"):
        connection.connect(folder)
        MlflowArtifactsRepository("mlflow-artifacts:/1").log_artifact(str(folder / "file"))


@pytest.mark.parametrize(
    ("call", "status", "error", "message"),
    [
        (open_run, 500, InputError, r"MLflow fails with 500 \(.*too many 500 error.*\): see its log"),
        (open_run, 503, StorageUnavailable, r"MLflow is not ready \(.*too many 503 error.*\): run again"),
        (upload_artifact, 500, StorageUnavailable, r"MLflow is not ready \(.*too many 500 error.*\): run again"),
    ],
)
def test_error_of_a_server_asks_to_run_again_only_if_that_may_help(store, monkeypatch, call, status, error, message):
    monkeypatch.setitem(environment.MLFLOW, "MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    handler = type("Handler", (FailingMlflow,), {"status": status, "requests": []})
    with answering(handler) as url:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", url)
        with pytest.raises(error, match=message) as raised:
            call(store)
    assert raised.value.exit_code == (2 if error is InputError else 75)
    assert len(handler.requests) == 2, "a failed request is repeated only by MLflow's own retry"


@pytest.mark.item("P9")
def test_server_that_never_answers_is_reported_in_limited_time(store, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as silent_server:
        monkeypatch.setattr(connection, "_ANSWER_SECONDS", 0.2)
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://user:abc@127.0.0.1:{silent_server.getsockname()[1]}")

        with pytest.raises(
            StorageUnavailable, match=r"^http://127[^@]*: MLflow accepts connections but does not answer within 0 s"
        ):
            open_run(store)


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("./mlruns", "is a directory, which MLflow no longer supports: set it to a server"),
        ("sqlite:///:memory:", "is not a file that later stages can open: set it to sqlite"),
        ("sqlite+pysqlite:///x.db", "is not a file that later stages can open: set it to sqlite"),
        ("sqlite:////proc/nothing/mlflow.db", "/proc/nothing cannot be created"),
    ],
)
def test_address_that_is_not_a_database_is_refused_with_a_remedy(store, monkeypatch, uri, message):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)

    with pytest.raises(InputError, match=message):
        connection.connect(store)


@pytest.mark.parametrize(
    ("create", "message"),
    [
        (os.mkfifo, "is a named pipe"),
        (lambda path: path.write_bytes(b"x" * 9999), "database cannot be used"),
        (lambda path: path.write_bytes(b"SQLite format 3\0" + b"x" * 9999), "database cannot be used"),
    ],
    ids=["pipe", "other file", "damaged database"],
)
def test_file_that_is_not_a_database_is_refused(store, tmp_path, monkeypatch, create, message):
    create(tmp_path / "db")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/db")

    with pytest.raises(InputError, match=message):
        open_run(store)


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("UPDATE alembic_version SET version_num = 'later'", "the tables were created by another version of MLflow"),
        ("ALTER TABLE experiments RENAME COLUMN workspace TO x", "MLflow's database cannot be used .*: restore it"),
    ],
)
def test_database_with_other_tables_is_refused(store, statement, message, caplog):
    with contextlib.closing(sqlite3.connect(store / "mlflow.db")) as database, database:
        database.execute(statement)

    with pytest.raises(InputError, match=f"mlflow.db: {message}"):
        open_run(store)

    assert "Traceback" not in caplog.text


def test_store_with_a_special_character_in_its_path_is_refused(store):
    with pytest.raises(InputError, match="rename the store"):
        connection.connect(store / "a%20b")

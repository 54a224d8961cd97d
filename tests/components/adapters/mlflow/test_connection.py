"""The connection to MLflow: which addresses are refused, and how errors of servers and databases are translated."""

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


def test_a_server_that_is_gone_is_one_clear_line_without_its_password(store, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://user:secret@127.0.0.1:{free_port()}")
    monkeypatch.setitem(environment.MLFLOW, "MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")

    with pytest.raises(StorageUnavailable, match=r"MLflow run demo: MLflow does not answer .* run again") as e:
        open_run(store)

    assert "secret" not in str(e.value) and "\n" not in str(e.value)


class Fails(http.server.BaseHTTPRequestHandler):
    """An MLflow that answers every request with one status, and lists the requests."""

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
    ("call", "status", "error", "words"),
    [
        (open_run, 500, InputError, r"MLflow fails with 500 \(.*too many 500 error.*\): see its log"),
        (open_run, 503, StorageUnavailable, r"MLflow is not ready \(.*too many 503 error.*\): run again"),
        (upload_artifact, 500, StorageUnavailable, r"MLflow is not ready \(.*too many 500 error.*\): run again"),
    ],
)
def test_the_error_of_a_failing_server_has_its_status_and_asks_for_a_retry_only_if_that_may_help(
    store, monkeypatch, call, status, error, words
):
    monkeypatch.setitem(environment.MLFLOW, "MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    handler = type("_Fails", (Fails,), {"status": status, "requests": []})
    with answering(handler) as url:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", url)
        with pytest.raises(error, match=words) as raised:
            call(store)
    assert raised.value.exit_code == (2 if error is InputError else 75)
    assert len(handler.requests) == 2, "a failed request is repeated only by MLflow's own retry"


@pytest.mark.item("P9")
def test_a_server_that_accepts_and_never_answers_is_told_in_bounded_time(store, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(connection, "_ANSWER_SECONDS", 0.2)
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://user:abc@127.0.0.1:{silent.getsockname()[1]}")

        with pytest.raises(
            StorageUnavailable, match=r"^http://127[^@]*: MLflow accepts connections but does not answer within 0 s"
        ):
            open_run(store)


@pytest.mark.parametrize(
    ("uri", "said"),
    [
        ("./mlruns", "is a folder, and MLflow no longer supports folders: set it to a server"),
        ("file:///tmp/mlruns", "is a folder, and MLflow no longer supports folders: set it to a server"),
        ("sqlite:///:memory:", "is not a file that later stages can open: set it to sqlite"),
        ("sqlite+pysqlite:///x.db", "is not a file that later stages can open: set it to sqlite"),
        ("sqlite:////proc/nothing/mlflow.db", "/proc/nothing cannot be created"),
    ],
)
def test_an_address_that_can_be_no_database_is_refused_and_the_remedy_named(store, monkeypatch, uri, said):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)

    with pytest.raises(InputError, match=said):
        connection.connect(store)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda path: path.mkdir(), "is a folder"),
        (os.mkfifo, "is a named pipe"),
        (lambda path: path.write_bytes(b"x" * 9999), "database cannot be used"),
        (lambda path: path.write_bytes(b"SQLite format 3\0" + b"x" * 9999), "database cannot be used"),
    ],
    ids=["folder", "pipe", "garbage", "torn"],
)
def test_a_database_that_cannot_be_one_is_refused_at_once(store, tmp_path, monkeypatch, make, said):
    make(tmp_path / "db")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/db")

    with pytest.raises(InputError, match=said):
        open_run(store)


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("UPDATE alembic_version SET version_num = 'later'", "the tables were created by another version of MLflow"),
        ("ALTER TABLE experiments RENAME COLUMN workspace TO x", "MLflow's database cannot be used .*: restore it"),
    ],
    ids=["later", "other"],
)
def test_a_database_that_stays_as_it_is_is_not_tried_again(store, statement, said, caplog):
    with contextlib.closing(sqlite3.connect(store / "mlflow.db")) as database, database:
        database.execute(statement)

    with pytest.raises(InputError, match=f"mlflow.db: {said}"):
        open_run(store)

    assert "Traceback" not in caplog.text


def test_a_store_whose_name_cannot_stand_in_an_address_is_refused(store):
    with pytest.raises(InputError, match="rename the store"):
        connection.connect(store / "a%20b")


def test_a_store_that_was_moved_is_refused_with_the_way_out(store, tmp_path):
    open_run(store)
    elsewhere = store.rename(tmp_path / "elsewhere")
    os.environ.pop("MLFLOW_TRACKING_URI")

    with pytest.raises(
        InputError, match=r"artifacts at file://.*/store/mlartifacts/.* cannot be moved, so move it back"
    ):
        open_run(elsewhere)

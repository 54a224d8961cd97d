"""A store that lies elsewhere now is used as it was before, and the one that it was copied from stays as it is."""

import shutil
import sqlite3

import pytest
from mlflow import MlflowClient

from components.adapters.mlflow import connection, moved, runs
from infoxlm_core.errors import InputError
from tests.components.conftest import open_run


@pytest.fixture
def used(tmp_path, monkeypatch):
    """Open the run of a store that lies somewhere, and read what it has kept."""

    def use(name: str) -> tuple[str, list[str]]:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", "")
        run_id = open_run(tmp_path / name)
        return run_id, [file.path for file in MlflowClient().list_artifacts(run_id)]

    return use


def test_a_store_that_was_copied_or_moved_goes_on_with_its_runs(tmp_path, used, caplog):
    run_id, _ = used("old")
    (tmp_path / "report.html").write_text("<p>")
    runs.log_artifacts(run_id, tmp_path / "report.html")
    shutil.copytree(tmp_path / "old", tmp_path / "a copy")
    (tmp_path / "a copy/mlartifacts" / run_id / "artifacts/report.html").rename(
        tmp_path / "a copy/mlartifacts" / run_id / "artifacts/report2.html"
    )

    assert used("a copy") == (run_id, ["report2.html"])
    assert "was moved: what it says to lie below file:///" in caplog.messages[-1]
    assert used("old") == (run_id, ["report.html"])
    (tmp_path / "old").rename(tmp_path / "new")
    assert used("new") == (run_id, ["report.html"])
    said = len(caplog.messages)
    moved.settle(tmp_path / "new/mlflow.db")
    assert len(caplog.messages) == said


def test_places_that_are_none_of_a_store_stay_as_they_are(tmp_path):
    (tmp_path / "mlartifacts").mkdir()
    (tmp_path / "kept/mlartifacts/1").mkdir(parents=True)
    places = ["s3://bucket/mlartifacts/1", "file:///etc/passwd", (tmp_path / "kept/mlartifacts/1").as_uri(),
              "file:///gone/mlartifacts/../../etc"]  # fmt: skip
    with sqlite3.connect(tmp_path / "mlflow.db") as database:
        database.execute("CREATE TABLE runs (artifact_uri TEXT)")
        database.executemany(
            "INSERT INTO runs VALUES (?)", [(place,) for place in [*places, "file:///gone/mlartifacts"]]
        )

    moved.settle(tmp_path / "mlflow.db")

    found = [place for (place,) in sqlite3.connect(tmp_path / "mlflow.db").execute("SELECT artifact_uri FROM runs")]
    assert found == [*places, (tmp_path / "mlartifacts").as_uri()]


def test_an_experiment_that_points_elsewhere_is_refused(store):
    client = connection.connect(store)
    client.create_experiment("tests", "file:///etc")

    with pytest.raises(InputError, match=r"MLflow keeps artifacts at file:///etc/.*: use another experiment"):
        open_run(store)

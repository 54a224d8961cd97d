import contextlib
import os
import socket
import sqlite3

import pytest
from mlflow.store.db import utils

from components.adapters.mlflow import connection, model_versions, runs
from components.settings import environment
from infoxlm_core.corpora.datasets import Dataset
from infoxlm_core.errors import ConfigMismatch, InputError, StorageUnavailable
from tests.components.conftest import history, open_run
from tests.servers.processes import free_port


def test_without_a_tracking_server_everything_lies_in_the_store(store):
    run_id = open_run(store)
    runs.log_metrics(run_id, {"retrieval/best": 0.5})
    report = store / "report.html"
    report.write_text("<p>")
    runs.log_artifacts(run_id, report, "reports")

    assert sorted(path.name for path in store.iterdir()) == [".mlflow.lock", "mlartifacts", "mlflow.db", "report.html"]
    assert [path.parent.name for path in (store / "mlartifacts").rglob("report.html")] == ["reports"]
    assert history(run_id, "retrieval/best") == [(0, 0.5)]


def test_all_stages_of_one_pipeline_run_share_one_mlflow_run(store):
    assert open_run(store, "r1") == open_run(store, "r1") != open_run(store, "r2")


def test_a_run_of_the_platform_is_adopted_reopened_and_never_ended(store, monkeypatch):
    client = connection.connect(store)
    experiment = client.create_experiment("platform", (store / "mlartifacts").as_uri())
    theirs = client.create_run(experiment).info.run_id
    client.set_terminated(theirs, "FINISHED")
    monkeypatch.setenv("MLFLOW_RUN_ID", theirs)

    run_id = open_run(store)
    runs.end_run(run_id)

    run = client.get_run(run_id)
    assert (run_id, run.info.status, run.data.tags["infoxlm.run"]) == (theirs, "RUNNING", "r1")


def test_tasks_for_which_the_platform_opens_nested_runs_share_the_outermost(store, monkeypatch):
    client = connection.connect(store)
    experiment = client.create_experiment("platform", (store / "mlartifacts").as_uri())

    def nested(parent: str) -> str:
        return client.create_run(experiment, tags={"mlflow.parentRunId": parent}).info.run_id

    whole = client.create_run(experiment).info.run_id
    for task in (nested(whole), nested(nested(whole))):  # a task, and one of a loop
        monkeypatch.setenv("MLFLOW_RUN_ID", task)
        assert open_run(store) == whole
        runs.end_run(whole)
        runs.end_run(task)
        assert client.get_run(whole).info.status == client.get_run(task).info.status == "RUNNING"

    monkeypatch.delenv("MLFLOW_RUN_ID")
    assert runs.find_or_create(client, "platform", "demo", {"infoxlm.run": "r1"}) == whole


def test_a_run_of_ours_ends_and_a_retried_stage_opens_it_again(store):
    run_id = open_run(store)
    runs.end_run(run_id, "FAILED")
    client = connection.connect(store)
    assert client.get_run(run_id).info.status == "FAILED"

    open_run(store)

    assert client.get_run(run_id).info.status == "RUNNING"


def test_nested_settings_become_parameters_and_may_be_logged_twice(store):
    run_id = open_run(store)
    config = {"pretraining": {"seed": 1, "model": {"start": None}, "betas": (0.9, 0.98)}, "corpora": [{"name": "a"}]}

    runs.log_params(run_id, config)
    runs.log_params(run_id, config | {"long": "x" * 7000, "many": {str(i): i for i in range(150)}})

    params = connection.connect(store).get_run(run_id).data.params
    assert params["pretraining.model.start"] == "None"
    assert params["pretraining.betas"] == "[0.9, 0.98]"
    assert params["corpora.0.name"] == "a"
    assert len(params["long"]) == 6000
    assert len(params) == 4 + 1 + 150


def test_a_changed_setting_is_refused_with_both_values(store):
    run_id = open_run(store)
    runs.log_params(run_id, {"pretraining": {"seed": 1}})

    with pytest.raises(ConfigMismatch, match=r"pretraining\.seed = 1, not 2: set it back"):
        runs.log_params(run_id, {"pretraining": {"seed": 2}})


def test_an_experiment_that_points_elsewhere_is_refused(store, tmp_path):
    connection.connect(store).create_experiment("tests", (tmp_path / "elsewhere").as_uri())

    with pytest.raises(InputError, match=r"elsewhere.* use another experiment"):
        open_run(store)


def test_a_server_that_is_gone_is_one_clear_line_without_its_password(store, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://user:secret@127.0.0.1:{free_port()}")
    monkeypatch.setitem(environment.MLFLOW, "MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")

    with pytest.raises(StorageUnavailable, match=r"MLflow run demo: MLflow does not answer .* run the same again") as e:
        open_run(store)

    assert "secret" not in str(e.value) and "\n" not in str(e.value)


def test_corpora_are_inputs_of_a_run_by_digest_once_however_often_they_are_told(store):
    from mlflow import MlflowClient

    run_id = open_run(store)
    corpora = [
        Dataset("mail", "a" * 64, held_out=False, languages=("de", "en"), lines={"mono kept": 7}),
        Dataset("exam", "b" * 64, held_out=True, languages=("en",)),
    ]
    for place in ("s3://b/store/corpus/1", "s3://b/store/corpus/1"):
        runs.log_datasets(run_id, corpora, place)

    found = {one.dataset.name: one for one in MlflowClient().get_run(run_id).inputs.dataset_inputs}
    assert {name: one.tags[0].value for name, one in found.items()} == {"mail": "training", "exam": "evaluation"}
    assert found["mail"].dataset.digest == "a" * 36 and "s3://b/store/corpus/1" in found["mail"].dataset.source
    assert '"mono kept": 7' in found["mail"].dataset.profile


def test_a_description_leads_to_files_of_its_run(store):
    run_id = open_run(store)
    runs.annotate(run_id, "good: [Report](artifact:evaluation/report.html)")

    said = connection.connect(store).get_run(run_id).data.tags["mlflow.note.content"]
    assert said.startswith("good: [Report](#/experiments/1/runs/")
    assert f"/runs/{run_id}/artifacts/evaluation/report.html?workflowType=machine_learning)" in said


@pytest.mark.parametrize("commit", ["c0ffee" + "0" * 34, "unknown", "c0ffee"])
def test_the_commit_of_the_image_is_the_source_of_the_run_if_it_is_one(monkeypatch, commit):
    monkeypatch.setenv(runs.COMMIT, commit)

    assert runs.source().get("mlflow.source.git.commit", "") == (commit if len(commit) == 40 else "")


@pytest.mark.item("P9")
def test_a_server_that_accepts_and_never_answers_is_told_in_bounded_time(store, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(connection, "_ANSWER_SECONDS", 0.2)
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://user:abc@127.0.0.1:{silent.getsockname()[1]}")

        with pytest.raises(
            StorageUnavailable, match=r"^http://127[^@]*: MLflow accepts connections and does not answer \(2 x 0 s\)"
        ):
            open_run(store)


@pytest.mark.parametrize("uri", ["./mlruns", "foo", "not a uri!!", "file:///tmp/mlruns"])
def test_a_folder_of_files_is_refused_and_the_remedy_named(store, monkeypatch, uri):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)

    with pytest.raises(InputError, match=r"keeps no folders of files any more: set it to a server"):
        open_run(store)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda path: path.mkdir(), "is a folder"),
        (os.mkfifo, "is a named pipe"),
        (lambda path: path.write_bytes(b"x" * 9999), "is no database of MLflow"),
        (lambda path: path.write_bytes(b"SQLite format 3\0" + b"x" * 9999), "database cannot be used"),
    ],
    ids=["folder", "pipe", "garbage", "torn"],
)
def test_a_database_that_cannot_be_one_is_refused_at_once(store, tmp_path, monkeypatch, make, said):
    make(tmp_path / "db")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/db")

    with pytest.raises(InputError, match=said):
        open_run(store)


@pytest.mark.parametrize("uri", ["sqlite://", "sqlite:///:memory:", "sqlite+pysqlite:///x.db"])
def test_a_database_that_no_other_stage_would_find_is_refused(store, monkeypatch, uri):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)

    with pytest.raises(InputError, match="names no file that the next stage would find: set it to sqlite"):
        open_run(store)


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("UPDATE alembic_version SET version_num = 'later'", "the tables are those of another version of MLflow"),
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


def test_tables_that_were_half_made_when_a_process_died_are_made_again(store, empty_database, monkeypatch):
    def make(engine, whole: bool) -> None:
        with contextlib.closing(sqlite3.connect(engine.url.database)) as made:
            if whole:
                with contextlib.closing(sqlite3.connect(empty_database)) as known:
                    known.backup(made)
                return
            made.execute("CREATE TABLE spans (trace_id VARCHAR(50))")
            made.commit()
        raise KeyboardInterrupt  # or killed: then the next one finds the folder in which it was made

    making = store / ".mlflow.db.making"
    (store / "mlflow.db").unlink()
    monkeypatch.setattr(utils, "_initialize_tables", lambda engine: make(engine, whole=False))
    with pytest.raises(KeyboardInterrupt):
        connection.connect(store)
    assert not (store / "mlflow.db").exists() and not making.exists()
    making.mkdir()
    (making / "mlflow.db").write_text("half")
    monkeypatch.setattr(utils, "_initialize_tables", lambda engine: make(engine, whole=True))

    assert connection.connect(store).search_experiments() and not making.exists()


@pytest.mark.parametrize("name", ["a?b", "a%20b", "a#b"])
def test_a_store_whose_name_cannot_stand_in_an_address_is_refused(tmp_path, monkeypatch, name):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)

    with pytest.raises(InputError, match="rename the store"):
        connection.connect(tmp_path / name)


def test_a_run_whose_name_has_a_quotation_mark_is_found_again(store):
    tags = {runs.RUN_TAG: "o'brien-20260101"}

    first = runs.open_run("tests", "o'brien", tags, store)

    assert runs.open_run("tests", "o'brien", tags, store) == first
    with pytest.raises(InputError, match="cannot search for a name with such quotation marks"):
        runs.open_run("tests", "x", {runs.RUN_TAG: "a'b\"c"}, store)


def test_a_database_whose_folder_cannot_be_made_is_no_traceback(store, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:////proc/nothing/mlflow.db")

    with pytest.raises(InputError, match="/proc/nothing cannot be made"):
        open_run(store)


@pytest.mark.parametrize(
    "said",
    [
        "(sqlite3.IntegrityError) UNIQUE constraint failed: registered_model_aliases.alias",
        "(psycopg2.errors.UniqueViolation) duplicate key value violates a constraint",
        "(pymysql.err.IntegrityError) (1062, \"Duplicate entry 'toy-champion'\")",
    ],
)
def test_a_row_that_another_process_makes_at_the_same_moment_is_set_again_and_other_refusals_are_not(said):
    from mlflow.exceptions import MlflowException

    answers: list[str] = [said]
    seen: list[tuple[str, ...]] = []

    def call(*row: str) -> None:
        seen.append(row)
        if answers:
            raise MlflowException(answers.pop())

    model_versions.put(call, "toy", "champion", "1")
    assert seen == [("toy", "champion", "1")] * 2

    answers.append("no such model")
    with pytest.raises(MlflowException, match="no such model"):
        model_versions.put(call, "toy", "champion", "1")
    assert len(seen) == 3

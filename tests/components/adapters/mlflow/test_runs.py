"""Runs of MLflow: all stages share one, and what they log to it is stored once."""

import pytest

from components.adapters.mlflow import connection, runs, tracker, trial_runs
from components.adapters.mlflow.tracker import MlflowRun
from infoxlm_core.corpora.datasets import Dataset
from infoxlm_core.errors import ConfigMismatch, InputError
from infoxlm_core.results.trials import Trial
from tests.components.conftest import history, open_run


def test_without_a_tracking_server_everything_lies_in_the_store(store):
    run_id = open_run(store)
    MlflowRun(run_id).log_metrics({"retrieval/served": 0.5})
    report = store / "report.html"
    report.write_text("<p>")
    MlflowRun(run_id).log_artifacts(report, "reports")

    assert sorted(path.name for path in store.iterdir()) == [".mlflow.lock", "mlartifacts", "mlflow.db", "report.html"]
    assert [path.parent.name for path in (store / "mlartifacts").rglob("report.html")] == ["reports"]
    assert history(run_id, "retrieval/served") == [(0, 0.5)]


def test_all_stages_of_one_pipeline_run_share_one_run(store):
    run_id = open_run(store, "r1")

    assert open_run(store, "r1") == run_id != open_run(store, "r2")


def test_a_run_of_the_platform_is_adopted_reopened_and_never_ended(store, monkeypatch):
    client = connection.connect(store)
    experiment = client.create_experiment("platform", (store / "mlartifacts").as_uri())
    theirs = client.create_run(experiment).info.run_id
    client.set_terminated(theirs, "FINISHED")
    monkeypatch.setenv("MLFLOW_RUN_ID", theirs)

    run_id = open_run(store)
    MlflowRun(run_id).end()

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
        MlflowRun(whole).end()
        MlflowRun(task).end()
        assert client.get_run(whole).info.status == client.get_run(task).info.status == "RUNNING"

    monkeypatch.delenv("MLFLOW_RUN_ID")
    assert runs.find_or_create(client, "platform", "demo", {"infoxlm.run": "r1"}) == whole


def test_nested_settings_become_parameters_and_may_be_logged_twice(store):
    run_id = open_run(store)
    config = {"pretraining": {"seed": 1, "model": {"start": None}, "betas": (0.9, 0.98)}, "corpora": [{"name": "a"}]}

    MlflowRun(run_id).log_params(config)
    MlflowRun(run_id).log_params(config | {"long": "x" * 7000, "many": {str(i): i for i in range(150)}})

    params = connection.connect(store).get_run(run_id).data.params
    assert params["pretraining.model.start"] == "None"
    assert params["pretraining.betas"] == "[0.9, 0.98]"
    assert params["corpora.0.name"] == "a"
    assert len(params["long"]) == 6000
    assert len(params) == 4 + 1 + 150
    with pytest.raises(ConfigMismatch, match=r"pretraining\.seed = 1, not 2: change it back"):
        MlflowRun(run_id).log_params({"pretraining": {"seed": 2}})


def test_an_experiment_that_points_elsewhere_is_refused(store, tmp_path):
    connection.connect(store).create_experiment("tests", (tmp_path / "elsewhere").as_uri())

    with pytest.raises(InputError, match=r"elsewhere.* use another experiment"):
        open_run(store)


def test_corpora_are_inputs_of_a_run_by_digest_once_however_often_they_are_told(store):
    from mlflow import MlflowClient

    run_id = open_run(store)
    corpora = [
        Dataset("mail", "a" * 64, held_out=False, languages=("de", "en"), lines={"mono kept": 7}),
        Dataset("exam", "b" * 64, held_out=True, languages=("en",)),
    ]
    for place in ("s3://b/store/corpus/1", "s3://b/store/corpus/1"):
        MlflowRun(run_id).log_datasets(corpora, place)

    found = {one.dataset.name: one for one in MlflowClient().get_run(run_id).inputs.dataset_inputs}
    assert {name: one.tags[0].value for name, one in found.items()} == {"mail": "training", "exam": "evaluation"}
    assert found["mail"].dataset.digest == "a" * 36 and "s3://b/store/corpus/1" in found["mail"].dataset.source
    assert '"mono kept": 7' in found["mail"].dataset.profile


def test_a_description_leads_to_files_of_its_run(store):
    run_id = open_run(store)
    MlflowRun(run_id).annotate("good: [Report](artifact:evaluation/report.html)")

    said = connection.connect(store).get_run(run_id).data.tags["mlflow.note.content"]
    assert said.startswith("good: [Report](#/experiments/1/runs/")
    assert f"/runs/{run_id}/artifacts/evaluation/report.html?workflowType=machine_learning)" in said


@pytest.mark.parametrize("commit", ["c0ffee" + "0" * 34, "unknown", "c0ffee"])
def test_the_commit_of_the_image_is_the_source_of_the_run_if_it_is_one(monkeypatch, commit):
    monkeypatch.setenv(runs.COMMIT, commit)

    assert runs.source_tags().get("mlflow.source.git.commit", "") == (commit if len(commit) == 40 else "")


def test_a_run_whose_name_has_a_quotation_mark_is_found_again(store):
    tags = {runs.RUN_TAG: "o'brien-20260101"}

    first = runs.open_run("tests", "o'brien", tags, store)

    assert runs.open_run("tests", "o'brien", tags, store) == first
    with pytest.raises(InputError, match="cannot search for a name with such quotation marks"):
        runs.open_run("tests", "x", {runs.RUN_TAG: "a'b\"c"}, store)


def test_a_failed_run_names_its_stage_and_message_until_it_is_opened_again(store):
    run_id = open_run(store, "r1")
    MlflowRun(run_id).end("FAILED", "pretrain", "loss is nan")
    client = connection.connect(store)
    run = client.get_run(run_id)
    assert (run.info.status, run.data.tags["infoxlm.failed_stage"]) == ("FAILED", "pretrain")
    assert run.data.tags["infoxlm.error"] == "loss is nan"

    open_run(store, "r1")

    run = client.get_run(run_id)
    assert run.info.status == "RUNNING" and not {"infoxlm.failed_stage", "infoxlm.error"} & run.data.tags.keys()


def test_only_unfinished_runs_of_a_pipeline_run_and_its_trials_are_ended(store, monkeypatch):
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "tests")
    parent, other = open_run(store, "r1"), open_run(store, "r2")
    trials = [Trial.parse({"variant": "full", "seed": seed}) for seed in (1, 2)]
    finished, unfinished = (trial_runs.open_trial(parent, "r1", trial) for trial in trials)
    MlflowRun(finished).end()

    tracker.end_unfinished("r1", store, "KILLED", "", "the run was cancelled")
    tracker.end_unfinished("r1", store, "FAILED", "pretrain", "too late")
    tracker.end_unfinished("r3", store, "FAILED", "", "it does not exist")

    client = connection.connect(store)
    runs_by_id = {run_id: client.get_run(run_id) for run_id in (parent, finished, unfinished, other)}
    assert {run_id: run.info.status for run_id, run in runs_by_id.items()} == {
        parent: "KILLED",
        finished: "FINISHED",
        unfinished: "KILLED",
        other: "RUNNING",
    }
    assert runs_by_id[parent].data.tags["infoxlm.error"] == "the run was cancelled"

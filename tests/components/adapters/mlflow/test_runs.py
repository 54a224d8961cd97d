"""All stages of a pipeline run share one MLflow run, and what they log to it is stored once."""

import pytest

from components.adapters.mlflow import connection, runs, tracker, trial_runs
from components.adapters.mlflow.tracker import MlflowRun
from infoxlm_core.corpora.datasets import Dataset
from infoxlm_core.errors import ConfigMismatch, InputError
from infoxlm_core.results.trials import Trial
from tests.components.conftest import history, open_run


def test_everything_is_in_the_store_without_a_tracking_server(store):
    run_id = open_run(store)
    MlflowRun(run_id).log_metrics({"retrieval/served": 0.5})
    report = store / "report.html"
    report.write_text("<p>")
    MlflowRun(run_id).log_artifacts(report, "reports")

    assert sorted(path.name for path in store.iterdir()) == [".mlflow.lock", "mlartifacts", "mlflow.db", "report.html"]
    assert [path.parent.name for path in (store / "mlartifacts").rglob("report.html")] == ["reports"]
    assert history(run_id, "retrieval/served") == [(0, 0.5)]


def test_stages_of_a_pipeline_run_share_one_mlflow_run(store):
    run_id = open_run(store, "r1")

    assert open_run(store, "r1") == run_id
    assert open_run(store, "r2") != run_id


def test_outermost_run_of_the_plugin_is_used_reopened_and_never_ended(store, monkeypatch):
    client = connection.connect(store)
    experiment = client.create_experiment("platform", (store / "mlartifacts").as_uri())

    def create_nested(parent_id: str) -> str:
        return client.create_run(experiment, tags={"mlflow.parentRunId": parent_id}).info.run_id

    outermost_id = client.create_run(experiment).info.run_id
    client.set_terminated(outermost_id, "FINISHED")
    task_id = create_nested(outermost_id)
    task_in_loop_id = create_nested(create_nested(outermost_id))
    for run_id in (outermost_id, task_id, task_in_loop_id):
        monkeypatch.setenv("MLFLOW_RUN_ID", run_id)
        assert open_run(store) == outermost_id
        MlflowRun(outermost_id).end()
        MlflowRun(run_id).end()
        assert client.get_run(outermost_id).info.status == "RUNNING"
        assert client.get_run(run_id).info.status == "RUNNING"
    assert client.get_run(outermost_id).data.tags["infoxlm.run"] == "r1"

    monkeypatch.delenv("MLFLOW_RUN_ID")
    assert runs.find_or_create(client, "platform", "demo", {"infoxlm.run": "r1"}) == outermost_id


def test_nested_config_becomes_parameters_that_cannot_change(store):
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


def test_experiment_with_artifacts_outside_of_the_store_is_refused(store, tmp_path):
    connection.connect(store).create_experiment("tests", (tmp_path / "elsewhere").as_uri())

    with pytest.raises(InputError, match=r"elsewhere.* use another experiment"):
        open_run(store)


def test_corpora_are_listed_once_as_inputs_of_a_run(store):
    run_id = open_run(store)
    corpora = [
        Dataset("mail", "a" * 64, held_out=False, languages=("de", "en"), lines={"mono kept": 7}),
        Dataset("exam", "b" * 64, held_out=True, languages=("en",)),
    ]
    for _ in range(2):
        MlflowRun(run_id).log_datasets(corpora, "s3://b/store/corpus/1")

    inputs = {entry.dataset.name: entry for entry in connection.connect(store).get_run(run_id).inputs.dataset_inputs}
    assert inputs.keys() == {"mail", "exam"}
    assert inputs["mail"].tags[0].value == "training"
    assert inputs["exam"].tags[0].value == "evaluation"
    dataset = inputs["mail"].dataset
    assert dataset.digest == "a" * 36
    assert "s3://b/store/corpus/1" in dataset.source
    assert '"mono kept": 7' in dataset.profile


def test_description_links_to_files_of_its_run(store):
    run_id = open_run(store)
    MlflowRun(run_id).annotate("good: [Report](artifact:evaluation/report.html)")

    description = connection.connect(store).get_run(run_id).data.tags["mlflow.note.content"]
    assert description.startswith("good: [Report](#/experiments/1/runs/")
    assert f"/runs/{run_id}/artifacts/evaluation/report.html?workflowType=machine_learning)" in description


@pytest.mark.parametrize("commit", ["c0ffee" + "0" * 34, "unknown"])
def test_valid_commit_of_the_image_is_the_source_of_the_run(monkeypatch, commit):
    monkeypatch.setenv(runs.COMMIT, commit)

    assert runs.make_source_tags().get("mlflow.source.git.commit", "") == (commit if len(commit) == 40 else "")


def test_run_with_a_quotation_mark_in_its_name_is_found_again(store):
    tags = {runs.RUN_TAG: "o'brien-20260101"}

    first = runs.open_run("tests", "o'brien", tags, store)

    assert runs.open_run("tests", "o'brien", tags, store) == first
    with pytest.raises(InputError, match="cannot search for a name with such quotation marks"):
        runs.open_run("tests", "x", {runs.RUN_TAG: "a'b\"c"}, store)


def test_failed_run_has_its_stage_and_message_until_it_is_opened_again(store):
    run_id = open_run(store, "r1")
    MlflowRun(run_id).end("FAILED", "pretrain", "loss is nan")
    client = connection.connect(store)
    run = client.get_run(run_id)
    assert run.info.status == "FAILED"
    assert run.data.tags["infoxlm.failed_stage"] == "pretrain"
    assert run.data.tags["infoxlm.error"] == "loss is nan"

    open_run(store, "r1")

    run = client.get_run(run_id)
    assert run.info.status == "RUNNING"
    assert not {"infoxlm.failed_stage", "infoxlm.error"} & run.data.tags.keys()


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

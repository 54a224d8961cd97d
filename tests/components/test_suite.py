"""The components of a suite, called as KFP calls them: they plan and measure trials."""

import json
import multiprocessing
import os
import signal
import threading
from pathlib import Path

import pytest
from kfp import dsl

from components.adapters.mlflow import connection, trial_runs
from components.adapters.mlflow.tracker import MlflowRun
from components.platform import artifact_files, artifacts, parameters, tracking
from components.suite import measure, plan_suite
from infoxlm_core import run_file
from infoxlm_core.results.suite_config import SuiteConfig
from infoxlm_core.tasks.scores import Scores
from tests.components.conftest import history
from tests.servers.processes import until
from tests.toys.suite import write_suite

WORDS = "toy words learning_rate=0.003 seed 1"


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> SuiteConfig:
    return run_file.load_config(SuiteConfig, write_suite(tmp_path_factory.mktemp("suite")))


def plan(config: SuiteConfig, store: Path, **arguments) -> list[list[dict]]:
    """Return the trials of each batch of a suite."""
    batches = plan_suite.python_func(suite=config.listed(), store=str(store), **arguments)
    return [parameters.dereference(str(store), batch["points"]) for batch in batches]


@pytest.fixture
def planned(config, store, monkeypatch) -> dict[str, dict]:
    """Return the trials of a pipeline run by name."""
    monkeypatch.setenv("RUN_ID", "toy-1")
    monkeypatch.setenv("RUN_NAME", "toy")
    trials = [trial for batch in plan(config, store) for trial in batch]
    return {trial["point"]["name"]: trial for trial in trials}


def measure_batch(
    trials: list[dict], store: Path, folder: Path, run_id: str = "toy-1", num_workers: int = 0
) -> dict[str, Path]:
    """Measure trials in one step of a pipeline run; return the directories of their scores by name."""
    os.environ["RUN_ID"] = run_id
    points = parameters.write_reference(str(store), trials)
    scores, metrics = dsl.Artifact(uri=str(folder / "scores")), dsl.Metrics(uri=str(folder / "metrics"))
    measure.python_func(
        batch={"points": points}, store=str(store), num_workers=num_workers, scores=scores, metrics=metrics
    )
    pointers = json.loads(Path(scores.path).read_text())
    return {name: artifacts.locate(pointer["location"]) for name, pointer in pointers.items()}


def measure_trial(trial: dict, store: Path, folder: Path, run_id: str = "toy-1", num_workers: int = 0) -> Path:
    """Measure a trial in a step of its own; return the directory of its scores."""
    [directory] = measure_batch([trial], store, folder, run_id, num_workers).values()
    return directory


def change_settings(trial: dict, **changes) -> dict:
    return trial | {"settings": trial["settings"] | changes}


def rename(trial: dict, task: str) -> dict:
    return trial | {"point": trial["point"] | {"task": task, "name": f"toy {task}"}}


def list_names(store: Path, kind: str) -> list[str]:
    return sorted(path.name for path in (store / kind).iterdir() if path.suffix != ".lock")


def test_suite_can_be_overridden_with_numbers_from_kubeflows_page(config, store):
    overrides = {"tasks.riddles.seeds": [1.0, 2.0], "tasks.words.grid": {}}

    batches = plan(config, store, overrides=overrides)

    names = [trial["point"]["name"] for batch in batches for trial in batch]
    assert names == ["toy words seed 1", "toy riddles seed 1", "toy riddles seed 2", "toy pairs"]


@pytest.mark.parametrize(
    ("overrides", "tracker", "message"),
    [
        ({"models.toy": "/nowhere"}, "mlflow", "/nowhere: no such file or directory: give a path, s3://"),
        (
            {"tasks.pairs.settings.data": "/nowhere"},
            "mlflow",
            "/nowhere: no such file or directory: give a path, or s3:",
        ),
        ({"tasks.riddles.seed": [1]}, "mlflow", "suite.tasks.riddles.seed: unknown name; known are"),
        ({}, "none", "a sweep reads its trials from a tracker"),
    ],
)
def test_suite_that_cannot_be_measured_fails_when_it_is_planned(
    config, store, monkeypatch, overrides, tracker, message
):
    monkeypatch.setenv(tracking.VARIABLE, tracker)

    with pytest.raises(SystemExit) as exit_info:
        plan(config, store, overrides=overrides)

    outcome = json.loads((store / "outcome/by-hand/plan_suite.json").read_text())
    assert exit_info.value.code == 2
    assert outcome["stage"] == "plan_suite"
    assert message in outcome["message"]


def test_trial_is_logged_to_mlflow_and_a_damaged_model_is_not_measured(planned, store, tmp_path):
    directory = measure_trial(planned[WORDS], store, tmp_path)

    client, parent = connection.connect(store), tracking.open_run(str(store)).id
    [trial_run] = trial_runs.read_trials(parent)
    run = client.get_run(trial_run.run_id)
    tags = {name: run.data.tags[name] for name in ("model", "task", "seed", "grid")}
    assert tags == {"model": "toy", "task": "words", "seed": "1", "grid": "optimization.learning_rate=0.003"}
    assert run.info.run_name == run.data.tags["point"] == WORDS
    assert run.info.status == "FINISHED"
    assert run.data.tags["mlflow.parentRunId"] == parent
    assert run.data.params["settings.optimization.learning_rate"] == "0.003"
    assert run.data.params["model"] == "toy"
    scores = json.loads((directory / "scores.json").read_text())
    assert trial_run.read_scores() == Scores.from_dict(scores)
    assert run.data.metrics["words/mean"] == scores["mean"]["accuracy"]
    assert "words/de" in run.data.metrics
    assert run.data.metrics["words/dev"] == scores["dev"]["mean"]
    assert [step for step, _ in history(run.info.run_id, "dev/mean")] == [6, 12]
    assert (scores["training"]["steps"], scores["training"]["examples"]) == (12, 40)

    [tuned] = (path for path in (store / "tuned").iterdir() if path.is_dir())
    weights = tuned / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    # Like a bit that flips on the disk, the change leaves no trace in the times of the file.
    artifact_files.record_verified(tuned, artifact_files.compute_state(tuned))
    with pytest.raises(SystemExit) as exit_info:
        measure_trial(planned[WORDS], store, tmp_path, "toy-2")
    assert exit_info.value.code == 3


def test_other_test_sets_reuse_a_trained_model_and_other_seeds_do_not(planned, store, tmp_path):
    trial = planned["toy riddles seed 1"]
    german_test = str(Path(trial["settings"]["test"][0]) / "test-context-de-question-de.json")

    first = measure_trial(trial, store, tmp_path / "1")
    [tuned] = list_names(store, "tuned")
    german = measure_trial(change_settings(trial, test=[german_test]), store, tmp_path / "2", "toy-2")
    assert list_names(store, "tuned") == [tuned]
    other_seed = measure_trial(change_settings(trial, seed=2), store, tmp_path / "3", "toy-3")

    assert len({first, german, other_seed}) == 3
    assert len(list_names(store, "tuned")) == 2
    scores = json.loads((german / "scores.json").read_text())
    assert list(scores["languages"]) == ["de"]
    assert scores["training"]["tuned"] == f"tuned/{tuned}"
    assert scores["trained_on"] == ["en"]
    assert list_names(store, "runs") == []  # the checkpoints of finished trainings are deleted
    assert (store / f"tuned/.{tuned}.lock").is_file()  # a concurrent trial would have waited


def test_task_without_training_is_measured_once_under_two_names(planned, store, tmp_path):
    scores = measure_trial(planned["toy pairs"], store, tmp_path / "1")
    renamed_scores = measure_trial(rename(planned["toy pairs"], "tatoeba"), store, tmp_path / "2")

    assert scores == renamed_scores
    assert not (store / "tuned").exists()
    assert (scores / "misses.parquet").is_file()
    assert json.loads((scores / "scores.json").read_text())["training"] == {}
    metrics = {run.trial.task: set(run.metrics) for run in trial_runs.read_trials(tracking.open_run(str(store)).id)}
    assert "pairs/xx_en" in metrics["pairs"]
    assert "tatoeba/xx_en" in metrics["tatoeba"] - metrics["pairs"]


@pytest.fixture
def pairs(planned) -> dict[str, dict]:
    """Return two trials that train nothing, by name. The first cannot read its data."""
    trial = planned["toy pairs"]
    return {"gone": change_settings(rename(trial, "gone"), data="/nowhere"), "pairs": trial}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "error_class", "code", "finished"),
    [
        (None, "InputError", 2, ["toy pairs"]),
        (signal.SIGKILL, "WorkerLost", 75, ["toy pairs"]),
        (signal.SIGTERM, "Preempted", 75, []),
    ],
)
def test_failed_or_killed_trial_is_lost_alone_and_a_stopped_step_starts_no_other(
    pairs, store, tmp_path, number, error_class, code, finished
):
    def send_signal() -> None:
        until(multiprocessing.active_children)
        # The kernel kills a child that uses too much memory, but Kubernetes stops the step.
        process_id = multiprocessing.active_children()[0].pid if number == signal.SIGKILL else os.getpid()
        os.kill(process_id, number)

    if number:
        threading.Thread(target=send_signal).start()
    with pytest.raises(SystemExit) as exit_info:
        measure_batch(list(pairs.values()), store, tmp_path)

    outcome = json.loads((store / "outcome/toy-1/measure-toy-gone.json").read_text())
    assert exit_info.value.code == outcome["code"] == code
    assert (outcome["stage"], outcome["class"]) == ("measure toy gone", error_class)
    runs_of_trials = trial_runs.read_trials(tracking.open_run(str(store)).id)
    assert [run.trial.name for run in runs_of_trials if run.status == "FINISHED"] == finished


def test_more_metrics_than_one_request_accepts_are_logged(store):
    run_id = tracking.open_run(str(store)).id
    MlflowRun(run_id).log_metrics({f"pairs/x{number}": number / 2000 for number in range(1500)})

    assert len(connection.connect(store).get_run(run_id).data.metrics) == 1500

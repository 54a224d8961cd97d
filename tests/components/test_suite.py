"""The components of a suite, called as KFP calls them: what is looked at, trained, found again, told to MLflow."""

import json
import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path

import pytest
from kfp import dsl

from components.adapters.mlflow import connection, trial_runs
from components.adapters.mlflow.tracker import MlflowRun
from components.platform import artifact_files, artifacts, launchers, parameters, tracking
from components.suite import measure, plan_suite, summarise
from infoxlm_core import run_file
from infoxlm_core.results.suite_config import SuiteConfig
from infoxlm_core.tasks.scores import Scores
from tests.components.conftest import history
from tests.toys.suite import write_suite


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> SuiteConfig:
    return run_file.load_as(SuiteConfig, write_suite(tmp_path_factory.mktemp("suite")))


@pytest.fixture
def planned(config, store, monkeypatch) -> dict[str, dict]:
    """The points of a pipeline run, by name."""
    monkeypatch.setenv("RUN_ID", "toy-1")
    monkeypatch.setenv("RUN_NAME", "toy")
    batches = plan_suite.python_func(suite=config.listed(), store=str(store))
    items = [item for batch in batches for item in parameters.resolve(str(store), batch["points"])]
    return {item["point"]["name"]: json.loads(json.dumps(item)) for item in items}


def run_point(item: dict, store: Path, tmp_path: Path, run: str = "toy-1", workers: int = 0) -> Path:
    """Measure a point in a pipeline run; return where its scores are."""
    (made,) = run_batch([item], store, tmp_path, run, workers).values()
    return made


def run_batch(items: list[dict], store: Path, tmp_path: Path, run: str = "toy-1", workers: int = 0) -> dict[str, Path]:
    """Measure points in one step of a pipeline run; return where their scores are, by name."""
    os.environ["RUN_ID"] = run
    outputs = {name: kind(name=name, uri=str(tmp_path / name)) for name, kind in
               {"scores": dsl.Artifact, "metrics": dsl.Metrics}.items()}  # fmt: skip
    measure.python_func(batch={"points": items}, store=str(store), num_workers=workers, **outputs)
    said = json.loads(Path(outputs["scores"].path).read_text())
    return {name: artifacts.locate(one["location"]) for name, one in said.items()}


def changed(item: dict, **settings) -> dict:
    return item | {"settings": item["settings"] | settings}


def names(store: Path, kind: str) -> list[str]:
    return sorted(path.name for path in (store / kind).iterdir() if path.suffix != ".lock")


def test_every_point_is_planned_after_a_look_at_all_it_needs(planned, config):
    words = [f"toy words learning_rate={rate} seed 1" for rate in (0.003, 0.001)]
    assert list(planned) == [*words, "toy riddles seed 1", "toy pairs"]
    assert all(item["source"] == config.models["toy"] for item in planned.values())


def test_a_suite_can_be_changed_field_by_field_as_numbers_come_from_kubeflows_page(config, store):
    changes = {"tasks.riddles.seeds": [1.0, 2.0], "tasks.words.grid": {}}

    batches = plan_suite.python_func(suite=config.listed(), store=str(store), overrides=changes)

    points = [point for batch in batches for point in parameters.resolve(str(store), batch["points"])]
    planned = [point["point"]["name"] for point in points]
    assert planned == ["toy words seed 1", "toy riddles seed 1", "toy riddles seed 2", "toy pairs"]


def test_points_that_share_a_step_are_a_reference_that_the_step_reads(config, store, tmp_path, monkeypatch):
    monkeypatch.setenv("RUN_ID", "toy-1")
    monkeypatch.setattr(parameters, "MAX_LOOP_STEPS", 3)
    monkeypatch.setattr(parameters, "TRIALS_PER_STEP", 2)

    batches = plan_suite.python_func(suite=config.listed(), store=str(store))

    points = [parameters.resolve(str(store), batch["points"]) for batch in batches]
    assert list(map(len, points)) == [2, 2]
    alone = {"points": parameters.write_reference(str(store), [points[1][-1]])}
    outputs = {name: kind(name=name, uri=str(tmp_path / name)) for name, kind in
               {"scores": dsl.Artifact, "metrics": dsl.Metrics}.items()}  # fmt: skip
    measure.python_func(batch=alone, store=str(store), num_workers=0, **outputs)
    assert list(json.loads(Path(outputs["scores"].path).read_text())) == [points[1][-1]["point"]["name"]]


@pytest.mark.parametrize(
    ("overrides", "tracker", "message"),
    [
        ({"models.toy": "/nowhere"}, "mlflow", "/nowhere: no such file or directory: give a path, s3://"),
        (
            {"tasks.pairs.settings.data": "/nowhere"},
            "mlflow",
            "/nowhere: no such file or folder: give a path, or s3://",
        ),
        ({"tasks.riddles.seed": [1]}, "mlflow", "suite.tasks.riddles.seed: unknown name; known are"),
        ({}, "none", "a sweep reads its trials from a tracker"),
    ],
)
def test_a_suite_that_cannot_be_measured_fails_before_anything_is_trained(
    config, store, monkeypatch, overrides, tracker, message
):
    monkeypatch.setenv(tracking.VARIABLE, tracker)

    with pytest.raises(SystemExit) as ended:
        plan_suite.python_func(suite=config.listed(), store=str(store), overrides=overrides)

    outcome = json.loads((store / "outcome/by-hand/plan_suite.json").read_text())
    assert ended.value.code == 2 and outcome["stage"] == "plan_suite" and message in outcome["message"]


def test_a_tuned_model_that_is_damaged_without_a_trace_is_not_measured(planned, store, tmp_path):
    item = planned["toy words learning_rate=0.003 seed 1"]
    run_point(item, store, tmp_path)
    (tuned,) = (path for path in (store / "tuned").iterdir() if path.is_dir())
    weights = tuned / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    # as if a disk had flipped a bit: no time changes
    artifact_files.record_verified(tuned, artifact_files.file_state(tuned))

    with pytest.raises(SystemExit) as ended:
        run_point(item, store, tmp_path, run="toy-2")

    assert ended.value.code == 3


def test_a_point_has_a_run_of_its_own_with_tags_parameters_curve_metrics_and_scores(planned, store, tmp_path):
    made = run_point(planned["toy words learning_rate=0.003 seed 1"], store, tmp_path)

    client, parent = connection.connect(store), tracking.open_run(str(store)).id
    (trial,) = trial_runs.read(parent)
    run = client.get_run(trial.run_id)
    tags = {name: run.data.tags[name] for name in ("model", "task", "seed", "grid")}
    assert tags == {"model": "toy", "task": "words", "seed": "1", "grid": "optimization.learning_rate=0.003"}
    assert run.info.run_name == run.data.tags["point"] == "toy words learning_rate=0.003 seed 1"
    assert run.data.params["settings.optimization.learning_rate"] == "0.003" and run.data.params["model"] == "toy"
    assert run.info.status == "FINISHED" and run.data.tags["mlflow.parentRunId"] == parent
    scores = json.loads((made / "scores.json").read_text())
    assert {one.trial.name: one.read_scores() for one in trial_runs.read(parent)} == {
        run.info.run_name: Scores.from_dict(scores)
    }
    assert run.data.metrics["words/mean"] == scores["mean"]["accuracy"] and "words/de" in run.data.metrics
    assert [step for step, _ in history(run.info.run_id, "dev/mean")] == [6, 12]
    assert scores["training"] == {"steps": 12, "examples": 40} | scores["training"]
    assert client.get_run(run.info.run_id).data.metrics["words/dev"] == scores["dev"]["mean"]


def test_what_only_concerns_testing_retrains_nothing(planned, store, tmp_path, config):
    item = planned["toy riddles seed 1"]
    first = run_point(item, store, tmp_path / "1")
    one = str(Path(item["settings"]["test"][0]) / "test-context-de-question-de.json")
    tuned = names(store, "tuned")

    second = run_point(changed(item, test=[one]), store, tmp_path / "2", "toy-2")
    third = run_point(changed(item, seed=2), store, tmp_path / "3", "toy-3")

    assert len({first, second, third}) == 3
    assert list(json.loads((second / "scores.json").read_text())["languages"]) == ["de"]
    assert len(tuned) == 1 and len(names(store, "tuned")) == 2
    assert names(store, "runs") == []  # checkpoints of what is finished are gone
    assert (store / f"tuned/.{tuned[0]}.lock").is_file()  # nobody else could train the same meanwhile
    scores = json.loads((second / "scores.json").read_text())
    assert scores["training"]["tuned"] == f"tuned/{tuned[0]}" and scores["trained_on"] == ["en"]


def test_with_dropout_in_the_encoder_other_workers_are_another_training(planned, store, tmp_path, monkeypatch):
    monkeypatch.setitem(launchers.LAUNCHERS, "ray", launchers.process)
    item, made = planned["toy riddles seed 1"], {}
    for dropout in (0.0, 0.1):
        for workers in (0, 2):
            point = changed(item, dropout=dropout, optimization=item["settings"]["optimization"] | {"steps": 3})
            run_point(point, store, tmp_path / f"{dropout}-{workers}", f"toy-{dropout}", workers)
            made[dropout, workers] = set(names(store, "tuned"))

    assert made[0.0, 0] == made[0.0, 2] and len(made[0.1, 0]) == 2 and len(made[0.1, 2]) == 3


def test_an_encoder_is_measured_as_it_is_and_once_for_tasks_of_two_names(planned, store, tmp_path):
    item = planned["toy pairs"]
    other = item | {"point": item["point"] | {"task": "tatoeba", "name": "toy tatoeba"}}

    scores = run_point(item, store, tmp_path / "1")

    assert scores == run_point(other, store, tmp_path / "2")
    assert not (store / "tuned").exists() and (scores / "misses.parquet").is_file()
    assert json.loads((scores / "scores.json").read_text())["training"] == {}
    named = {run.trial.task: set(run.metrics) for run in trial_runs.read(tracking.open_run(str(store)).id)}
    assert "pairs/xx_en" in named["pairs"] and "tatoeba/xx_en" in named["tatoeba"] - named["pairs"]


@pytest.fixture
def pairs(planned) -> dict[str, dict]:
    """Two points that train nothing, by name; the first reads what is not there."""
    item = planned["toy pairs"]
    gone = item | {"point": item["point"] | {"task": "gone", "name": "toy gone"}}
    return {"gone": changed(gone, data="/nowhere"), "pairs": item}


@pytest.mark.slow
def test_a_point_of_a_batch_that_fails_fails_its_step_but_not_the_points_behind_it(pairs, store, tmp_path):
    with pytest.raises(SystemExit) as ended:
        run_batch(list(pairs.values()), store, tmp_path / "1")

    said = json.loads((store / "outcome/toy-1/measure-toy-gone.json").read_text())
    assert ended.value.code == 2 and (said["stage"], said["code"]) == ("measure toy gone", 2)
    found = trial_runs.read(tracking.open_run(str(store)).id)
    assert {one.trial.name: one.status for one in found} == {
        "toy gone": "RUNNING",
        "toy pairs": "FINISHED",
    }
    made = {path: path.stat().st_mtime_ns for path in (store / "points").glob("*/*")}

    run_point(pairs["pairs"], store, tmp_path / "2")  # alone it is the same, and nothing is done twice

    assert made and made == {path: path.stat().st_mtime_ns for path in (store / "points").glob("*/*")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "outcome", "finished"),
    [(signal.SIGKILL, "WorkerLost", ["toy pairs"]), (signal.SIGTERM, "Preempted", [])],
)
def test_a_point_that_is_killed_is_one_point_lost_and_a_step_that_must_go_begins_no_other(
    pairs, store, tmp_path, number, outcome, finished
):
    def end_first() -> None:
        while not (children := multiprocessing.active_children()):
            time.sleep(0.01)
        if number == signal.SIGKILL:
            children[0].kill()
        else:
            os.kill(os.getpid(), number)  # as Kubernetes does it, to the step

    thread = threading.Thread(target=end_first)
    thread.start()
    with pytest.raises(SystemExit) as ended:
        run_batch(list(pairs.values()), store, tmp_path)
    thread.join()

    said = json.loads((store / "outcome/toy-1/measure-toy-gone.json").read_text())
    assert ended.value.code == 75 and said["class"] == outcome
    found = trial_runs.read(tracking.open_run(str(store)).id)
    assert [one.trial.name for one in found if one.status == "FINISHED"] == finished


def test_the_summary_goes_to_the_pipelines_run_and_what_nobody_works_on_is_closed(planned, config, store, tmp_path):
    run_point(planned["toy pairs"], store, tmp_path / "kfp")
    abandoned = tracking.open_run(str(store), planned["toy riddles seed 1"]["point"]).id
    kinds = {"comparison": dsl.Artifact, "report": dsl.HTML, "metrics": dsl.Metrics}
    outputs = {name: kind(name=name, uri=str(tmp_path / "kfp" / name)) for name, kind in kinds.items()}

    parent = tracking.open_run(str(store)).id

    summarise.python_func(suite=config.listed(), store=str(store), **outputs)

    client = connection.connect(store)
    assert client.get_run(parent).info.status == "FAILED"  # not all of its points are finished
    made = artifacts.resolve(outputs["comparison"])[0]
    summary = json.loads((made / "suite.json").read_text())
    assert summary["unfinished"] == [name for name in planned if name != "toy pairs"]
    assert Path(outputs["report"].path).read_text() == (made / "suite.html").read_text()
    metrics = client.get_run(parent).data.metrics
    assert metrics["pairs/xx_en"] == outputs["metrics"].metadata["pairs_xx_en"]
    assert {"suite/suite.html", "suite/suite.json"} <= {a.path for a in client.list_artifacts(parent, "suite")}
    assert client.get_run(abandoned).info.status == "FAILED"


def test_more_metrics_than_one_request_takes_are_logged(store):
    run = tracking.open_run(str(store)).id
    MlflowRun(run).log_metrics({f"pairs/x{number}": number / 2000 for number in range(1500)})

    assert len(connection.connect(store).get_run(run).data.metrics) == 1500

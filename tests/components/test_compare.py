"""The trials of an ablation in MLflow: each a nested run, read back and compared, at once or months later."""

import json
import re
from pathlib import Path

import pytest
from kfp import dsl
from typer.testing import CliRunner

from components.adapters.mlflow import connection, runs, trial_runs
from components.adapters.mlflow.tracker import MlflowRun
from components.compare import compare
from components.platform import artifacts, tracking
from infoxlm_core.errors import InputError
from infoxlm_core.results.trials import Trial
from pipelines.cli import app
from tests.toys.evaluation import evaluated

TRIALS = [
    {"variant": variant, "seed": float(seed), "what": what}  # KFP makes 1.0 of 1
    for variant, what in (("full", "all of it"), ("-XLCO", "no contrast"), ("-TLM", ""))
    for seed in (1, 2)
]


@pytest.fixture
def ablation(store, monkeypatch) -> Path:
    """A store whose MLflow has an ablation: of -TLM seed 1 failed and seed 2 never began."""
    monkeypatch.setenv("RUN_ID", "toy-1")
    monkeypatch.setenv("RUN_NAME", "toy")
    for trial in TRIALS[:-1]:
        run = tracking.open_run(str(store), trial).id
        MlflowRun(run).log_params({"pretraining": {"seed": trial["seed"]}})
        MlflowRun(run).log_metrics({"loss/mlm": 5.0}, step=10)
        if trial["variant"] != "-TLM":
            base = 0.4 if trial["variant"] == "full" else 0.3
            MlflowRun(run).log_metrics({"retrieval/served": base + trial["seed"] / 1000, "loss/mlm": 4.0}, step=20)
            MlflowRun(run).end()
    return store


def run_component(store: Path, out: Path) -> tuple[Path, dict]:
    outputs = {name: kind(name=name, uri=str(out / name)) for name, kind in
               {"comparison": dsl.Artifact, "report": dsl.HTML, "metrics": dsl.Metrics}.items()}  # fmt: skip
    out.mkdir()
    compare.python_func(trials=[{"trial": trial, "pretraining": {}} for trial in TRIALS], store=str(store), **outputs)
    return artifacts.resolve(outputs["comparison"])[0], outputs


def test_a_retried_stage_finds_the_run_of_its_trial_and_opens_it_again(ablation):
    first = tracking.open_run(str(ablation), TRIALS[0]).id

    assert tracking.open_run(str(ablation), TRIALS[0]).id == first != tracking.open_run(str(ablation), TRIALS[1]).id
    assert connection.connect(ablation).get_run(first).info.status == "RUNNING"


def test_a_trial_of_a_platforms_task_is_nested_in_the_platforms_pipeline_run(store, monkeypatch):
    client = connection.connect(store)
    experiment = client.create_experiment("platform", (store / "mlartifacts").as_uri())
    pipeline = client.create_run(experiment).info.run_id
    task = client.create_run(experiment, tags={"mlflow.parentRunId": pipeline}).info.run_id
    monkeypatch.setenv("MLFLOW_RUN_ID", task)

    tracking.open_run(str(store), TRIALS[0]).end()

    (found,) = trial_runs.read(task)
    assert (found.trial.model, found.trial.seed) == ("full", 1) and runs.find_outermost(
        client, found.run_id
    ) == pipeline


def test_the_component_compares_finished_trials_and_ends_the_others_as_failed(ablation, tmp_path):
    parent = tracking.open_run(str(ablation)).id  # before the comparison, because opening a run sets it to RUNNING
    made, outputs = run_component(ablation, tmp_path / "kfp")

    compared = json.loads((made / "comparison.json").read_text())
    assert compared["title"] == "toy" and list(compared["variants"]) == ["full", "-XLCO", "-TLM"]
    assert compared["variants"]["-TLM"]["unfinished"] == [1, 2]
    assert compared["variants"]["full"]["metrics"]["retrieval/served"]["mean"] == pytest.approx(0.4015)
    assert "unfinished trials" in Path(outputs["report"].path).read_text().lower()
    assert outputs["metrics"].metadata["-XLCO_retrieval_served"] == pytest.approx(0.3015)
    client = connection.connect(ablation)
    run = client.get_run(parent)
    assert run.data.metrics["full/retrieval/served/n"] == 2 and run.info.status == "FAILED"
    names = {artifact.path for artifact in client.list_artifacts(parent, "comparison")}
    assert {f"comparison/comparison.{kind}" for kind in ("html", "json", "md")} <= names
    note = run.data.tags["mlflow.note.content"]
    assert f"/runs/{parent}/artifacts/comparison/comparison.html" in note and "Not finished: -TLM seed 1" in note
    unfinished = [trial_run for trial_run in trial_runs.read(parent) if trial_run.trial.model == "-TLM"]
    assert [trial_run.status for trial_run in unfinished] == ["FAILED", "FAILED"]


def test_an_ablation_whose_trials_have_all_finished_ends_as_finished(ablation, tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "TRIALS", TRIALS[:-2])
    parent = tracking.open_run(str(ablation)).id

    run_component(ablation, tmp_path / "kfp")

    assert connection.connect(ablation).get_run(parent).info.status == "FINISHED"


def test_the_command_prints_the_same_table_later_and_writes_it(ablation, tmp_path):
    made, _ = run_component(ablation, tmp_path / "kfp")
    arguments = ["compare", "--store", str(ablation), "--output", str(tmp_path / "out"), "--run", "toy"]
    result = CliRunner().invoke(app, arguments)

    assert result.exit_code == 0, result.output
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in result.stdout.splitlines()]
    assert ["full", "2", "40.15 ± 0.07"] in rows and ["-TLM", "0 of 2", "–"] in rows
    assert "Unfinished trials** are not included: -TLM seed 1, -TLM seed 2." in result.stdout
    assert result.stdout.startswith((made / "comparison.md").read_text())
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "comparison.html", "comparison.md", "comparison.json", "figures", "tables",
    }  # fmt: skip


def test_the_first_variant_of_the_file_is_the_reference_although_another_one_started_earlier(store):
    for rank, variant in ((1, "second"), (0, "first")):
        run = tracking.open_run(str(store), {"variant": variant, "seed": 1, "what": "", "rank": rank})
        MlflowRun(run.id).log_metrics({"retrieval/served": 0.4})
        run.end()

    result = CliRunner().invoke(app, ["compare", "--store", str(store)])

    assert result.exit_code == 0 and "minus the metric of first with" in result.stdout


def test_variants_are_compared_on_the_questions_that_both_answered(store, tmp_path):
    for rank, (variant, seed_scores) in enumerate({"first": (0.6, 0.5), "second": (0.5, 0.3)}.items()):
        for seed, score in enumerate(seed_scores, 1):
            run = tracking.open_run(str(store), {"variant": variant, "seed": seed, "what": "", "rank": rank})
            run.log_metrics({"retrieval/served": score, "perplexity/mean": 9.0})
            run.log_artifacts(evaluated(tmp_path / f"{variant} {seed}", score), "evaluation")
            run.end()

    result = CliRunner().invoke(app, ["compare", "--store", str(store)])

    table = result.stdout.split("## Differences over the questions")[1].split("##")[0]
    (row,) = [line for line in table.splitlines() if line.startswith("| second")]
    _, _, cell, _ = row.split("|")  # of retrieval only: perplexity is no share of correct answers
    gain, low, high = (float(number) for number in re.findall(r"-?\d+\.\d+", cell))
    assert gain == pytest.approx(-15) and -20 < low < -15 < high < -10


def test_other_metrics_are_compared_on_request(ablation):
    result = CliRunner().invoke(app, ["compare", "--store", str(ablation), "--metrics", "loss/mlm"])

    assert result.exit_code == 0 and "4.000 ± 0.000" in result.stdout and "retrieval" not in result.stdout


def test_the_newest_ablation_of_a_name_is_meant_and_an_unknown_one_refused(ablation, monkeypatch):
    first = tracking.open_run(str(ablation)).id
    monkeypatch.setenv("RUN_ID", "toy-2")
    tracking.open_run(str(ablation), TRIALS[0])
    second = tracking.open_run(str(ablation)).id

    assert trial_runs.find_ablation("toy", ablation) == trial_runs.find_ablation("latest", ablation) == second
    assert trial_runs.find_ablation(first, ablation) == first
    with pytest.raises(InputError, match=rf"no ablation 'other'; known are toy \({second}\), toy \({first}\)"):
        trial_runs.find_ablation("other", ablation)


def test_trials_of_an_older_version_are_found(store):
    """Their runs have the same tags and another key."""
    parent = tracking.open_run(str(store)).id
    client = connection.connect(store)
    tags = {"variant": "full", "seed": "1", "what": "all", "infoxlm.run": "toy-0/full/1", runs.PARENT: parent}
    old = client.create_run(client.get_run(parent).info.experiment_id, tags=tags, run_name="full seed 1").info.run_id
    MlflowRun(old).log_metrics({"retrieval/served": 0.4})
    MlflowRun(old).end()

    (found,) = trial_runs.read(parent)

    assert (found.run_id, found.trial) == (old, Trial("full seed 1", "full", 1, what="all"))
    assert found.metrics == {"retrieval/served": 0.4} and trial_runs.find_ablation("latest", store) == parent


def test_a_place_without_ablations_is_one_line_and_stays_empty(store, tmp_path):
    result = CliRunner().invoke(app, ["compare", "--store", str(tmp_path / "nowhere")])

    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "nowhere has no MLflow database" in result.stderr
    assert not (tmp_path / "nowhere").exists()

"""The trials of an ablation are nested runs in MLflow, which a component or a later command compares."""

import json
import re
from pathlib import Path

import pytest
from kfp import dsl
from typer.testing import CliRunner

from components.adapters.mlflow import connection, trial_runs
from components.adapters.mlflow.tracker import MlflowRun
from components.compare import compare
from components.platform import artifacts, tracking
from infoxlm_core.errors import InputError
from pipelines.cli import app
from tests.toys.evaluation import evaluated

TRIALS = [
    {"variant": variant, "seed": float(seed), "what": description}  # Kubeflow turns 1 into 1.0
    for variant, description in (("full", "all of it"), ("-XLCO", "no contrast"), ("-TLM", ""))
    for seed in (1, 2)
]


@pytest.fixture
def ablation(store, monkeypatch) -> Path:
    """Return a store whose MLflow has an ablation in which -TLM seed 1 failed and seed 2 never started."""
    monkeypatch.setenv("RUN_ID", "toy-1")
    monkeypatch.setenv("RUN_NAME", "toy")
    for trial in TRIALS[:-1]:
        run = MlflowRun(tracking.open_run(str(store), trial).id)
        run.log_metrics({"loss/mlm": 5.0}, step=10)
        if trial["variant"] != "-TLM":
            base = 0.4 if trial["variant"] == "full" else 0.3
            run.log_metrics({"retrieval/served": base + trial["seed"] / 1000, "loss/mlm": 4.0}, step=20)
            run.end()
    return store


def run_component(store: Path, folder: Path, trials: list[dict] = TRIALS) -> tuple[Path, dict]:
    """Call the component. Return the directory of the comparison, and the KFP outputs."""
    kinds = {"comparison": dsl.Artifact, "report": dsl.HTML, "metrics": dsl.Metrics}
    outputs = {name: kind(name=name, uri=str(folder / name)) for name, kind in kinds.items()}
    folder.mkdir()
    compare.python_func(trials=[{"trial": trial, "pretraining": {}} for trial in trials], store=str(store), **outputs)
    return artifacts.resolve(outputs["comparison"])[0], outputs


def test_component_compares_finished_trials_and_fails_unfinished_ones(ablation, tmp_path):
    parent = tracking.open_run(str(ablation)).id  # before the comparison, because opening a run sets it to RUNNING

    directory, outputs = run_component(ablation, tmp_path / "kfp")

    comparison = json.loads((directory / "comparison.json").read_text())
    assert list(comparison["variants"]) == ["full", "-XLCO", "-TLM"]
    assert comparison["variants"]["-TLM"]["unfinished"] == [1, 2]
    assert comparison["variants"]["full"]["metrics"]["retrieval/served"]["mean"] == pytest.approx(0.4015)
    assert outputs["metrics"].metadata["-XLCO_retrieval_served"] == pytest.approx(0.3015)
    client = connection.connect(ablation)
    run = client.get_run(parent)
    assert run.info.status == "FAILED"
    assert run.data.metrics["full/retrieval/served/n"] == 2
    description = run.data.tags["mlflow.note.content"]
    assert f"/runs/{parent}/artifacts/comparison/comparison.html" in description
    assert "Not finished: -TLM seed 1" in description
    unfinished = [trial_run for trial_run in trial_runs.read_trials(parent) if trial_run.trial.model == "-TLM"]
    assert [trial_run.status for trial_run in unfinished] == ["FAILED", "FAILED"]


def test_ablation_with_only_finished_trials_ends_as_finished(ablation, tmp_path):
    parent = tracking.open_run(str(ablation)).id

    run_component(ablation, tmp_path / "kfp", TRIALS[:-2])

    assert connection.connect(ablation).get_run(parent).info.status == "FINISHED"


def test_command_prints_and_writes_the_same_comparison(ablation, tmp_path):
    directory, _ = run_component(ablation, tmp_path / "kfp")

    result = CliRunner().invoke(
        app, ["compare", "--store", str(ablation), "--output", str(tmp_path / "out"), "--run", "toy"]
    )

    assert result.exit_code == 0, result.output
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in result.stdout.splitlines()]
    assert ["full", "2", "40.15 ± 0.07"] in rows
    assert ["-TLM", "0 of 2", "–"] in rows
    assert result.stdout.startswith((directory / "comparison.md").read_text())
    file_names = {path.name for path in (tmp_path / "out").iterdir()}
    assert file_names == {"comparison.html", "comparison.md", "comparison.json", "figures", "tables"}
    losses = CliRunner().invoke(app, ["compare", "--store", str(ablation), "--metrics", "loss/mlm"]).stdout
    assert "4.000 ± 0.000" in losses
    assert "retrieval" not in losses


def test_reference_is_the_first_variant_of_the_plan_and_questions_are_paired(store, tmp_path):
    for rank, variant, scores in ((1, "second", (0.5, 0.3)), (0, "first", (0.6, 0.5))):  # the reference starts later
        for seed, score in enumerate(scores, 1):
            run = tracking.open_run(str(store), {"variant": variant, "seed": seed, "what": "", "rank": rank})
            run.log_metrics({"retrieval/served": score, "perplexity/mean": 9.0})
            run.log_artifacts(evaluated(tmp_path / f"{variant} {seed}", score), "evaluation")
            run.end()

    result = CliRunner().invoke(app, ["compare", "--store", str(store)])

    assert "minus that of first with" in result.stdout
    table = result.stdout.split("## Differences over the questions")[1].split("##")[0]
    [row] = [line for line in table.splitlines() if line.startswith("| second")]
    _, _, cell, _ = row.split("|")  # only retrieval, because perplexity is no share of correct answers
    gain, low, high = (float(number) for number in re.findall(r"-?\d+\.\d+", cell))
    assert gain == pytest.approx(-15)
    assert -20 < low < -15 < high < -10


def test_name_selects_the_newest_ablation_and_an_unknown_name_is_refused(ablation, monkeypatch):
    first = tracking.open_run(str(ablation)).id
    monkeypatch.setenv("RUN_ID", "toy-2")
    tracking.open_run(str(ablation), TRIALS[0])
    second = tracking.open_run(str(ablation)).id

    assert trial_runs.find_ablation("toy", ablation) == second
    assert trial_runs.find_ablation("latest", ablation) == second
    assert trial_runs.find_ablation(first, ablation) == first
    with pytest.raises(InputError, match=rf"no ablation 'other'; known are toy \({second}\), toy \({first}\)"):
        trial_runs.find_ablation("other", ablation)


def test_store_without_ablations_is_refused_and_not_created(clean_environment, tmp_path):
    result = CliRunner().invoke(app, ["compare", "--store", str(tmp_path / "nowhere")])

    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "nowhere has no MLflow database" in result.stderr
    assert not (tmp_path / "nowhere").exists()

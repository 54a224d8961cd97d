"""The whole DAG as a user runs it: killed in the middle, repeated, registered, and used from the registry."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from infoxlm_core.config import PretrainingConfig
from infoxlm_core.stages.pretraining import pretrain
from infoxlm_core.training import tracker
from pipelines.cli import app
from tests.helpers.commands import environment, infoxlm, only, runs_of
from tests.toys.run import STEPS

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]


@pytest.mark.item("F02")
def test_the_killed_run_ends_with_the_losses_of_an_undisturbed_one(finished, tmp_path):
    values = yaml.safe_load((finished.parent / "toy.yaml").read_text())["pretraining"]
    pretrain(PretrainingConfig.parse(values), only(finished, "shards/[!.]*"), tmp_path / "out", tmp_path / "run")

    expected = tracker.read(tmp_path / "run" / tracker.METRICS)
    points = tracker.read(only(finished, "pretrained/*/encoder/metrics.jsonl"))
    assert [step for step, _ in points] == [step for step, _ in expected]
    for name in ("loss/mlm", "loss/tlm", "loss/xlco"):
        assert [values[name].hex() for _, values in points] == [values[name].hex() for _, values in expected]


def test_the_killed_run_continues_after_a_change_of_the_code_and_logs_the_change(finished):
    lines = (finished.parent / "stdout").read_text().splitlines()

    (line,) = [line for line in lines if "resumes with changes:" in line]
    assert re.search(r"/runs/pretrained-\w+ resumes with changes: code was 'sha256:\w+', is 'sha256:\w+'$", line)
    assert len(list(finished.glob("runs/pretrained-*"))) == len(list(finished.glob("corpus/[!.]*"))) == 1


def test_the_encoder_learned_to_align_translations(finished):
    metrics = json.loads(only(finished, "scores/*/manifest.json").read_text())["facts"]

    assert metrics["retrieval/served"] > 2 * metrics["untrained/retrieval/served"]
    assert metrics["perplexity/mean"] < metrics["untrained/perplexity/mean"] / 2


@pytest.mark.item("P15")
def test_the_corpus_counts_every_line_and_trains_on_no_held_out_text(finished):
    import pyarrow.parquet as pq

    corpus = only(finished, "corpus/[!.]*")
    for entry in json.loads((corpus / "report.json").read_text())["files"]:
        assert entry["read"] == entry["kept"] + sum(entry["dropped"].values())

    def read_texts(kind: str) -> set[str]:
        texts: set[str] = set()
        for path in corpus.glob(f"{kind}/*/*.parquet"):
            for column in pq.read_table(path):
                texts.update(column.to_pylist())
        return texts

    held_out, training = read_texts("held_out"), read_texts("mono") | read_texts("pairs")
    assert len(held_out) > 200 and len(training) > 2000 and not held_out & training


def test_mlflow_has_the_curves_the_settings_the_report_and_one_champion(finished, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    import mlflow

    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{finished}/mlflow.db")
    (experiment,) = client.search_experiments(filter_string="name = 'infoxlm'")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["pretraining.contrast.momentum"] == "0.99"
    curve = client.get_metric_history(run.info.run_id, "loss/xlco")
    assert [point.step for point in curve] == list(range(10, STEPS + 1, 10))
    assert run.data.metrics["retrieval/served"] > 0
    assert {"finetune/loss/classification", "finetune_of_start/loss/classification"} <= set(run.data.metrics)
    assert "evaluation/report.html" in [a.path for a in client.list_artifacts(run.info.run_id, "evaluation")]
    (version,) = client.search_model_versions("name = 'toy'")
    assert client.get_model_version_by_alias("toy", "champion").version == version.version
    assert client.get_model_version_by_alias("toy", "candidate").version == version.version


def test_mlflow_describes_the_run_its_corpora_and_its_main_metrics(finished, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    _, run, _ = runs_of(finished)

    note, metrics = run.data.tags["mlflow.note.content"], run.data.metrics
    assert "**InfoXLM**, 2 layers of 32" in note and "Evaluated on held, in" in note and "| retrieval/served |" in note
    assert f"/runs/{run.info.run_id}/artifacts/evaluation/report.html" in note
    contexts = {entry.dataset.name: entry.tags[0].value for entry in run.inputs.dataset_inputs}
    assert contexts == {"mail": "training", "wiki": "training", "shop": "training", "held": "evaluation"}
    headlines = [name for name in metrics if name.startswith("headline/")]
    assert metrics["headline/retrieval_served"] == metrics["retrieval/served"] and 0 < len(headlines) <= 6


def test_kubeflow_gets_the_report_and_a_model_card_without_metadata_for_the_hub(finished):
    (output,) = [path.parent for path in finished.glob("pipeline/*/infoxlm*/evaluate/model_card")][:1]

    assert (output / "model_card").read_text().lstrip().startswith("# InfoXLM")
    assert "<html" in (output / "report").read_text()


def test_the_run_says_what_each_step_has_cost(finished, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    client, run, _ = runs_of(finished)
    metrics = {name: value for name, value in run.data.metrics.items() if name.startswith("cost/")}
    hours = {name.rpartition("/")[2]: value for name, value in metrics.items()}

    total = hours.pop("all")
    steps = ["prepare_corpus", "tokenize_corpus", "pretrain", "finetune", "finetune_of_start", "evaluate"]
    assert sorted(hours) == sorted(steps) and all(name.startswith("cost/cpu_hours/") for name in metrics)
    assert 0 < total == pytest.approx(sum(hours.values())) and min(hours.values()) > 0
    assert f"| cost/cpu_hours/all | {total:.4g} |" in run.data.tags["mlflow.note.content"]
    attempts = [json.loads(path.read_text()) for path in finished.glob("cost/*/pretrained/*/*.json")]
    seconds = sum(attempt["seconds"] * attempt["devices"] for attempt in attempts)
    assert hours["pretrain"] == pytest.approx(seconds / 3600)
    (output,) = [path.parent for path in finished.glob("pipeline/*/infoxlm*/evaluate/model_card")][:1]
    shown = Path(client.download_artifacts(run.info.run_id, "evaluation/report.html")).read_text()
    assert shown == (output / "report").read_text() == only(finished, "scores/*/report.html").read_text()


def test_no_result_and_curve_share_a_name_in_mlflow(finished, monkeypatch):
    """A result of a stage is one point at step 0; a curve has steps from 1 on."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    client, run, _ = runs_of(finished)

    steps = {name: [p.step for p in client.get_metric_history(run.info.run_id, name)] for name in run.data.metrics}
    assert steps["shards/tokens"] == [0] and len(steps["tokens"]) > 1
    assert {name: of_metric for name, of_metric in steps.items() if 0 in of_metric and of_metric != [0]} == {}


def test_the_champion_embeds_translations_close_together(finished, clean_environment):
    english, german = "Save the new page of the library now", "Speichere der neue Seite aus der der Bücherei"
    another = "Drucke der alte Taste aus der der Leitung"

    arguments = ["embed", "models:/toy@champion", english, german, another, "--store", str(finished)]
    result = CliRunner().invoke(app, arguments)

    assert result.exit_code == 0, result.stderr
    similarities = [float(line.split()[0]) for line in result.stdout.splitlines()]
    assert similarities[0] == 1.0 and similarities[1] > similarities[2] + 0.2


def test_the_commands_of_the_tutorial_work_on_a_finished_run(finished, tmp_path):
    """Commands that train, prepare a shell, use the network or start a server are left out."""
    tutorial = (ROOT / "docs/tutorial.md").read_text(encoding="utf-8")
    commands = "".join(re.findall(r"```bash\n(.*?)```", tutorial, re.DOTALL)).splitlines()
    left_out = ("infoxlm run", "export PATH", "mkdir", "pip download", "mlflow ui")
    (tmp_path / "sentences.txt").write_text("Save your changes\nSupprimer le compte\n", encoding="utf-8")
    variables = environment()
    variables["PATH"] = f"{Path(sys.executable).parent}:{variables['PATH']}"

    output = []
    for command in commands:
        if not command.startswith(left_out):
            command = command.replace("models:/mine", "models:/toy")
            command = command.replace("store runs", f"store {finished}")
            command = command.replace("runs/mlflow.db", f"{finished}/mlflow.db")
            done = subprocess.run(command, shell=True, cwd=tmp_path, env=variables, capture_output=True, text=True)
            assert done.returncode == 0, f"{command}\n{done.stderr[-3000:]}"
            output.append(done.stdout)

    assert len(output) == 5
    assert "models:/toy@champion is version 1" in output[0] and output[1].strip().startswith("1.0000  Save")
    assert (tmp_path / "sentence-encoder/modules.json").exists()
    assert len(np.load(tmp_path / "vectors.npy")) == 2


@pytest.mark.item("F14")
def test_a_repeated_run_finds_everything_and_registers_nothing(finished):
    times = {path: path.stat().st_mtime for path in finished.glob("*/*/manifest.json")}

    again = infoxlm("run", str(finished.parent / "toy.yaml"), "--store", str(finished))

    assert again.returncode == 0, again.stderr
    assert "retrieval/served" in again.stdout and (only(finished, "scores/*") / "report.html").exists()
    assert {path: path.stat().st_mtime for path in finished.glob("*/*/manifest.json")} == times
    assert again.stdout.count("which was built from the same inputs") == 6  # all but register


@pytest.mark.item("P21")
def test_bad_input_ends_the_pipeline_with_its_line_and_exit_code(finished, tmp_path, clean_environment):
    values = yaml.safe_load((finished.parent / "toy.yaml").read_text())
    (tmp_path / "a.en").write_text("one line here\nanother line here\n")
    (tmp_path / "a.de").write_text("nur eine Zeile hier\n")
    values["preparation"]["corpora"] = [
        {
            "name": "a",
            "format": "moses",
            "path": [str(tmp_path / "a.en"), str(tmp_path / "a.de")],
            "languages": ["en", "de"],
        }
    ]
    values["preparation"] |= {"held_out": [], "held_out_share": 0.1, "labelled_share": 0}
    (tmp_path / "bad.yaml").write_text(yaml.safe_dump(values))

    result = infoxlm("run", str(tmp_path / "bad.yaml"), "--store", str(tmp_path / "store"))

    assert result.returncode == 2
    line = result.stderr.strip().splitlines()[-1]
    assert line.startswith("infoxlm: ParallelMismatch: prepare_corpus:") and "a.en" in line
    assert not list((tmp_path / "store").glob("corpus/[!.]*"))
    _, parent, _ = runs_of(tmp_path / "store")
    assert (parent.info.status, parent.data.tags["infoxlm.failed_stage"]) == ("FAILED", "prepare_corpus")
    assert parent.data.tags["infoxlm.error"] in line

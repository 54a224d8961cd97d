"""The commands `promote` and `rollback`, and the pipeline of a promotion, change the champion of a real registry."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import Result
from mlflow.entities import Run

from components.adapters.mlflow import connection, model_registry, promotion, runs
from components.platform import artifacts
from infoxlm_core.errors import NotPromoted
from pipelines import local
from pipelines.promotion import promotion as pipeline
from tests.pipelines.commands import assert_refused, invoke
from tests.toys.evaluation import evaluated

METRIC = "retrieval/served"


def register(store: Path, encoder: Path, name: str, score: float, least_gain: float) -> None:
    run_id = runs.open_run("tests", "demo", {"infoxlm.run": name}, store)
    evaluation = evaluated(store / "evaluation", score)
    candidate = model_registry.EvaluatedEncoder(encoder, f"sha256:{name}", {METRIC: score}, run_id, {}, evaluation)
    model_registry.register("tiny", candidate, {METRIC: least_gain})


@pytest.fixture
def registry(store, tiny_encoders) -> Path:
    """Return the store of a model whose champion is version 1, and whose version 2 is better by 0.1."""
    register(store, tiny_encoders["first"], "first", 0.5, 0.0)
    register(store, tiny_encoders["second"], "second", 0.6, 0.5)
    return store


def run_command(registry: Path, *arguments: str) -> Result:
    return invoke(*arguments, "--store", registry)


def champion_version(registry: Path) -> int:
    return int(connection.connect(registry).get_registered_model("tiny").aliases["champion"])


def test_candidate_is_promoted_and_rolled_back(registry):
    refused = run_command(registry, "promote", "models:/tiny@candidate", "--metric", f"{METRIC}=0.2")
    assert (refused.exit_code, champion_version(registry)) == (2, 1)
    assert refused.stderr.splitlines()[-1].startswith("infoxlm: NotPromoted: models:/tiny/2 stays candidate")

    promoted = run_command(registry, "promote", "models:/tiny@candidate")
    assert (promoted.exit_code, champion_version(registry)) == (0, 2)
    verdict = "champion, better than version 1: retrieval/served +0.1000"
    assert f"models:/tiny@champion is version 2: {verdict}" in promoted.stdout

    rolled_back = run_command(registry, "rollback", "tiny", "--reason", "German got worse")
    assert (rolled_back.exit_code, champion_version(registry)) == (0, 1)
    assert "models:/tiny@champion is version 1" in rolled_back.stdout


@pytest.mark.item("P11")
@pytest.mark.slow
def test_concurrent_promotion_waits_and_is_compared_with_the_new_champion(registry, tiny_encoders):
    register(registry, tiny_encoders["first"], "third", 0.7, 0.5)
    command = [sys.executable, "-c", "from pipelines.cli import app; app()", "promote", "models:/tiny/2"]

    with artifacts.exclusive(str(registry), *promotion.LOCK):  # as another process that promotes
        waiting = subprocess.Popen([*command, "--store", registry], stderr=subprocess.PIPE, text=True)
        assert any("waiting" in line for line in waiting.stderr)
        promotion.promote_model("models:/tiny/3", {METRIC: 0.0}, registry)
    _, errors = waiting.communicate()

    assert (waiting.returncode, champion_version(registry)) == (2, 3)
    assert "models:/tiny/2 stays candidate, not shown to be better than version 3" in errors


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        ("retrieval/served=much", "'much' is not a number"),
        ("retrieval/served=5", "--metric.gate.retrieval/served: Input should be less than 1, not 5"),
    ],
)
def test_invalid_margin_is_refused(tmp_path, metric, message):
    assert_refused(run_command(tmp_path, "promote", "models:/tiny@candidate", "--metric", metric), message)


def list_promotion_runs(registry: Path) -> list[Run]:
    """Return the MLflow runs of the pipeline `promotion`, newest first."""
    client = connection.connect(registry)
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    return client.search_runs(experiments, "tags.`infoxlm.run` LIKE 'promotion-%'", order_by=["start_time DESC"])


@pytest.mark.slow
def test_pipeline_records_a_refusal_and_a_promotion_in_its_run(registry):
    arguments = {"model": "models:/tiny/2", "gate": {METRIC: 0.2}, "to": "", "by_hand": ""}
    with pytest.raises(NotPromoted, match=r"promote: models:/tiny/2 stays candidate, not shown to be better"):
        local.run_pipeline(pipeline, arguments, registry, "promotion")
    assert champion_version(registry) == 1
    [refused] = list_promotion_runs(registry)
    assert (refused.info.status, refused.data.tags["infoxlm.failed_stage"]) == ("FAILED", "promote")
    assert "models:/tiny/2 stays candidate" in refused.data.tags["infoxlm.error"]

    local.run_pipeline(pipeline, arguments | {"gate": {METRIC: 0.0}}, registry, "promotion")

    assert champion_version(registry) == 2
    assert "models:/tiny@champion is version 2: " in local.read_summary(registry)
    metrics = list_promotion_runs(registry)[0].data.metrics
    assert metrics["retrieval/served/gain"] == pytest.approx(0.1)
    assert 0 < metrics["retrieval/served/lower"] < metrics["retrieval/served/gain"]
    version = connection.connect(registry).get_model_version("tiny", "2")
    assert json.loads(version.tags["decision"])["by"]["run"].startswith("promotion-")


@pytest.mark.slow
def test_pipeline_promotes_on_another_server_and_reports_to_its_own(registry, mlflow_server, monkeypatch):
    arguments = {"model": "models:/tiny/2", "gate": {METRIC: 0.0}, "to": f"{mlflow_server}/served", "by_hand": ""}

    local.run_pipeline(pipeline, arguments, registry, "promotion")

    assert [run.info.status for run in list_promotion_runs(registry)] == ["FINISHED"]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_server)
    client = connection.connect(registry)
    assert client.get_model_version_by_alias("served", "champion").tags["copied_from"].endswith("models:/tiny/2")

"""The commands `promote` and `rollback`, and the pipeline of a promotion, on a real registry."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from components.adapters.mlflow import connection, model_registry, promotion, runs
from components.platform import artifacts
from infoxlm_core.errors import NotPromoted
from pipelines import local
from pipelines.cli import app
from pipelines.promotion import promotion as pipeline
from tests.toys.evaluation import evaluated

METRIC = "retrieval/served"


def register(store: Path, encoder: Path, name: str, score: float, least_gain: float) -> None:
    run_id = runs.open_run("tests", "demo", {"infoxlm.run": name}, store)
    evaluation = evaluated(store / "evaluation", score)
    candidate = model_registry.EvaluatedEncoder(encoder, f"sha256:{name}", {METRIC: score}, run_id, {}, evaluation)
    model_registry.register("tiny", candidate, {METRIC: least_gain})


@pytest.fixture
def registry(store, tiny_encoders) -> Path:
    """The store of a model whose champion is version 1; version 2 is better."""
    register(store, tiny_encoders["first"], "first", 0.5, 0.0)
    register(store, tiny_encoders["second"], "second", 0.6, 0.5)
    return store


def run(registry: Path, *arguments: str):
    return CliRunner().invoke(app, [*arguments, "--store", str(registry)])


def champion(registry: Path) -> int:
    return int(connection.connect(registry).get_registered_model("tiny").aliases["champion"])


def test_a_candidate_is_promoted_and_rolled_back_from_the_shell(registry):
    refused = run(registry, "promote", "models:/tiny@candidate", "--metric", f"{METRIC}=0.2")
    assert refused.exit_code == 2 and champion(registry) == 1
    assert refused.stderr.strip().splitlines()[-1].startswith("infoxlm: NotPromoted: models:/tiny/2 stays candidate")

    promoted = run(registry, "promote", "models:/tiny@candidate")
    assert promoted.exit_code == 0 and champion(registry) == 2
    verdict = "champion, better than version 1: retrieval/served +0.1000"
    assert f"models:/tiny@champion is version 2: {verdict}" in promoted.stdout

    back = run(registry, "rollback", "tiny", "--reason", "German got worse")
    assert back.exit_code == 0 and champion(registry) == 1
    assert "models:/tiny@champion is version 1" in back.stdout


@pytest.mark.item("P11")
@pytest.mark.slow
def test_a_second_promotion_waits_and_is_compared_with_the_new_champion(registry, tiny_encoders):
    register(registry, tiny_encoders["first"], "third", 0.7, 0.5)
    command = [sys.executable, "-c", "from pipelines.cli import app; app()", "promote", "models:/tiny/2"]
    with artifacts.exclusive(str(registry), *promotion.LOCK):  # as another process that promotes
        waiting = subprocess.Popen([*command, "--store", registry], stderr=subprocess.PIPE, text=True)
        assert any("waiting" in line for line in waiting.stderr)
        promotion.promote_model("models:/tiny/3", {METRIC: 0.0}, registry)
    _, errors = waiting.communicate(timeout=120)

    assert (waiting.returncode, champion(registry)) == (2, 3)
    assert "models:/tiny/2 stays candidate, not shown to be better than version 3" in errors


@pytest.mark.parametrize(
    ("metric", "said"),
    [
        ("retrieval/served=much", "'much' is not a number"),
        ("a=5", "Give one between -1 and 1, because scores are fractions."),
    ],
)
def test_a_wrong_margin_is_one_line(registry, metric, said):
    result = run(registry, "promote", "models:/tiny@candidate", "--metric", metric)

    assert result.exit_code == 2 and said in result.stderr and result.stderr.count("\n") == 1


def promotions(registry: Path) -> list:
    """Return the MLflow runs of the pipeline `promotion`, newest first."""
    client = connection.connect(registry)
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    return client.search_runs(experiments, "tags.`infoxlm.run` LIKE 'promotion-%'", order_by=["start_time DESC"])


@pytest.mark.slow
def test_the_pipeline_promotes_or_fails_with_the_figures_in_its_own_run(registry):
    arguments = {"model": "models:/tiny/2", "gate": {METRIC: 0.2}, "to": "", "by_hand": ""}
    with pytest.raises(NotPromoted, match=r"promote: models:/tiny/2 stays candidate, not shown to be better"):
        local.run(pipeline, arguments, registry, "promotion")
    assert champion(registry) == 1

    [refused] = promotions(registry)
    assert (refused.info.status, refused.data.tags["infoxlm.failed_stage"]) == ("FAILED", "promote")
    assert "models:/tiny/2 stays candidate" in refused.data.tags["infoxlm.error"]

    local.run(pipeline, arguments | {"gate": {METRIC: 0.0}}, registry, "promotion")

    client = connection.connect(registry)
    figures = promotions(registry)[0].data.metrics
    assert "models:/tiny@champion is version 2: " in local.read_summary(registry)
    assert champion(registry) == 2
    assert 0 < figures["retrieval/served/lower"] < figures["retrieval/served/gain"] == pytest.approx(0.1)
    said = json.loads(client.get_model_version("tiny", "2").tags["decision"])
    assert said["by"]["run"].startswith("promotion-")


@pytest.mark.slow
def test_the_pipeline_promotes_on_another_server_and_reports_on_its_own(registry, mlflow_server, monkeypatch):
    arguments = {"model": "models:/tiny/2", "gate": {METRIC: 0.0}, "to": f"{mlflow_server}/served", "by_hand": ""}

    local.run(pipeline, arguments, registry, "promotion")

    assert [run.info.status for run in promotions(registry)] == ["FINISHED"]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_server)
    client = connection.connect(registry)
    assert client.get_model_version_by_alias("served", "champion").tags["copied_from"].endswith("models:/tiny/2")

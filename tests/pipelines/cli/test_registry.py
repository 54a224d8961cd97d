"""The commands `promote` and `rollback`, and the pipeline of a promotion, on a real registry."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from components.adapters.mlflow import connection, model_registry, runs
from infoxlm_core.errors import NotPromoted
from pipelines import local
from pipelines.cli import app
from pipelines.promotion import promotion
from tests.toys.evaluation import evaluated

METRIC = "retrieval/best"


@pytest.fixture
def registry(store, tiny_encoders) -> Path:
    """The store of a model whose champion is version 1; version 2 is better."""
    for score, name, gate in ((0.5, "first", 0.0), (0.6, "second", 0.5)):
        run_id = runs.open_run("tests", "demo", {"infoxlm.run": name}, store)
        evaluation = evaluated(store / "evaluation", score)
        model_registry.register(
            "tiny", tiny_encoders[name], f"sha256:{name}", {METRIC: score}, {METRIC: gate}, run_id, {}, evaluation
        )
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
    assert (
        "models:/tiny@champion is version 2: champion, better than version 1: retrieval/best +0.1000" in promoted.stdout
    )

    back = run(registry, "rollback", "tiny", "--reason", "German got worse")
    assert back.exit_code == 0 and champion(registry) == 1
    assert "models:/tiny@champion is version 1" in back.stdout


@pytest.mark.parametrize(
    ("metric", "said"), [("retrieval/best=much", "'much' is no number"), ("a=5", "shares from 0 to 1")]
)
def test_a_wrong_margin_is_one_line(registry, metric, said):
    result = run(registry, "promote", "models:/tiny@candidate", "--metric", metric)

    assert result.exit_code == 2 and said in result.stderr and result.stderr.count("\n") == 1


@pytest.mark.slow
def test_the_pipeline_promotes_or_fails_with_the_figures_in_its_own_run(registry):
    arguments = {"model": "models:/tiny/2", "gate": {METRIC: 0.2}, "to": "", "by_hand": ""}
    with pytest.raises(NotPromoted, match=r"promote: models:/tiny/2 stays candidate, not shown to be better"):
        local.run(promotion, arguments, registry, "promotion")
    assert champion(registry) == 1

    done = local.run(promotion, arguments | {"gate": {METRIC: 0.0}}, registry, "promotion")

    client = connection.connect(registry)
    figures = client.get_run(done.id).data.metrics
    assert champion(registry) == 2
    assert 0 < figures["retrieval/best/lower"] < figures["retrieval/best/gain"] == pytest.approx(0.1)
    said = json.loads(client.get_model_version("tiny", "2").tags["decision"])
    assert said["by"]["run"].startswith("promotion-")


@pytest.mark.slow
def test_the_pipeline_promotes_on_another_server_and_reports_on_its_own(registry, mlflow_server, monkeypatch):
    arguments = {"model": "models:/tiny/2", "gate": {METRIC: 0.0}, "to": f"{mlflow_server}/served", "by_hand": ""}

    done = local.run(promotion, arguments, registry, "promotion")

    assert connection.connect(registry).get_run(done.id).info.status == "FINISHED"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_server)
    client = connection.connect(registry)
    assert client.get_model_version_by_alias("served", "champion").tags["copied_from"].endswith("models:/tiny/2")

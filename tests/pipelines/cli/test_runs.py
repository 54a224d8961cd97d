"""`infoxlm plan`: what it prints, and one line where it refuses."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from pipelines.cli import app

CONFIGS = Path(__file__).parents[3] / "configs"


def run(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


@pytest.mark.parametrize("name", ["base", "large", "base15", "demo"])
def test_every_run_can_be_planned_without_data_weights_or_network(name):
    result = run("plan", str(CONFIGS / f"{name}.yaml"), "--gpus", "4", "--gpu", "h100")

    assert result.exit_code == 0, result.stderr
    said = ("key encoder", "PFLOP", "word table", "assumed MFU", "4 GPUs", "checkpoint")
    assert all(words in result.stdout for words in said)


def test_an_override_reaches_the_plan_and_what_cannot_be_planned_is_one_line():
    base = str(CONFIGS / "base.yaml")

    assert "K 65,536 keys" in run("plan", base, "--set", "pretraining.contrast.queue_size=65536").stdout
    result = run("plan", base, "--gpus", "1" + 30 * "0")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1) and "give 1 to 256" in result.stderr
    assert "4 GPUs" in run("plan", str(CONFIGS / "demo.yaml")).stdout  # of eight a run of 4 virtual shards has no use
    result = run("plan", base, "--gpu", "abacus")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1) and "give one of A100, B200, H100," in result.stderr

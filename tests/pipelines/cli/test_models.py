"""`infoxlm plan` and `infoxlm import`: what they print, and one line where they refuse."""

import argparse
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from pipelines.cli import app
from tests.toy_fairseq import infoxlm_checkpoint, model_tensors

CONFIGS = Path(__file__).parents[3] / "configs"


def run(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


@pytest.mark.parametrize("name", ["base", "large", "base15", "demo"])
def test_every_run_can_be_planned_without_data_weights_or_network(name):
    result = run("plan", str(CONFIGS / f"{name}.yaml"), "--gpus", "16", "--gpu", "h100")

    assert result.exit_code == 0, result.stderr
    assert all(said in result.stdout for said in ("key encoder", "PFLOP", "assuming MFU 0.40", "16 GPUs", "checkpoint"))


def test_an_override_reaches_the_plan_and_an_unknown_gpu_is_one_line():
    base = str(CONFIGS / "base.yaml")

    assert "K 65,536 keys" in run("plan", base, "--set", "pretraining.contrast.queue_size=65536").stdout
    result = run("plan", base, "--gpu", "abacus")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1) and "give one of H100" in result.stderr


def test_import_says_what_it_took_and_what_it_left(tmp_path):
    infoxlm_checkpoint(tmp_path / "checkpoint.pt", model_tensors())

    result = run("import", str(tmp_path / "checkpoint.pt"), str(tmp_path / "out"))

    assert result.exit_code == 0, result.stderr
    assert "with projection" in result.stdout and "unused model_slow: " in result.stdout
    assert (tmp_path / "out/model.safetensors").is_file()


def test_import_of_something_else_is_one_line(tmp_path):
    torch.save({"args": argparse.Namespace()}, tmp_path / "empty.pt")

    result = run("import", str(tmp_path / "empty.pt"), str(tmp_path / "out"))

    assert (result.exit_code, result.stderr.count("\n")) == (2, 1) and "empty.pt" in result.stderr

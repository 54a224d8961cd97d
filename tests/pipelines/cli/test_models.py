"""`infoxlm import`: what it prints, and one line where it refuses."""

import argparse

import torch
from typer.testing import CliRunner

from pipelines.cli import app
from tests.toy_fairseq import infoxlm_checkpoint, model_tensors


def run(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


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

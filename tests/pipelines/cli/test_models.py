"""`infoxlm import`, `serve-check` and `translate`: what they print, and one line where they refuse."""

import argparse
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from components.adapters.mlflow import model_registry, runs
from infoxlm_core.tasks import reference_vectors
from pipelines.cli import app
from tests.toys.evaluation import evaluated
from tests.toys.fairseq import infoxlm_checkpoint, model_tensors
from tests.toys.models import save_model


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


@pytest.fixture
def store(tmp_path, monkeypatch) -> Path:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return tmp_path / "runs"


def register(store: Path, model: Path) -> None:
    """As the first version, and champion, of `tiny`."""
    run_id = runs.open_run("tests", "demo", {runs.RUN_TAG: "r1"}, store)
    scores, evaluation = {"retrieval/served": 0.5}, evaluated(store / "evaluation", 0.5)
    encoder = model_registry.EvaluatedEncoder(model, "sha256:1", scores, run_id, {}, evaluation)
    model_registry.register("tiny", encoder, {"retrieval/served": 0.0})


@pytest.mark.slow
def test_serve_check_of_the_champion_is_one_line_with_the_worst_difference(store, tmp_path):
    model = save_model(tmp_path / "model")
    reference_vectors.write(model)
    register(store, model)

    result = run("serve-check", "models:/tiny@champion", "--store", str(store))

    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith("models:/tiny@champion is served as it was registered: 10 vectors, mean of layer 1")
    assert "worst cosine 1.00000" in result.stdout and result.stdout.count("\n") == 1


def test_serve_check_of_a_version_without_vectors_says_how_to_have_them(store, tmp_path):
    register(store, save_model(tmp_path / "model"))

    result = run("serve-check", "models:/tiny/1", "--store", str(store))

    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert "has no reference_vectors.json" in result.stderr and "run the pipeline again" in result.stderr


@pytest.mark.parametrize(
    ("given", "code", "said"),
    [
        (b"\xef\xbb\xbfa b\r\nc\n", 0, ""),
        (b"a b\nsch\xe9n\n", 2, "standard input:2:4: not UTF-8 from this byte on"),
        (b"a " * 600_000, 2, "Sentence 1 has 1,200,000 characters"),
        (b"", 2, "no sentence"),
    ],
)
def test_lines_to_embed_are_utf_8_whatever_the_locale_says(tiny_encoders, given, code, said):
    options = ["--layer", "1", "--pooling", "mean"]

    result = CliRunner().invoke(app, ["embed", str(tiny_encoders["first"]), *options], input=given)

    assert result.exit_code == code, result.stderr
    assert said in result.stderr and result.stderr.count("\n") == bool(said)
    assert bool(said) or [line.split(maxsplit=1)[1] for line in result.stdout.splitlines()] == ["a b", "c"]


def test_the_lines_of_a_file_are_embedded_as_sentences_are(tiny_encoders, tmp_path):
    model = str(tiny_encoders["first"])
    (tmp_path / "lines.txt").write_text("a b\nc\n")

    printed = run("embed", model, "a b", "c", "--vectors")
    result = run("embed", model, "--file", str(tmp_path / "lines.txt"), "-o", str(tmp_path / "out.npy"))

    assert result.exit_code == 0, result.stderr
    assert result.stdout.endswith("out.npy: 2 vectors, mean of layer 2\n")
    expected = [json.loads(line) for line in printed.stdout.splitlines()]
    np.testing.assert_allclose(np.load(tmp_path / "out.npy"), expected, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--file", "lines.txt"], "--file and --output belong together"),
        (["--output", "out.npy", "a"], "--file and --output belong together"),
        (["--file", "lines.txt", "-o", "out.npy", "a"], "Leave out other sentences and --vectors"),
        (["--file", "no.txt", "-o", "out.npy"], "no.txt"),
        (["--file", "lines.txt", "-o", "no/out.npy"], "no/"),
    ],
)
def test_options_of_a_file_that_do_not_fit_are_one_line(tiny_encoders, tmp_path, monkeypatch, options, reason):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lines.txt").write_text("a\n")

    result = run("embed", str(tiny_encoders["first"]), *options)

    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1) and reason in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["lines.txt"]


@pytest.mark.parametrize(
    "command",
    [("embed", "models:/x@champion", "a"), ("promote", "models:/x@candidate"), ("rollback", "x", "--reason", "y")],
)
def test_a_registry_that_is_not_there_is_not_made(tmp_path, monkeypatch, command):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)

    result = run(*command, "--store", str(tmp_path / "typo"))

    assert result.exit_code == 2 and "has no MLflow database" in result.stderr
    assert not (tmp_path / "typo/mlflow.db").exists()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("{encoder}", "--to", "de", "Save"), "has no translator: give the output of translate"),
        (("{encoder}", "--to", "de", "--file", "{encoder}/none.txt"), "none.txt"),
        (("{encoder}", "--to", "de", "--file", "{encoder}/config.json", "Save"), "are both given"),
        (("{encoder}/nowhere", "--to", "de", "Save"), "has no config.json"),
        (("models:/nothing@champion", "--to", "de", "--store", "{encoder}", "Save"), "has no MLflow database"),
    ],
)
def test_what_cannot_be_translated_is_one_line(tiny_encoders, monkeypatch, arguments, reason):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)  # another test may have connected to its own registry
    filled = [argument.replace("{encoder}", str(tiny_encoders["first"])) for argument in arguments]

    result = run("translate", *filled)

    assert (result.exit_code, result.stderr.count("\n")) == (2, 1) and reason in result.stderr


def test_translate_requires_the_language():
    result = run("translate", "models:/nothing@champion", "Save")

    assert result.exit_code == 2 and "--to" in result.stderr

"""The commands `import`, `embed`, `serve-check` and `translate`: their output, and the input that they refuse."""

import argparse
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from components.adapters.mlflow import model_registry, runs
from infoxlm_core.tasks import reference_vectors
from tests.pipelines.commands import assert_refused, invoke
from tests.toys.evaluation import evaluated
from tests.toys.fairseq import infoxlm_checkpoint, model_tensors
from tests.toys.models import save_model


def test_import_names_the_parts_that_it_used_and_did_not_use(tmp_path):
    infoxlm_checkpoint(tmp_path / "checkpoint.pt", model_tensors())

    result = invoke("import", tmp_path / "checkpoint.pt", tmp_path / "out")

    assert result.exit_code == 0, result.stderr
    assert "with projection" in result.stdout
    assert "unused model_slow: " in result.stdout
    assert (tmp_path / "out/model.safetensors").is_file()


def test_checkpoint_without_weights_is_not_imported(tmp_path):
    torch.save({"args": argparse.Namespace()}, tmp_path / "empty.pt")

    assert_refused(invoke("import", tmp_path / "empty.pt", tmp_path / "out"), "empty.pt")


def register(store: Path, model: Path) -> None:
    """Register a model as version 1 and champion of `tiny`."""
    run_id = runs.open_run("tests", "demo", {runs.RUN_TAG: "r1"}, store)
    scores = {"retrieval/served": 0.5}
    encoder = model_registry.EvaluatedEncoder(
        model, "sha256:1", scores, run_id, {}, evaluated(store / "evaluation", 0.5)
    )
    model_registry.register("tiny", encoder, {"retrieval/served": 0.0})


@pytest.mark.slow
def test_serve_check_prints_the_worst_difference_in_one_line(store, tmp_path):
    model = save_model(tmp_path / "model")
    reference_vectors.write_reference(model)
    register(store, model)

    result = invoke("serve-check", "models:/tiny@champion", "--store", store)

    assert result.exit_code == 0, result.stderr
    (line,) = result.stdout.splitlines()
    assert line.startswith("models:/tiny@champion is served as it was registered: 10 vectors, mean of layer 1")
    assert "worst cosine 1.00000" in line


def test_serve_check_refuses_a_model_without_reference_vectors(store, tmp_path):
    register(store, save_model(tmp_path / "model"))

    result = invoke("serve-check", "models:/tiny/1", "--store", store)

    assert_refused(result, "has no reference_vectors.json")
    assert "run the pipeline again" in result.stderr


def test_lines_of_standard_input_are_decoded_as_utf_8_with_any_line_ends(tiny_encoders):
    result = invoke("embed", tiny_encoders["first"], input=b"\xef\xbb\xbfa b\r\nc\n")

    assert result.exit_code == 0, result.stderr
    assert [line.split(maxsplit=1)[1] for line in result.stdout.splitlines()] == ["a b", "c"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"a b\nsch\xe9n\n", "standard input:2:4: not UTF-8 from this byte on"),
        (b"a " * 600_000, "Sentence 1 has 1,200,000 characters"),
        (b"", "no sentence"),
    ],
)
def test_text_that_cannot_be_embedded_is_refused(tiny_encoders, text, message):
    assert_refused(invoke("embed", tiny_encoders["first"], input=text), message)


def test_vectors_of_the_lines_of_a_file_equal_those_of_sentences(tiny_encoders, tmp_path):
    model = tiny_encoders["first"]
    file, output = tmp_path / "lines.txt", tmp_path / "out.npy"
    file.write_text("a b\nc\n")

    result = invoke("embed", model, "--file", file, "-o", output)

    assert result.exit_code == 0, result.stderr
    assert result.stdout.endswith("out.npy: 2 vectors, mean of layer 2\n")
    printed_vectors = invoke("embed", model, "a b", "c", "--vectors").stdout.splitlines()
    np.testing.assert_allclose(np.load(output), [json.loads(line) for line in printed_vectors], atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--file", "lines.txt"], "--file and --output belong together"),
        (["--output", "out.npy", "a"], "--file and --output belong together"),
        (["--file", "lines.txt", "-o", "out.npy", "a"], "Leave out other sentences and --vectors"),
        (["--file", "no.txt", "-o", "out.npy"], "no.txt"),
        (["--file", "lines.txt", "-o", "no/out.npy"], "no/"),
    ],
)
def test_wrong_options_for_a_file_are_refused_and_nothing_is_written(
    tiny_encoders, tmp_path, monkeypatch, options, message
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lines.txt").write_text("a\n")

    result = invoke("embed", tiny_encoders["first"], *options)

    assert_refused(result, message)
    assert result.stdout == ""
    assert [path.name for path in tmp_path.iterdir()] == ["lines.txt"]


@pytest.mark.parametrize(
    "command",
    [
        ("embed", "models:/x@champion", "a"),
        ("translate", "models:/x@champion", "--to", "de", "a"),
        ("promote", "models:/x@candidate"),
        ("rollback", "x", "--reason", "y"),
    ],
)
def test_missing_registry_is_reported_and_not_created(tmp_path, monkeypatch, command):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)

    result = invoke(*command, "--store", tmp_path / "typo")

    assert_refused(result, "has no MLflow database")
    assert not (tmp_path / "typo/mlflow.db").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("{encoder}", "Save"), "has no translator: give the output of translate"),
        (("{encoder}", "--file", "{encoder}/none.txt"), "none.txt"),
        (("{encoder}", "--file", "{encoder}/config.json", "Save"), "are both given"),
        (("{encoder}/nowhere", "Save"), "has no config.json"),
    ],
)
def test_input_that_cannot_be_translated_is_refused(tiny_encoders, arguments, message):
    arguments = [argument.replace("{encoder}", str(tiny_encoders["first"])) for argument in arguments]

    assert_refused(invoke("translate", "--to", "de", *arguments), message)


def test_translate_requires_the_language():
    result = invoke("translate", "models:/nothing@champion", "Save")

    assert result.exit_code == 2
    assert "--to" in result.stderr

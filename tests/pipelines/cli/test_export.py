"""`infoxlm export`: what it prints and writes, and one line where it refuses."""

from typer.testing import CliRunner

from infoxlm_core.model.export import onnx
from pipelines.cli import app
from tests.toys.exports import save_encoder


def run(*arguments: str):
    return CliRunner().invoke(app, ["export", *arguments])


def test_an_exported_directory_can_be_exported_again_with_fewer_pieces(tmp_path):
    source = save_encoder(tmp_path / "source", "infoxlm")
    (tmp_path / "text.txt").write_text("Save the file.\n")

    first = run(str(source), "--output", str(tmp_path / "first"))
    second = run(str(tmp_path / "first"), "--output", str(tmp_path / "second"), "--text", str(tmp_path / "text.txt"))

    assert (first.exit_code, second.exit_code) == (0, 0), first.stderr + second.stderr
    assert first.stdout.splitlines()[0].startswith("original ")
    assert f"wrote {tmp_path / 'first'}: see {tmp_path / 'first/README.md'}" in first.stdout
    sizes = [(tmp_path / name / "model.safetensors").stat().st_size for name in ("source", "first", "second")]
    assert sizes[0] > sizes[1] > sizes[2]


def test_an_unknown_format_and_a_missing_package_are_one_line(tmp_path, monkeypatch):
    source = str(save_encoder(tmp_path / "source", "infoxlm"))
    unknown = run(source, "--output", str(tmp_path / "out"), "--to", "gguf")
    monkeypatch.setattr(onnx.importlib.util, "find_spec", lambda _: None)
    missing = run(source, "--output", str(tmp_path / "out"), "--to", "onnx")

    for result, words in ((unknown, "'gguf' is not a format"), (missing, "onnx is not installed: pip install")):
        assert (result.exit_code, result.stderr.count("\n")) == (2, 1) and words in result.stderr

"""`infoxlm export` prints what it measured, and refuses formats that it cannot write."""

from infoxlm_core.model.export import onnx
from tests.pipelines.commands import assert_refused, invoke
from tests.toys.exports import save_encoder


def test_exported_directory_can_be_exported_again_with_a_smaller_vocabulary(tmp_path):
    source = save_encoder(tmp_path / "source", "infoxlm")
    export, trimmed_export, text = tmp_path / "export", tmp_path / "trimmed", tmp_path / "text.txt"
    text.write_text("Save the file.\n")

    result = invoke("export", source, "--output", export)
    trimmed_result = invoke("export", export, "--output", trimmed_export, "--text", text)

    assert result.exit_code == 0, result.stderr
    assert trimmed_result.exit_code == 0, trimmed_result.stderr
    assert result.stdout.startswith("original ")
    assert f"wrote {export}: see {export / 'README.md'}" in result.stdout
    sizes = [(folder / "model.safetensors").stat().st_size for folder in (source, export, trimmed_export)]
    assert sizes[0] > sizes[1] > sizes[2]


def test_unknown_format_and_missing_package_are_refused(tmp_path, monkeypatch):
    source = save_encoder(tmp_path / "source", "infoxlm")

    assert_refused(invoke("export", source, "--output", tmp_path / "out", "--to", "gguf"), "'gguf' is not a format")
    monkeypatch.setattr(onnx.importlib.util, "find_spec", lambda _: None)
    refusal = invoke("export", source, "--output", tmp_path / "out", "--to", "onnx")
    assert_refused(refusal, "onnx is not installed: pip install")

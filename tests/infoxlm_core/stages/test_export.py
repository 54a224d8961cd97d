"""An export contains the requested formats, measured, with a card that tells how to use them and what they lose."""

import json
import re
from pathlib import Path

import pytest
import torch
import yaml

from infoxlm_core.errors import DataCorrupt, InputError
from infoxlm_core.model.export import sentence_encoder
from infoxlm_core.stages.export import ExportSettings, export
from infoxlm_core.tasks import reference_vectors
from infoxlm_core.tasks.embedding import load_embedder
from tests.toys.exports import save_encoder

ALL_FORMATS = ("sentence-transformers", "onnx", "onnx-int8")
TORCH = ("sentence-transformers",)
SENTENCES = {
    "en": ["Save the file.", "Open the window, please."],
    "de": ["Speichern Sie die Datei.", "Das Fenster ist offen."],
    "fr": ["Le fichier est introuvable.", "Une erreur."],
}


@pytest.fixture
def source(tmp_path) -> Path:
    """An encoder of ours in the cache of the hub, with its card."""
    directory = save_encoder(tmp_path / "models--ours--mine" / "model", "infoxlm")
    (directory / "README.md").write_text("---\nlicense: mit\n---\n# Mine\n")
    return directory


@pytest.fixture
def data(tmp_path) -> Path:
    """A folder of aligned sentences."""
    folder = tmp_path / "data"
    folder.mkdir()
    for language, sentences in SENTENCES.items():
        (folder / f"{language}.txt").write_text("\n".join(sentences) + "\n")
    return folder


def read_card(output: Path) -> tuple[dict, str]:
    """Return the metadata and the text of a model card."""
    _, metadata, body = (output / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(metadata), body


def read_vocabulary_size(model: Path) -> int:
    return json.loads((model / "config.json").read_bytes())["vocab_size"]


@pytest.mark.slow
def test_every_format_is_measured_and_described_on_the_card(source, data, tmp_path):
    output = tmp_path / "out"

    measurements = export(source, "models:/mine@champion", ExportSettings(ALL_FORMATS, data=data), output)

    original, torch_format, onnx_format, int8 = measurements
    assert [row.format for row in measurements] == ["original", *ALL_FORMATS]
    assert torch_format.difference < 1e-6 and onnx_format.difference < 1e-5 < int8.difference < 0.1
    assert torch_format.megabytes < original.megabytes and int8.megabytes < 0.6 * onnx_format.megabytes
    assert original.retrieval == torch_format.retrieval == onnx_format.retrieval
    metadata, body = read_card(output)
    assert (metadata["license"], metadata["base_model"]) == ("mit", "ours/mine")
    assert "de, fr" in body
    assert "It was made from ours/mine, whose licence is mit." in body
    assert re.findall(r"^\| (\S+) \|.*\|$", body, re.MULTILINE) == ["format", "original", *ALL_FORMATS]
    assert {line.count("|") for line in body.splitlines() if line.startswith("|")} == {9}
    reference = reference_vectors.read_reference(output)
    assert torch.allclose(reference.vectors, load_embedder(source)(reference.sentences), atol=1e-5)
    assert "computed by torch" in reference_vectors.check_with_transformers(output, "the export")
    code_blocks = re.findall(r"```python\n(.*?)```", body, re.DOTALL)
    assert len(code_blocks) == 2
    for code in code_blocks:
        compile(code, "README.md", "exec")


def test_only_the_requested_formats_are_written(source, tmp_path):
    export(source, "mine", ExportSettings(TORCH), tmp_path / "torch")
    export(source, "mine", ExportSettings(["onnx-int8"]), tmp_path / "int8")

    assert not (tmp_path / "torch/onnx").exists()
    assert [path.name for path in (tmp_path / "int8/onnx").iterdir()] == ["model_qint8.onnx"]
    assert not (tmp_path / "int8/model.safetensors").exists()
    _, body = read_card(tmp_path / "int8")
    assert "SentenceTransformer" not in body
    assert 'InferenceSession("onnx/model_qint8.onnx")' in body


def test_text_and_languages_trim_the_vocabulary(source, data, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("Save the file.\nSpeichern Sie die Datei.\n")

    export(source, "mine", ExportSettings(TORCH, texts=[text], data=data), tmp_path / "text")
    export(source, "mine", ExportSettings(TORCH, languages=["en", "de"]), tmp_path / "script")

    sizes = [read_vocabulary_size(model) for model in (tmp_path / "text", tmp_path / "script", source)]
    assert sizes[0] < sizes[1] < sizes[2]
    _, body = read_card(tmp_path / "text")
    assert "37.5 % of the sentences of the retrieval test have the same tokens" in body
    assert "no error is reported" in body
    metadata, body = read_card(tmp_path / "script")
    assert metadata["language"] == ["en", "de"]
    assert "pieces in the scripts of en, de" in body


def test_export_of_an_export_keeps_all_prompts(tmp_path):
    source = save_encoder(tmp_path / "e5", "e5")
    prompts = {"query": "query: ", "passage": "passage: "}
    name = "config_sentence_transformers.json"
    (source / name).write_text(json.dumps({"prompts": prompts, "default_prompt_name": "query"}))

    export(source, "e5", ExportSettings(TORCH), tmp_path / "first")
    export(tmp_path / "first", "e5", ExportSettings(TORCH), tmp_path / "second")

    settings = json.loads((tmp_path / "second" / name).read_text())
    assert (settings["prompts"], settings["default_prompt_name"]) == (prompts, "query")


def test_format_with_different_vectors_is_not_delivered(source, tmp_path, monkeypatch):
    run = sentence_encoder.SentenceEncoder.run
    monkeypatch.setattr(sentence_encoder.SentenceEncoder, "run", lambda *batch: run(*batch) + 0.01)

    with pytest.raises(DataCorrupt, match=r"the format sentence-transformers does not reproduce its reference vectors"):
        export(source, "mine", ExportSettings(TORCH), tmp_path / "folder/out")
    assert not list((tmp_path / "folder").iterdir())


@pytest.mark.parametrize(
    ("settings", "output", "message"),
    [
        (ExportSettings(["gguf"]), "out", "'gguf' is not a format: give some of sentence-tr"),
        (ExportSettings(TORCH), "", r"exists: give a new directory"),
        (ExportSettings(TORCH, languages=["th"]), "out", r"no text to measure the export on: give text, or aligned"),
    ],
)
def test_impossible_export_is_refused_and_leaves_nothing(source, tmp_path, settings, output, message):
    with pytest.raises(InputError, match=message):
        export(source, "mine", settings, tmp_path / output)
    assert not (tmp_path / "out").exists()


def test_encoder_trimmed_to_russian_keeps_the_pieces_of_its_latin_prefix(tmp_path):
    source = save_encoder(tmp_path / "e5", "e5")
    content = json.loads((source / "tokenizer.json").read_text())
    content |= {
        "truncation": {"max_length": 4, "strategy": "LongestFirst", "stride": 0, "direction": "Right"},
        "padding": {"strategy": {"Fixed": 16}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 1,
                    "pad_type_id": 0, "pad_token": "<pad>"},
    }  # fmt: skip
    (source / "tokenizer.json").write_text(json.dumps(content))  # as sentence-transformers saves it

    *_, trimmed = export(source, "e5", ExportSettings(TORCH, languages=["ru"]), tmp_path / "out")

    assert trimmed.cosine > 0.9999
    sentence = "Файл не найден"
    expected_vector = load_embedder(source)([sentence])
    assert torch.allclose(load_embedder(tmp_path / "out")([sentence]), expected_vector, atol=1e-5)
    assert torch.equal(load_embedder(source, prefix="")([f"query: {sentence}"]), expected_vector)

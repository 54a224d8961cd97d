import json
import re

import pytest
import torch
import yaml

from infoxlm_core.errors import DataCorrupt, InputError
from infoxlm_core.model.export import sentence_encoder
from infoxlm_core.stages.export import ExportSettings, export
from infoxlm_core.tasks import reference_vectors
from infoxlm_core.tasks.embedding import load_embedder
from tests.toys.exports import save_encoder

ALL = ("sentence-transformers", "onnx", "onnx-int8")
PAIRS = {
    "de": ["Speichern Sie die Datei.", "Das Fenster ist offen."],
    "fr": ["Le fichier est introuvable.", "Une erreur."],
}
PIVOT = ["Save the file.", "Open the window, please."]


@pytest.fixture
def source(tmp_path):
    """An encoder of ours, in the cache of the hub with its card."""
    directory = save_encoder(tmp_path / "models--ours--mine" / "model", "infoxlm")
    (directory / "README.md").write_text("---\nlicense: mit\n---\n# Mine\n")
    return directory


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    for language, sentences in {"en": PIVOT, **PAIRS}.items():
        (folder / f"{language}.txt").write_text("\n".join(sentences) + "\n")
    return folder


def read_card(output):
    text = (output / "README.md").read_text()
    _, metadata, body = text.split("---\n", 2)
    return yaml.safe_load(metadata), body


@pytest.mark.slow
def test_every_format_is_measured_and_the_card_says_so(source, data, tmp_path):
    output = tmp_path / "out"
    measurements = export(source, "models:/mine@champion", ExportSettings(ALL, data=data), output)

    original, torch_format, onnx_format, int8 = measurements
    assert [row.format for row in measurements] == ["original", *ALL]
    assert torch_format.difference < 1e-6 and onnx_format.difference < 1e-5 < int8.difference < 0.1
    assert torch_format.megabytes < original.megabytes and int8.megabytes < 0.6 * onnx_format.megabytes
    assert original.retrieval == torch_format.retrieval == onnx_format.retrieval
    metadata, body = read_card(output)
    assert (metadata["license"], metadata["base_model"]) == ("mit", "ours/mine")
    assert "de, fr" in body and "It was made from ours/mine, whose licence is mit." in body
    rows = re.findall(r"^\| (\S+) \|.*\|$", body, re.MULTILINE)
    assert rows == ["format", "original", *ALL]
    widths = {line.count("|") for line in body.splitlines() if line.startswith("|")}
    assert widths == {9}
    reference = reference_vectors.read(output)
    vectors = load_embedder(source)(reference.sentences)
    assert torch.allclose(reference.vectors, vectors, atol=1e-5)
    assert "computed by torch" in reference_vectors.check(output, "the export")  # by transformers alone
    session_code = re.findall(r"```python\n(.*?)```", body, re.DOTALL)
    assert len(session_code) == 2
    for code in session_code:
        compile(code, "README.md", "exec")


def test_only_the_formats_that_were_named_are_written(source, tmp_path):
    export(source, "mine", ExportSettings(["sentence-transformers"]), tmp_path / "torch")
    export(source, "mine", ExportSettings(["onnx-int8"]), tmp_path / "int8")

    assert not (tmp_path / "torch/onnx").exists()
    assert [path.name for path in (tmp_path / "int8/onnx").iterdir()] == ["model_qint8.onnx"]
    assert not (tmp_path / "int8/model.safetensors").exists()
    _, body = read_card(tmp_path / "int8")
    assert "SentenceTransformer" not in body and 'InferenceSession("onnx/model_qint8.onnx")' in body


def test_text_and_languages_trim_the_vocabulary(source, data, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("Save the file.\nSpeichern Sie die Datei.\n")
    by_text = ExportSettings(ALL[:1], texts=[text], data=data)
    by_script = ExportSettings(ALL[:1], languages=["en", "de"])
    export(source, "mine", by_text, tmp_path / "text")
    export(source, "mine", by_script, tmp_path / "script")

    def rows(name):
        return json.loads((tmp_path / name / "config.json").read_bytes())["vocab_size"]

    whole = json.loads((source / "config.json").read_bytes())["vocab_size"]
    assert rows("text") < rows("script") < whole
    _, body = read_card(tmp_path / "text")
    assert "37.5 % of the sentences of the retrieval test have the same tokens" in body
    assert "no error is reported" in body
    metadata, body = read_card(tmp_path / "script")
    assert metadata["language"] == ["en", "de"] and "pieces in the scripts of en, de" in body


def test_a_format_with_other_vectors_is_not_delivered(source, tmp_path, monkeypatch):
    right = sentence_encoder.SentenceEncoder.run
    monkeypatch.setattr(sentence_encoder.SentenceEncoder, "run", lambda *batch: right(*batch) + 0.01)

    with pytest.raises(DataCorrupt, match=r"the format sentence-transformers gives other vectors"):
        export(source, "mine", ExportSettings(ALL[:1]), tmp_path / "folder/out")
    assert not list((tmp_path / "folder").iterdir())


def test_what_cannot_be_exported_is_refused_before_anything_is_written(source, tmp_path):
    output = tmp_path / "out"
    with pytest.raises(InputError, match="'gguf' is not a format: give some of sentence-tr"):
        export(source, "mine", ExportSettings(["gguf"]), output)
    assert not output.exists()
    with pytest.raises(InputError, match=r"model exists: give a new directory"):
        export(source, "mine", ExportSettings(ALL[:1]), source)
    with pytest.raises(InputError, match=r"no text to measure the export on: give text, or aligned sentences"):
        export(source, "mine", ExportSettings(ALL[:1], languages=["th"]), output)


def test_an_encoder_for_russian_still_reads_its_latin_prefix(tmp_path):
    source = save_encoder(tmp_path / "e5", "e5")
    content = json.loads((source / "tokenizer.json").read_text())
    content |= {
        "truncation": {"max_length": 4, "strategy": "LongestFirst", "stride": 0, "direction": "Right"},
        "padding": {"strategy": {"Fixed": 16}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 1,
                    "pad_type_id": 0, "pad_token": "<pad>"},
    }  # fmt: skip
    (source / "tokenizer.json").write_text(json.dumps(content))  # as sentence-transformers saves it
    settings = ExportSettings(ALL[:1], languages=["ru"])

    *_, trimmed = export(source, "e5", settings, tmp_path / "out")

    assert trimmed.cosine > 0.9999
    sentence = "Файл не найден"
    expected, vector = load_embedder(source)([sentence]), load_embedder(tmp_path / "out")([sentence])
    assert torch.allclose(vector, expected, atol=1e-5)
    assert torch.equal(expected, load_embedder(source, prefix="")([f"query: {sentence}"]))

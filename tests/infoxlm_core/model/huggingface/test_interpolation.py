"""Interpolation between an encoder and its start: exact weights, a complete directory, and refusals."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoTokenizer, BertConfig, BertModel, XLMRobertaModel

from infoxlm_core import manifests
from infoxlm_core.errors import InputError
from infoxlm_core.model.huggingface.interpolation import interpolate
from tests.toys.models import WORDS, save_model, save_tokenizer


@pytest.fixture
def models(tmp_path):
    start = save_model(tmp_path / "start", seed=1)
    encoder = save_model(tmp_path / "encoder", seed=2)
    for seed, directory in enumerate((start, encoder)):
        projection = torch.full((32, 32), float(seed))
        save_file({"projection": projection}, directory / "projection.safetensors")
    (encoder / "metrics.jsonl").write_text("{}\n")
    manifests.write(encoder, "encoder", {"steps": 9})
    return start, encoder


def test_weight_of_a_quarter_adds_a_quarter_of_every_difference(models, tmp_path):
    start, encoder = models

    interpolate(start, encoder, 0.25, tmp_path / "merged")

    merged = load_file(tmp_path / "merged/model.safetensors")
    start_weights = load_file(start / "model.safetensors")
    encoder_weights = load_file(encoder / "model.safetensors")
    assert merged.keys() == encoder_weights.keys()
    for name, value in merged.items():
        expected = start_weights[name] + 0.25 * (encoder_weights[name] - start_weights[name])
        torch.testing.assert_close(value, expected, atol=1e-6, rtol=1e-6)
    projection = load_file(tmp_path / "merged/projection.safetensors")["projection"]
    assert projection.eq(0.25).all()
    files = {path.name for path in (tmp_path / "merged").iterdir()}
    assert files == {path.name for path in encoder.iterdir()} - {manifests.NAME}
    AutoModel.from_pretrained(tmp_path / "merged"), AutoTokenizer.from_pretrained(tmp_path / "merged")


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_transformers_loads_the_average_of_models_in_half_precision_as_fp32(models, tmp_path, key):
    start, encoder = models
    config = json.loads((encoder / "config.json").read_text())
    config.pop("dtype", None)
    (encoder / "config.json").write_text(json.dumps(config | {key: "float16"}))

    interpolate(start, encoder, 0.25, tmp_path / "merged")

    assert AutoModel.from_pretrained(tmp_path / "merged").dtype == torch.float32


def test_files_in_subfolders_of_the_encoder_are_copied(models, tmp_path):
    start, encoder = models
    (encoder / "2_Dense").mkdir()
    save_file({"linear.weight": torch.ones(2, 2)}, encoder / "2_Dense/model.safetensors")

    interpolate(start, encoder, 0.25, tmp_path / "merged")

    assert load_file(tmp_path / "merged/2_Dense/model.safetensors")["linear.weight"].eq(1).all()


def test_exports_and_card_of_the_encoder_are_not_copied(models, tmp_path):
    start, encoder = models
    (encoder / "onnx").mkdir()
    (encoder / "onnx/model.onnx").write_bytes(b"weights of the encoder")
    (encoder / "README.md").write_text("Results of the encoder")

    interpolate(start, encoder, 0.25, tmp_path / "merged")

    assert not (tmp_path / "merged/onnx").exists()
    assert not (tmp_path / "merged/README.md").exists()


@pytest.mark.parametrize("weight", [0, 1])
def test_weights_zero_and_one_give_the_two_models_bit_for_bit(models, tmp_path, weight):
    interpolate(*models, weight, tmp_path / "merged")

    merged, expected = (load_file(path / "model.safetensors") for path in (tmp_path / "merged", models[weight]))
    assert all(torch.equal(merged[name], expected[name]) for name in expected)


def test_names_with_and_without_the_prefix_of_the_encoder_are_matched(tmp_path):
    start = save_model(tmp_path / "start", XLMRobertaModel, seed=1)
    encoder = save_model(tmp_path / "encoder", XLMRobertaModel, seed=2)
    tensors = load_file(encoder / "model.safetensors")
    save_file({f"roberta.{name}": value for name, value in tensors.items()}, encoder / "model.safetensors")

    interpolate(start, encoder, 0.0, tmp_path / "merged")

    merged, expected = (load_file(path / "model.safetensors") for path in (tmp_path / "merged", start))
    assert all(torch.equal(merged[f"roberta.{name}"], value) for name, value in expected.items())


def save_bert(directory):
    save_tokenizer(directory)
    BertModel(BertConfig(vocab_size=60, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)).save_pretrained(
        directory
    )
    return directory


@pytest.mark.parametrize(
    ("make_start", "reason"),
    [
        (lambda path: save_model(path, intermediate_size=16), r"intermediate\S* is \(16.* not \(64"),
        (lambda path: save_model(path, num_hidden_layers=1), r"has no roberta\.encoder\.layer\.1\."),
        (lambda path: save_model(path, XLMRobertaModel), r"has no lm_head\."),
        (lambda path: save_model(path, words=[*WORDS[1:], "other"]), r"different tokenizers \(tokenizer\.json\)"),
        (save_bert, "of type 'bert'.* of type 'xlm-roberta'"),
    ],
    ids=["width", "layers", "head", "tokenizer", "type"],
)
def test_models_of_different_shape_type_or_tokenizer_are_refused(models, tmp_path, make_start, reason):
    with pytest.raises(InputError, match=reason) as refusal:
        interpolate(make_start(tmp_path / "other"), models[1], 0.5, tmp_path / "merged")

    assert "give the encoder, and the model that its training started from" in str(refusal.value)
    assert not (tmp_path / "merged").exists()

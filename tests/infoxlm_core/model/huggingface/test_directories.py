"""Only complete encoders that match their manifest and contain no code are loaded."""

import json

import pytest

from infoxlm_core import manifests
from infoxlm_core.errors import DataCorrupt, InputError
from infoxlm_core.model.huggingface import directories


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    return tmp_path


@pytest.mark.item("B17")
@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("deep/code.py", "print()", r"holds code\.py, which could run code"),
        ("pytorch_model.pt", "", r"holds pytorch_model\.pt, which could run code"),
        ("tokenizer_config.json", json.dumps({"auto_map": {}}), "requires custom code"),
        ("config.json", '{"model_type": "new", "auto_map": {}}', "alibaba-nlp-community/gte-multilingual-base"),
        ("config.json", "{", "cannot be read"),
        ("model.safetensors.index.json", "{}", "weight_map: Field required"),
        ("model.safetensors.index.json", '{"weight_map": {"a": "../other.safetensors"}}', "is not in this directory"),
    ],
)
def test_model_with_code_or_damaged_metadata_is_refused(model, name, content, message):
    directories.check_model(model)
    (model / name).parent.mkdir(exist_ok=True)
    (model / name).write_text(content)

    with pytest.raises(InputError, match=message):
        directories.check_model(model)


def test_pickle_is_accepted_only_beside_safetensors(model):
    (model / "pytorch_model.bin").write_bytes(b"pickle")
    directories.check_model(model)
    (model / "model.safetensors").unlink()

    with pytest.raises(
        InputError, match=r"pytorch_model\.bin, but no \*\.safetensors.*`infoxlm import pytorch_model.* DistilBERT"
    ):
        directories.check_model(model)
    (model / "pytorch_model.bin").unlink()
    with pytest.raises(InputError, match=r"has no config\.json with \*\.safetensors"):
        directories.check_model(model)


def test_weights_that_differ_from_our_manifest_are_refused(model):
    (model / manifests.NAME).write_text(json.dumps({"layers": []}))  # the manifest of another program
    directories.check_model(model)
    (model / manifests.NAME).unlink()
    manifests.write(model, "encoder")
    directories.check_model(model)
    (model / "model.safetensors").write_bytes(b"weightz")

    with pytest.raises(DataCorrupt, match=r"model\.safetensors"):
        directories.check_model(model)

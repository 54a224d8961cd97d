"""Which directories of models may be loaded: encoders as they were written, of which nothing runs as code."""

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
    ("name", "content", "said"),
    [
        ("deep/code.py", "print()", r"holds code\.py, which could run code"),
        ("pytorch_model.pt", "", r"holds pytorch_model\.pt, which could run code"),
        ("tokenizer_config.json", json.dumps({"auto_map": {}}), "requires custom code"),
        ("config.json", '{"model_type": "new", "auto_map": {}}', "alibaba-nlp-community/gte-multilingual-base"),
        ("config.json", "{", "cannot be read"),
        ("model.safetensors.index.json", "{}", "weight_map: Field required"),
        ("model.safetensors.index.json", '{"weight_map": {"a": "../other.safetensors"}}', "is not in this folder"),
    ],
)
def test_what_could_run_code_or_cannot_be_read_is_refused(model, name, content, said):
    directories.check(model)
    (model / name).parent.mkdir(exist_ok=True)
    (model / name).write_text(content)

    with pytest.raises(InputError, match=said):
        directories.check(model)


def test_a_pickle_beside_safetensors_is_accepted_and_one_without_them_is_to_be_imported(model):
    (model / "pytorch_model.bin").write_bytes(b"pickle")
    directories.check(model)
    (model / "model.safetensors").unlink()

    with pytest.raises(InputError, match=r"pytorch_model\.bin, but no \*\.safetensors.*`infoxlm import pytorch_model"):
        directories.check(model)
    (model / "pytorch_model.bin").unlink()
    with pytest.raises(InputError, match=r"has no config\.json with \*\.safetensors"):
        directories.check(model)


def test_weights_that_are_not_those_of_our_manifest_are_refused_and_another_tools_manifest_is_not_read(model):
    (model / manifests.NAME).write_text(json.dumps({"layers": []}))
    directories.check(model)
    (model / manifests.NAME).unlink()
    manifests.write(model, "encoder")
    directories.check(model)
    (model / "model.safetensors").write_bytes(b"weightz")

    with pytest.raises(DataCorrupt, match=r"model\.safetensors"):
        directories.check(model)

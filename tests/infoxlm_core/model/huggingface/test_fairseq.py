"""Checkpoints of fairseq become Hugging Face directories, and none of their code runs."""

import argparse
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel, XLMRobertaForMaskedLM

from infoxlm_core.data.layouts import number_positions
from infoxlm_core.errors import InputError
from infoxlm_core.model import task_models
from infoxlm_core.model.heads import InfoXLM
from infoxlm_core.model.huggingface import fairseq, pretrained
from infoxlm_core.model.huggingface.directories import check_model
from infoxlm_core.tasks import TASKS
from infoxlm_core.tasks.embedding import embed_sentences
from tests.toys.exports import TEXTS, save_encoder
from tests.toys.fairseq import (
    LAYERS,
    POSITIONS,
    D,
    V,
    infoxlm_checkpoint,
    model_tensors,
    under,
)

pytestmark = pytest.mark.item("A22")

LENGTHS = (7, 4)
HUGGING_FACE_PARTS = {  # part of a name in fairseq -> part in Hugging Face, written down by hand
    "sentence_encoder.embed_tokens.": "roberta.embeddings.word_embeddings.",
    "sentence_encoder.embed_positions.": "roberta.embeddings.position_embeddings.",
    "sentence_encoder.emb_layer_norm.": "roberta.embeddings.LayerNorm.",
    "sentence_encoder.layers.": "roberta.encoder.layer.", "self_attn.q_proj.": "attention.self.query.",
    "self_attn.k_proj.": "attention.self.key.", "self_attn.v_proj.": "attention.self.value.",
    "self_attn.out_proj.": "attention.output.dense.", "self_attn_layer_norm.": "attention.output.LayerNorm.",
    "lm_head.weight": "lm_head.decoder.weight",
    ".fc1.": ".intermediate.dense.", ".fc2.": ".output.dense.", "final_layer_norm.": "output.LayerNorm.",
}  # fmt: skip


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(4)


@pytest.fixture
def xlmr(tmp_path) -> tuple[Path, dict[str, torch.Tensor]]:
    state = model_tensors()
    torch.save({"args": argparse.Namespace(arch="roberta_base"), "model": under("decoder.", state)}, tmp_path / "m.pt")
    return tmp_path / "m.pt", state


def load(directory: Path) -> InfoXLM:
    model = InfoXLM(pretrained.read_encoder_size(directory), contrast_layer=2, pooling="cls", normalise=False).eval()
    pretrained.load_weights(model, directory)
    return model


def compute_logits(model: InfoXLM, ids: torch.Tensor) -> torch.Tensor:
    positions = torch.from_numpy(number_positions(torch.tensor(LENGTHS).numpy()))
    return model.head(model.encoder(ids, positions, LENGTHS), model.encoder.token_embedding.weight)


def test_imported_xlmr_has_the_logits_of_hugging_face(xlmr, tmp_path):
    path, state = xlmr
    imported = fairseq.convert(path, tmp_path / "out")
    hugging_face = XLMRobertaForMaskedLM(pretrained.make_hugging_face_config(imported.size)).eval()
    weights = {"roberta.embeddings.token_type_embeddings.weight": torch.zeros(1, D)}
    for name, value in state.items():
        for part, replacement in HUGGING_FACE_PARTS.items():
            name = name.replace(part, replacement)
        weights[name] = value
    result = hugging_face.load_state_dict(weights, strict=False)
    assert not result.unexpected_keys
    assert result.missing_keys in ([], ["lm_head.decoder.bias"])
    hugging_face.tie_weights()
    ids = torch.randint(4, V, (sum(LENGTHS),))
    batch = torch.nn.utils.rnn.pad_sequence(ids.split(LENGTHS), batch_first=True, padding_value=1)
    mask = (batch != 1).long()

    logits = compute_logits(load(tmp_path / "out"), ids)

    for model in (hugging_face, XLMRobertaForMaskedLM.from_pretrained(tmp_path / "out").eval()):
        expected = model(batch, attention_mask=mask).logits[mask.bool()]
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)
    assert (imported.size.heads, imported.size.layers, imported.size.positions) == (2, LAYERS, POSITIONS)
    assert (imported.missing, imported.unused, imported.projection) == ((), (), False)


def test_query_encoder_and_projection_of_infoxlm_are_imported(tmp_path):
    state = model_tensors()
    projection = infoxlm_checkpoint(tmp_path / "checkpoint.pt", state)

    imported = fairseq.convert(tmp_path / "checkpoint.pt", tmp_path / "out")

    model = load(tmp_path / "out")
    expected = state["sentence_encoder.layers.1.fc1.weight"].half().float()
    assert torch.equal(model.encoder.layers[1].up.weight, expected)
    # z = h @ projection with row vectors, as in the released code
    assert torch.equal(model.projection, projection[0])
    assert imported.projection
    assert imported.unused_parts == {
        "model_slow": len(state), "proj_matrix_slow": 1, "queue": 1, "queue_ptr": 1, "enqueue_cnt": 1
    }  # fmt: skip
    config = XLMRobertaForMaskedLM.from_pretrained(tmp_path / "out").config
    assert config.infoxlm == {"layer": 2, "pooling": "cls", "normalise": False}


def test_joint_matrix_of_query_key_and_value_is_split(tmp_path):
    torch.manual_seed(9)
    split = model_tensors()
    torch.manual_seed(9)
    fused = model_tensors(fused=True)
    for name, state in {"split": split, "fused": fused}.items():
        torch.save({"model": under("decoder.", state)}, tmp_path / f"{name}.pt")
        fairseq.convert(tmp_path / f"{name}.pt", tmp_path / name)

    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("split", "fused")]
    assert weights[0] == weights[1]


@pytest.fixture
def hub_model(tmp_path, request) -> tuple[Path, torch.Tensor]:
    """A model of the hub that has only a pickle, and its vectors before its safetensors were removed."""
    directory = save_encoder(tmp_path / "hub", request.param)
    vectors = embed_sentences(directory, TEXTS)
    model_class = XLMRobertaForMaskedLM if request.param == "infoxlm" else AutoModel
    state = model_class.from_pretrained(directory).state_dict()  # with the output layer, which is tied
    torch.save(state, directory / "pytorch_model.bin")
    (directory / "model.safetensors").unlink()
    (directory / "other.pt").write_bytes(b"a pickle that the import does not copy")
    return directory, vectors


@pytest.mark.parametrize("hub_model", ["infoxlm", "e5", "bge", "distilbert"], indirect=True)
def test_pickle_of_the_hub_is_converted_with_its_tokenizer_pooling_prompt_and_length(hub_model, tmp_path):
    directory, vectors = hub_model

    imported = fairseq.convert(directory / "pytorch_model.bin", tmp_path / "out")

    check_model(tmp_path / "out")
    assert torch.equal(embed_sentences(tmp_path / "out", TEXTS), vectors)
    assert (imported.missing, imported.unused, imported.projection) == ((), (), False)
    assert pretrained.read_encoder_size(tmp_path / "out").layers == imported.size.layers
    assert not any("decoder" in name for name in load_file(tmp_path / "out/model.safetensors"))


@pytest.mark.parametrize("hub_model", ["bge"], indirect=True)
def test_pickle_without_the_other_files_of_its_model_is_refused(hub_model, tmp_path):
    pickle = hub_model[0] / "pytorch_model.bin"
    config = pickle.with_name("config.json")
    content = config.read_text()

    config.write_text(content.replace('"intermediate_size": 64', '"intermediate_size": 65'))
    with pytest.raises(
        InputError, match=r"pytorch_model\.bin: .* is \(64, 32\), but config\.json describes \(65, 32\)"
    ):
        fairseq.convert(pickle, tmp_path / "out")
    config.write_text(content.replace('"model_type": "bert"', '"model_type": "deberta"'))
    with pytest.raises(InputError, match=r"hub/config\.json: model_type is 'deberta', not one of"):
        fairseq.convert(pickle, tmp_path / "out")
    config.unlink()
    with pytest.raises(InputError, match=r"hub/config\.json: no such file: give a Hugging Face model directory"):
        fairseq.convert(pickle, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["hub"]


def test_encoder_without_head_is_imported_and_the_head_is_reported(tmp_path):
    state = {name: value for name, value in model_tensors().items() if not name.startswith("lm_head.")}
    torch.save({"model": under("decoder.", state)}, tmp_path / "m.pt")

    imported = fairseq.convert(tmp_path / "m.pt", tmp_path / "out")

    assert "lm_head.dense.weight" in imported.missing
    assert task_models.create(tmp_path / "out", TASKS["classification"].head).encoder.size == imported.size


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"sentence_encoder.layers.1.fc2.weight": None}, r"no sentence_encoder\.layers\.1\.fc2\.weight"),
        ({"sentence_encoder.embed_tokens.weight": None}, r"no sentence_encoder"),
        ({"sentence_encoder.layers.1.fc2.bias": torch.zeros(3)}, r"layers\.1\.fc2\.bias is \(3,\), not \(128,\)"),
        ({"lm_head.weight": torch.zeros(V, D)}, r"lm_head\.weight differs from the word embeddings"),
        ({"proj_matrix_fast": torch.zeros(2, D, D)}, r"proj_matrix_fast is \(2, 128, 128\), not \(1, 128, 128\)"),
    ],
)
def test_incomplete_checkpoint_is_refused_with_the_name_of_the_tensor(tmp_path, change, reason):
    state = {name: value for name, value in (model_tensors() | change).items() if value is not None}
    projection = {name: state.pop(name) for name in list(state) if name == "proj_matrix_fast"}
    torch.save({"model": under("decoder.", state) | projection}, tmp_path / "m.pt")

    with pytest.raises(InputError, match=reason):
        fairseq.convert(tmp_path / "m.pt", tmp_path / "out")

    assert [path.name for path in tmp_path.iterdir()] == ["m.pt"]


@pytest.mark.parametrize("content", [[torch.zeros(2)], {"model": [torch.zeros(2)]}])
def test_checkpoint_without_tensors_by_name_is_refused(tmp_path, content):
    torch.save(content, tmp_path / "m.pt")

    with pytest.raises(InputError, match="holds a list, not the tensors of a model: give a checkpoint"):
        fairseq.convert(tmp_path / "m.pt", tmp_path / "out")


class CreatesDirectory:
    """An object whose unpickling runs code."""

    def __reduce__(self):
        return os.mkdir, ("it-ran",)


@pytest.mark.item("B17")
def test_code_in_a_pickle_does_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"model": model_tensors(), "extra": CreatesDirectory()}, tmp_path / "m.pt")

    with pytest.raises(InputError, match="cannot be read as a checkpoint without running code"):
        fairseq.convert(tmp_path / "m.pt", tmp_path / "out")

    assert not (tmp_path / "it-ran").exists()
    (tmp_path / "m.pt").write_text("root:x:0:0:root:/root:/bin/bash\n")
    with pytest.raises(InputError, match=r"m\.pt cannot be read as a checkpoint"):
        fairseq.convert(tmp_path / "m.pt", tmp_path / "out")


def test_existing_directory_and_impossible_number_of_heads_are_refused(xlmr, tmp_path):
    with pytest.raises(InputError, match="exists: give a new directory"):
        fairseq.convert(xlmr[0], tmp_path)
    with pytest.raises(InputError, match="128 is not a multiple of 7 heads"):
        fairseq.convert(xlmr[0], tmp_path / "out", heads=7)

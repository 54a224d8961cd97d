"""The vector of a sentence depends on the sentence, the layer and the pooling, and on nothing else."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModel,
    BertModel,
    DistilBertModel,
    T5Config,
    T5Model,
    XLMRobertaModel,
)  # fmt: skip

from infoxlm_core.errors import InputError
from infoxlm_core.model.encoder import EncoderSize, initialise, pool
from infoxlm_core.model.heads import InfoXLM, project
from infoxlm_core.model.huggingface import pretrained
from infoxlm_core.model.huggingface.any_encoder import load_encoder, load_projection
from infoxlm_core.tasks import embedding
from infoxlm_core.tasks.embedding import VectorEncoder, VectorSpec, embed_sentences, mean_pool
from tests.toys.models import TEXTS, save_model, save_tokenizer

EVERYWHERE = [VectorSpec(pooling, layer) for pooling in ("mean", "cls") for layer in range(3)]


@pytest.fixture
def directory(tmp_path) -> Path:
    return save_model(tmp_path / "encoder")


def test_vectors_do_not_change_with_padding_or_order(directory, monkeypatch):
    model, tokenizer = load_encoder(directory)
    alone = VectorEncoder(model, tokenizer, 1, 32).embed(TEXTS, EVERYWHERE)

    monkeypatch.setattr(embedding, "CHUNK", 3)  # the last text is tokenized later than the others
    together = VectorEncoder(model, tokenizer, 4, 32).embed(TEXTS[::-1], EVERYWHERE)

    for place in EVERYWHERE:
        assert alone[place].shape == (4, 32)
        torch.testing.assert_close(together[place].flip(0), alone[place], atol=1e-5, rtol=0)


def test_a_batch_has_fewer_texts_if_they_are_long():
    features = [{"input_ids": [5] * length} for length in (100, 900, 256, 700, 256, 256)]

    batches = list(embedding._group_by_length(features, batch_size=4))

    assert batches == [[1], [3], [2, 4, 5], [0]]  # at most 4 * 256 tokens, and no text much shorter than the longest


def test_vectors_of_a_model_that_was_saved_in_half_precision_are_computed_in_fp32(directory, tmp_path):
    model, tokenizer = load_encoder(directory)
    model.bfloat16().save_pretrained(tmp_path / "half")
    tokenizer.save_pretrained(tmp_path / "half")

    found = VectorEncoder(*load_encoder(tmp_path / "half"), 4, 32).embed(TEXTS, EVERYWHERE)

    expected = VectorEncoder(model.float(), tokenizer, 4, 32).embed(TEXTS, EVERYWHERE)
    assert all(torch.equal(found[place], expected[place]) for place in EVERYWHERE)


@pytest.mark.item("A23")
def test_layers_and_poolings_are_those_of_hidden_states(directory):
    model, tokenizer = load_encoder(directory)
    plain = AutoModel.from_pretrained(directory).eval()
    with torch.inference_mode():
        hidden = plain(**tokenizer(TEXTS[:1], return_tensors="pt"), output_hidden_states=True).hidden_states

    vectors = VectorEncoder(model, tokenizer, 1, 32).embed(TEXTS[:1], EVERYWHERE)

    for layer in range(3):
        torch.testing.assert_close(vectors[VectorSpec("mean", layer)], hidden[layer].mean(dim=1), atol=1e-5, rtol=0)
        torch.testing.assert_close(vectors[VectorSpec("cls", layer)], hidden[layer][:, 0], atol=1e-5, rtol=0)


@pytest.mark.item("A23")
def test_the_mean_with_and_without_special_tokens_is_what_a_hand_computes():
    hidden = torch.tensor([[[0.0], [3.0], [5.0], [16.0], [99.0]]])  # <s> a b </s> <pad>

    assert mean_pool(hidden, torch.tensor([[1, 1, 1, 1, 0]])).item() == 6.0
    assert mean_pool(hidden, torch.tensor([[0, 1, 1, 0, 0]])).item() == 4.0


@pytest.mark.item("A23")
def test_the_mean_without_special_tokens_leaves_out_their_positions_but_not_unknown_words(directory):
    texts = ["open the house", "a"]  # <s> open the <unk> </s>, and a shorter one that is padded
    model, tokenizer = load_encoder(directory)
    with torch.inference_mode():
        hidden = model.base_model(**tokenizer(texts[:1], return_tensors="pt")).last_hidden_state

    found = VectorEncoder(model, tokenizer, 2, 32).embed(
        texts, [VectorSpec("mean_no_special", 2), VectorSpec("mean", 2)]
    )

    torch.testing.assert_close(
        found[VectorSpec("mean_no_special", 2)][0], hidden[0, 1:4].mean(dim=0), atol=1e-5, rtol=0
    )
    assert not found[VectorSpec("mean_no_special", 2)].allclose(found[VectorSpec("mean", 2)], atol=1e-3)


def test_a_text_of_special_tokens_alone_has_a_vector(directory):
    assert embed_sentences(directory, ["", "a"], layer=1, pooling="mean_no_special").isfinite().all()


@pytest.mark.parametrize(("pooling", "normalise"), [("cls", False), ("mean", True)])
def test_contrast_vectors_are_those_that_pre_training_compares(tmp_path, pooling, normalise):
    tokenizer = save_tokenizer(tmp_path / "tokenizer")
    size = EncoderSize(len(tokenizer), layers=3, hidden=16, ffn=32, heads=2, positions=40)
    ours = InfoXLM(size, contrast_layer=2, pooling=pooling, normalise=normalise).eval()
    initialise(ours, seed=1)
    pretrained.export(ours, tmp_path / "tokenizer", tmp_path / "model")
    ids = tokenizer(TEXTS[0], return_tensors="pt")["input_ids"][0]
    hidden = ours.encoder(ids, torch.arange(len(ids)), (len(ids),), last=2)
    expected = project(pool(hidden, (len(ids),), pooling), ours.projection, normalise)

    alone = embed_sentences(tmp_path / "model", TEXTS, pooling="contrast")
    model, tokenizer = load_encoder(tmp_path / "model")
    places = [VectorSpec("mean", 3), VectorSpec("contrast", 2)]
    among = VectorEncoder(model, tokenizer, 2, 32, projection=load_projection(tmp_path / "model", model)).embed(
        TEXTS, places
    )

    torch.testing.assert_close(alone[0], expected[0].detach(), atol=1e-5, rtol=0)
    torch.testing.assert_close(among[places[1]], alone, atol=1e-5, rtol=0)


def test_contrast_vectors_need_their_layer(directory):
    with pytest.raises(InputError, match=r"has no contrast vectors .* give mean or cls"):
        embed_sentences(directory, TEXTS, pooling="contrast")


def test_embed_sentences_takes_the_layer_and_pooling_of_the_model(directory):
    model, tokenizer = load_encoder(directory)

    vectors = embed_sentences(directory, TEXTS, batch_size=2)

    expected = VectorEncoder(model, tokenizer, 4, 32).embed(TEXTS, [VectorSpec("mean", 1)])[VectorSpec("mean", 1)]
    torch.testing.assert_close(vectors, expected.cpu(), atol=1e-5, rtol=0)
    assert embed_sentences(directory, []).shape == (0, 32)


@pytest.mark.parametrize("kind", [BertModel, DistilBertModel, XLMRobertaModel])
def test_any_encoder_is_embedded_as_it_would_embed_itself(tmp_path, kind):
    tokenizer = save_tokenizer(tmp_path)
    torch.manual_seed(1)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    plain = kind(kind.config_class(vocab_size=len(tokenizer), max_position_embeddings=40, pad_token_id=1, **sizes))
    plain.eval().save_pretrained(tmp_path)
    tokens = {name: v for name, v in tokenizer(TEXTS[2], return_tensors="pt").items() if name != "token_type_ids"}
    with torch.inference_mode():
        hidden = plain(**tokens, output_hidden_states=True).hidden_states

    found = embed_sentences(tmp_path, TEXTS, layer=2, pooling="mean")

    torch.testing.assert_close(found[2], hidden[2][0].mean(dim=0), atol=1e-5, rtol=0)


def test_a_prefix_is_added_before_every_sentence(tmp_path):
    settings = {"layer": 1, "pooling": "mean", "normalise": False}
    plain = embedding.load_embedder(save_model(tmp_path / "plain", infoxlm=settings))
    prefixed = save_model(tmp_path / "prefixed", infoxlm=settings | {"prefix": "q "})

    by_default, requested = embedding.load_embedder(prefixed), embedding.load_embedder(prefixed, prefix="r ")

    assert by_default(TEXTS).equal(plain([f"q {text}" for text in TEXTS]))
    assert requested(TEXTS).equal(plain([f"r {text}" for text in TEXTS]))
    assert not by_default(TEXTS).allclose(plain(TEXTS), atol=1e-3)


def test_an_encoder_decoder_is_refused_in_one_line(tmp_path):
    save_tokenizer(tmp_path)
    T5Model(T5Config(vocab_size=60, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2)).save_pretrained(tmp_path)

    with pytest.raises(InputError, match=r"is an encoder-decoder \(t5\): give an encoder-only model"):
        load_encoder(tmp_path)


def test_a_text_longer_than_the_model_reads_is_cut(directory):
    assert embed_sentences(directory, ["a " * 500]).isfinite().all()


@pytest.mark.parametrize("layer", range(3))
def test_layers_above_the_vector_do_not_change_it(directory, layer):
    spec = VectorSpec("mean", layer)
    expected = VectorEncoder(*load_encoder(directory), 4, 32).embed(TEXTS, [spec])

    assert embed_sentences(directory, TEXTS, layer, "mean").equal(expected[spec])


@pytest.mark.parametrize(
    ("layer", "pooling", "reason"),
    [
        (3, "mean", "layer 3 .* give 0 to 2"),
        (1, "max", "pooling 'max' .* give mean, cls, mean_no_special, contrast"),
        (1, "", "pooling '' is not known"),
    ],
)
def test_a_layer_or_pooling_that_is_not_there_is_refused(directory, layer, pooling, reason):
    with pytest.raises(InputError, match=reason):
        embed_sentences(directory, TEXTS, layer, pooling)


def test_a_directory_without_a_model_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"no config\.json"):
        load_encoder(tmp_path)


def changed(directory: Path, tmp_path: Path, **config: Any) -> Path:
    """A copy of a model whose config.json says something else."""
    shutil.copytree(directory, tmp_path / "model")
    said = json.loads((tmp_path / "model/config.json").read_bytes())
    (tmp_path / "model/config.json").write_text(json.dumps(said | config))
    return tmp_path / "model"


@pytest.mark.item("F16")
@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers: Input should be less than or equal to 1000"),
        ({"vocab_size": 7}, "its tokenizer has 31 ids, but the model only 7"),
    ],
)
def test_sizes_that_cannot_be_are_refused_before_a_model_is_made(tiny_encoders, tmp_path, config, said):
    with pytest.raises(InputError, match=said):
        embed_sentences(changed(tiny_encoders["first"], tmp_path, **config), ["a"], 1, "mean")

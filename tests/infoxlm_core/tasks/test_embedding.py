"""The vector of a sentence depends on the sentence, the layer and the pooling, and on nothing else."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModel, BertModel, DistilBertModel, T5Config, T5Model, XLMRobertaModel

from infoxlm_core.errors import InputError
from infoxlm_core.model.encoder import EncoderSize, initialise, pool
from infoxlm_core.model.heads import InfoXLM, project
from infoxlm_core.model.huggingface import pretrained
from infoxlm_core.model.huggingface.any_encoder import load_encoder, load_projection
from infoxlm_core.tasks import embedding
from infoxlm_core.tasks.embedding import VectorEncoder, VectorSpec, embed_sentences, mean_pool
from tests.toys.models import TEXTS, save_model, save_tokenizer

SPECS = [VectorSpec(pooling, layer) for pooling in ("mean", "cls") for layer in range(3)]


@pytest.fixture
def directory(tmp_path) -> Path:
    return save_model(tmp_path / "encoder")


def test_vectors_do_not_change_with_padding_or_order(directory, monkeypatch):
    model, tokenizer = load_encoder(directory)
    vectors = VectorEncoder(model, tokenizer, 1, 32).embed(TEXTS, SPECS)

    monkeypatch.setattr(embedding, "CHUNK", 3)  # the last text is tokenized later than the others
    vectors_of_reversed = VectorEncoder(model, tokenizer, 4, 32).embed(TEXTS[::-1], SPECS)

    for spec in SPECS:
        assert vectors[spec].shape == (4, 32)
        torch.testing.assert_close(vectors_of_reversed[spec].flip(0), vectors[spec], atol=1e-5, rtol=0)


def test_a_batch_has_fewer_texts_if_they_are_long():
    features = [{"input_ids": [5] * length} for length in (100, 900, 256, 700, 256, 256)]

    batches = list(embedding._group_by_length(features, batch_size=4))

    assert batches == [[1], [3], [2, 4, 5], [0]]  # at most 4 * 256 tokens, and no text much shorter than the longest


def test_a_model_stored_in_half_precision_computes_in_fp32(directory, tmp_path):
    model, tokenizer = load_encoder(directory)
    model.bfloat16().save_pretrained(tmp_path / "half")
    tokenizer.save_pretrained(tmp_path / "half")

    vectors = VectorEncoder(*load_encoder(tmp_path / "half"), 4, 32).embed(TEXTS, SPECS)

    expected = VectorEncoder(model.float(), tokenizer, 4, 32).embed(TEXTS, SPECS)
    assert all(torch.equal(vectors[spec], expected[spec]) for spec in SPECS)


@pytest.mark.item("A23")
def test_layers_and_poolings_are_those_of_hidden_states(directory):
    model, tokenizer = load_encoder(directory)
    huggingface_model = AutoModel.from_pretrained(directory).eval()
    with torch.inference_mode():
        batch = tokenizer(TEXTS[:1], return_tensors="pt")
        hidden = huggingface_model(**batch, output_hidden_states=True).hidden_states

    vectors = VectorEncoder(model, tokenizer, 1, 32).embed(TEXTS[:1], SPECS)

    for layer in range(3):
        torch.testing.assert_close(vectors[VectorSpec("mean", layer)], hidden[layer].mean(dim=1), atol=1e-5, rtol=0)
        torch.testing.assert_close(vectors[VectorSpec("cls", layer)], hidden[layer][:, 0], atol=1e-5, rtol=0)


@pytest.mark.item("A23")
def test_mean_pooling_averages_the_tokens_of_the_mask():
    hidden = torch.tensor([[[0.0], [3.0], [5.0], [16.0], [99.0]]])  # <s> a b </s> <pad>

    assert mean_pool(hidden, torch.tensor([[1, 1, 1, 1, 0]])).item() == 6.0
    assert mean_pool(hidden, torch.tensor([[0, 1, 1, 0, 0]])).item() == 4.0


@pytest.mark.item("A23")
def test_mean_without_special_tokens_includes_unknown_words(directory):
    texts = ["open the house", "a", ""]  # <s> open the <unk> </s>, a shorter one that is padded, and <s> </s>
    model, tokenizer = load_encoder(directory)
    with torch.inference_mode():
        hidden = model.base_model(**tokenizer(texts[:1], return_tensors="pt")).last_hidden_state
    specs = [VectorSpec("mean_no_special", 2), VectorSpec("mean", 2)]

    vectors = VectorEncoder(model, tokenizer, 2, 32).embed(texts, specs)

    torch.testing.assert_close(vectors[specs[0]][0], hidden[0, 1:4].mean(dim=0), atol=1e-5, rtol=0)
    assert not vectors[specs[0]][0].allclose(vectors[specs[1]][0], atol=1e-3)
    assert vectors[specs[0]].isfinite().all()  # an empty text keeps its special tokens


@pytest.mark.parametrize(("pooling", "normalise"), [("cls", False), ("mean", True)])
def test_contrast_vectors_are_those_that_pretraining_compares(tmp_path, pooling, normalise):
    tokenizer = save_tokenizer(tmp_path / "tokenizer")
    size = EncoderSize(len(tokenizer), layers=3, hidden=16, ffn=32, heads=2, positions=40)
    infoxlm = InfoXLM(size, contrast_layer=2, pooling=pooling, normalise=normalise).eval()
    initialise(infoxlm, seed=1)
    pretrained.export(infoxlm, tmp_path / "tokenizer", tmp_path / "model")
    ids = tokenizer(TEXTS[0], return_tensors="pt")["input_ids"][0]
    hidden = infoxlm.encoder(ids, torch.arange(len(ids)), (len(ids),), last_layer=2)
    expected = project(pool(hidden, (len(ids),), pooling), infoxlm.projection, normalise)

    contrast_vectors = embed_sentences(tmp_path / "model", TEXTS, pooling="contrast")
    model, tokenizer = load_encoder(tmp_path / "model")
    encoder = VectorEncoder(model, tokenizer, 2, 32, projection=load_projection(tmp_path / "model", model))
    spec = VectorSpec("contrast", 2)
    vectors_by_spec = encoder.embed(TEXTS, [VectorSpec("mean", 3), spec])

    torch.testing.assert_close(contrast_vectors[0], expected[0].detach(), atol=1e-5, rtol=0)
    torch.testing.assert_close(vectors_by_spec[spec], contrast_vectors, atol=1e-5, rtol=0)


@pytest.mark.parametrize("layer", [None, 0, 1, 2])
def test_layers_above_the_vector_do_not_change_it(directory, layer):
    spec = VectorSpec("mean", 1 if layer is None else layer)  # 1 is the layer in config.json
    expected = VectorEncoder(*load_encoder(directory), 4, 32).embed(TEXTS, [spec])

    assert embed_sentences(directory, TEXTS, layer).equal(expected[spec])
    assert embed_sentences(directory, [], layer).shape == (0, 32)


@pytest.mark.parametrize("kind", [BertModel, DistilBertModel, XLMRobertaModel])
def test_vectors_of_any_encoder_are_the_means_of_its_hidden_states(tmp_path, kind):
    tokenizer = save_tokenizer(tmp_path)
    torch.manual_seed(1)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    model = kind(kind.config_class(vocab_size=len(tokenizer), max_position_embeddings=40, pad_token_id=1, **sizes))
    model.eval().save_pretrained(tmp_path)
    batch = tokenizer(TEXTS[2], return_tensors="pt", return_token_type_ids=False)  # DistilBERT accepts none
    with torch.inference_mode():
        hidden = model(**batch, output_hidden_states=True).hidden_states

    vectors = embed_sentences(tmp_path, TEXTS, layer=2, pooling="mean")

    torch.testing.assert_close(vectors[2], hidden[2][0].mean(dim=0), atol=1e-5, rtol=0)


def test_a_prefix_is_added_before_every_sentence(tmp_path):
    settings = {"layer": 1, "pooling": "mean", "normalise": False}
    embed = embedding.load_embedder(save_model(tmp_path / "model", infoxlm=settings))
    model_with_prefix = save_model(tmp_path / "prefixed", infoxlm=settings | {"prefix": "q "})

    vectors = embedding.load_embedder(model_with_prefix)(TEXTS)
    vectors_of_other_prefix = embedding.load_embedder(model_with_prefix, prefix="r ")(TEXTS)

    assert vectors.equal(embed([f"q {text}" for text in TEXTS]))
    assert vectors_of_other_prefix.equal(embed([f"r {text}" for text in TEXTS]))
    assert not vectors.allclose(embed(TEXTS), atol=1e-3)


@pytest.mark.parametrize(
    ("layer", "pooling", "reason"),
    [
        (3, "mean", "no layer 3: give 0 to 2"),
        (1, "max", "pooling 'max' .* give mean, cls, mean_no_special, contrast"),
        (1, "", "pooling '' is not known"),
        (None, "contrast", r"has no contrast vectors .* give mean or cls"),
    ],
)
def test_unknown_layers_and_poolings_are_refused(directory, layer, pooling, reason):
    with pytest.raises(InputError, match=reason):
        embed_sentences(directory, TEXTS, layer, pooling)


def test_directories_without_an_encoder_are_refused(tmp_path):
    with pytest.raises(InputError, match=r"no config\.json"):
        load_encoder(tmp_path)
    save_tokenizer(tmp_path)
    T5Model(T5Config(vocab_size=60, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2)).save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"is an encoder-decoder \(t5\): give an encoder-only model"):
        load_encoder(tmp_path)


@pytest.mark.item("F16")
@pytest.mark.parametrize(
    ("changed_fields", "reason"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers: Input should be less than or equal to 1000"),
        ({"vocab_size": 7}, "its tokenizer has 41 ids, but the model only 7"),
    ],
)
def test_impossible_sizes_are_refused_before_a_model_is_built(directory, changed_fields, reason):
    config = json.loads((directory / "config.json").read_bytes())
    (directory / "config.json").write_text(json.dumps(config | changed_fields))

    with pytest.raises(InputError, match=reason):
        embed_sentences(directory, ["a"], 1, "mean")

"""The vectors that users get from a model if they name no layer and pooling."""

import json
import logging
from pathlib import Path

import pytest
import torch

from infoxlm_core.errors import InputError
from infoxlm_core.model.huggingface.any_encoder import find_embedding_settings, load_encoder, read_embedding_settings
from infoxlm_core.tasks.embedding import VectorEncoder, VectorSpec, embed_sentences
from tests.toys.exports import MAX_TOKENS, write_modules
from tests.toys.models import TEXTS, save_model


def write_pooling(directory: Path, **settings: str | bool | list[str]) -> None:
    """Replace the config of the module Pooling."""
    (directory / "1_Pooling/config.json").write_text(json.dumps(settings))


@pytest.fixture
def directory(tmp_path) -> Path:
    """Write a sentence-transformers model whose pooling is the mean of all tokens."""
    save_model(tmp_path, infoxlm=None)
    write_modules(tmp_path, pooling="mean", prefix="")
    return tmp_path


@pytest.mark.parametrize(
    ("settings", "pooling"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True, "include_prompt": True}, "mean"),
        ({"embedding_dimension": 32, "pooling_mode": "cls", "include_prompt": True}, "cls"),  # since version 6
    ],
)
def test_sentence_transformers_model_is_used_with_its_own_pooling(settings, pooling, directory):
    write_pooling(directory, **settings)

    model, _ = load_encoder(directory, "cpu")
    assert read_embedding_settings(directory) == find_embedding_settings(model) == (2, pooling)
    assert torch.equal(embed_sentences(directory, TEXTS), embed_sentences(directory, TEXTS, 2, pooling))


def test_our_models_use_their_contrast_layer_and_others_the_mean_of_the_last(tmp_path):
    ours = save_model(tmp_path / "ours", infoxlm={"layer": 1, "pooling": "cls", "normalise": False})
    write_modules(ours, pooling="mean", prefix="")
    plain = save_model(tmp_path / "plain", infoxlm=None)

    assert read_embedding_settings(ours) == (1, "cls")
    assert read_embedding_settings(plain) == (2, "mean")


def test_dense_module_is_ignored_with_one_warning(directory, caplog):
    modules = json.loads((directory / "modules.json").read_text())
    dense = {"idx": 3, "name": "3", "path": "3_Dense", "type": "sentence_transformers.models.Dense"}
    (directory / "modules.json").write_text(json.dumps([*modules, dense]))

    model, _ = load_encoder(directory, "cpu")

    with caplog.at_level(logging.WARNING):
        assert read_embedding_settings(directory) == find_embedding_settings(model) == (2, "mean")

    assert caplog.text.count("vectors are taken before its module Dense, which is not used") == 1


def test_texts_are_truncated_to_the_length_of_the_model_or_its_tokenizer_or_else_to_the_positions(directory):
    long_text = [" ".join(TEXTS * 4)]
    model, tokenizer = load_encoder(directory, "cpu")
    spec = VectorSpec("mean", 2)
    expected = {
        length: VectorEncoder(model, tokenizer, 1, length).embed(long_text, [spec])[spec] for length in (MAX_TOKENS, 38)
    }

    assert not torch.allclose(expected[MAX_TOKENS], expected[38], atol=1e-3)
    assert torch.equal(embed_sentences(directory, long_text), expected[MAX_TOKENS])
    (directory / "sentence_bert_config.json").unlink()
    assert torch.equal(embed_sentences(directory, long_text), expected[38])

    # Version 6 of sentence-transformers stores the length only in the settings of the tokenizer.
    (directory / "sentence_bert_config.json").write_text('{"module_output_name": "token_embeddings"}')
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps(settings | {"model_max_length": MAX_TOKENS}))
    assert torch.equal(embed_sentences(directory, long_text), expected[MAX_TOKENS])
    (directory / "tokenizer_config.json").write_text(json.dumps(settings | {"model_max_length": 2}))
    with pytest.raises(InputError, match=r"tokenizer_config\.json: model_max_length is 2; set a whole number from 3"):
        embed_sentences(directory, long_text)


def test_pickle_beside_the_weights_is_not_read(directory):
    expected = embed_sentences(directory, TEXTS)
    (directory / "pytorch_model.bin").write_bytes(b"no pickle")

    assert torch.equal(embed_sentences(directory, TEXTS), expected)


@pytest.mark.parametrize("settings", [{"pooling_mode_max_tokens": True}, {"pooling_mode": ["cls", "mean"]}])
def test_unknown_pooling_is_refused_unless_the_user_names_one(settings, directory):
    write_pooling(directory, **settings)

    with pytest.raises(InputError, match=r"1_Pooling/config\.json: its pooling is .*, not cls or mean"):
        embed_sentences(directory, TEXTS)
    assert len(embed_sentences(directory, TEXTS, 2, "mean")) == len(TEXTS)


def test_default_prompt_is_added_to_every_sentence(directory):
    write_modules(directory, pooling="mean", prefix="query: ")

    prefixed = [f"query: {text}" for text in TEXTS]
    assert torch.equal(embed_sentences(directory, TEXTS), embed_sentences(directory, prefixed, prefix=""))

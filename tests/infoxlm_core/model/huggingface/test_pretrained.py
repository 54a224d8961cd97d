"""Pre-training starts from public encoders and keeps their class, positions, token types and padding."""

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    BertConfig,
    BertForMaskedLM,
    BertModel,
    DistilBertConfig,
    DistilBertForMaskedLM,
    DistilBertModel,
    PreTrainedModel,
    XLMRobertaConfig,
    XLMRobertaForMaskedLM,
    XLMRobertaModel,
)

from infoxlm_core import manifests
from infoxlm_core.data.layouts import number_positions
from infoxlm_core.data.shards import open_shards
from infoxlm_core.data.vocabulary import Vocabulary
from infoxlm_core.errors import ConfigError, InputError
from infoxlm_core.model.huggingface.any_encoder import read_embedding_settings
from infoxlm_core.stages.pretraining import pretrain
from infoxlm_core.systems.infoxlm.system import build
from tests.toys.exports import write_modules
from tests.toys.pretraining import VOCABULARY, tiny_config, write_shards

WORDPIECE = Vocabulary(begin=3, end=2, pad=0, unk=1, mask=63, special_ids=(0, 1, 2, 3, 63), size=VOCABULARY)
SPARE_ROWS = VOCABULARY + 35  # multilingual-e5-small has 35 more rows than its tokenizer has ids
CONTRAST_ALONE = {"mlm": 0.0, "tlm": 0.0}
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
DISTIL_SIZES = {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32}


def xlmr(model_class: type, positions: int = 34) -> PreTrainedModel:
    fields = {"vocab_size": VOCABULARY, "type_vocab_size": 1, "pad_token_id": 1, "layer_norm_eps": 1e-5}
    return model_class(XLMRobertaConfig(**SIZES, **fields, max_position_embeddings=positions))


def bert(model_class: type, rows: int = VOCABULARY, **fields) -> PreTrainedModel:
    return model_class(BertConfig(**SIZES, vocab_size=rows, max_position_embeddings=32, **fields))


def distilbert(model_class: type) -> PreTrainedModel:
    return model_class(DistilBertConfig(**DISTIL_SIZES, vocab_size=VOCABULARY, max_position_embeddings=32))


STARTS = {  # public encoders -> a tiny model with their class, token types, positions, rows and padding
    "multilingual-e5-small, paraphrase-multilingual-MiniLM": lambda: bert(BertModel, SPARE_ROWS, pad_token_id=0),
    "multilingual-e5-base, paraphrase-multilingual-mpnet, granite": lambda: xlmr(XLMRobertaModel),
    "bge-m3, snowflake-arctic-embed": lambda: xlmr(XLMRobertaModel, positions=66),
    "xlm-roberta-base": lambda: xlmr(XLMRobertaForMaskedLM),
    "LaBSE": lambda: bert(BertModel),
    "bert-base-multilingual-cased": lambda: bert(BertForMaskedLM),
    "distiluse-base-multilingual-cased": lambda: distilbert(DistilBertModel),
    "distilbert-base-multilingual-cased": lambda: distilbert(DistilBertForMaskedLM),
}
WORDPIECE_STARTS = {"LaBSE", "bert-base-multilingual-cased"} | {name for name in STARTS if name.startswith("distil")}


def save(model: PreTrainedModel, directory: Path) -> PreTrainedModel:
    """Save a model with weights so large that every part of it changes the output."""
    torch.manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(directory)
    return model.eval()


def reload(directory: Path) -> PreTrainedModel:
    """Load an exported model as a user does."""
    architecture = json.loads((directory / "config.json").read_text())["architectures"][0]
    return (AutoModelForMaskedLM if architecture.endswith("ForMaskedLM") else AutoModel).from_pretrained(directory)


@pytest.fixture(scope="module")
def wordpiece_shards(tmp_path_factory) -> Path:
    return write_shards(tmp_path_factory.mktemp("wordpiece"), {"one": 40, "two": 25}, vocabulary=WORDPIECE)


@pytest.mark.parametrize("name", STARTS)
def test_public_encoder_is_trained_and_exported_in_its_class(name, tiny_shards, wordpiece_shards, tmp_path):
    shards_path = wordpiece_shards if name in WORDPIECE_STARTS else tiny_shards
    start = save(STARTS[name](), tmp_path / "start")
    (tmp_path / "start/README.md").write_text("---\nlicense: mit\n---\n# A public encoder\n")
    has_head = type(start).__name__.endswith("ForMaskedLM")
    config = tiny_config(
        model={"start": str(tmp_path / "start")},
        objectives={} if has_head else CONTRAST_ALONE,
        optimization={"steps": 1, "warmup_steps": 0},
    )
    vocabulary = open_shards(shards_path).vocabulary

    # Our encoder computes what Transformers computes for a padded batch.
    model = build(config, open_shards(shards_path))
    assert (model.head is not None) == has_head
    lengths = (5, 1, 9, 3)
    ids = torch.randint(4, VOCABULARY - 1, (sum(lengths),), generator=torch.Generator().manual_seed(5))
    padded = torch.nn.utils.rnn.pad_sequence(ids.split(lengths), batch_first=True, padding_value=vocabulary.pad)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones(n).long() for n in lengths], batch_first=True)
    with torch.no_grad():
        hidden_states = start(padded, attention_mask=mask, output_hidden_states=True).hidden_states
        positions = torch.from_numpy(number_positions(torch.tensor(lengths).numpy()))
        for layer, expected in enumerate(hidden_states):
            hidden = model.encoder(ids, positions, lengths, last_layer=layer)
            torch.testing.assert_close(hidden, expected[mask.bool()], atol=2e-6, rtol=0)

    # The export before the first step equals the start. A step changes all weights but the pooler.
    pretrain(config, shards_path, tmp_path / "out", tmp_path / "run")
    assert manifests.load(tmp_path / "out/encoder")["facts"]["origin"] == {"licence": "mit"}
    first, last = reload(tmp_path / "out/start"), reload(tmp_path / "out/encoder")
    assert type(first) is type(last) is type(start)
    settings = {"infoxlm": first.config.infoxlm, "_name_or_path": first.config._name_or_path}
    assert first.config.to_dict() == start.config.to_dict() | settings
    trained = last.state_dict()
    for weight_name, weight in start.state_dict().items():
        assert torch.equal(first.state_dict()[weight_name], weight), weight_name
        is_untrained = "pooler" in weight_name
        assert torch.equal(trained[weight_name], weight) == is_untrained, weight_name
    assert (
        load_file(tmp_path / "out/start/model.safetensors").keys()
        == load_file(tmp_path / "start/model.safetensors").keys()
    )


@pytest.mark.parametrize(
    "name", ["xlm-roberta-base", "bert-base-multilingual-cased", "distilbert-base-multilingual-cased"]
)
def test_start_that_stores_a_copy_of_tied_weights_is_exported_without_it(name, tiny_shards, wordpiece_shards, tmp_path):
    start = save(STARTS[name](), tmp_path / "start")
    all_weights = {weight_name: weight.clone() for weight_name, weight in start.state_dict().items()}
    save_file(all_weights, tmp_path / "start/model.safetensors", metadata={"format": "pt"})
    shards_path = wordpiece_shards if name in WORDPIECE_STARTS else tiny_shards
    config = tiny_config(model={"start": str(tmp_path / "start")}, optimization={"steps": 1, "warmup_steps": 0})

    pretrain(config, shards_path, tmp_path / "out", tmp_path / "run")

    encoder = reload(tmp_path / "out/encoder")
    assert torch.equal(encoder.get_output_embeddings().weight, encoder.get_input_embeddings().weight)


def test_start_without_head_gets_a_new_one_for_mlm(tiny_shards, tmp_path, caplog):
    save(bert(BertModel), tmp_path / "start")
    config = tiny_config(model={"start": str(tmp_path / "start")}, optimization={"steps": 1, "warmup_steps": 0})

    with caplog.at_level(logging.WARNING):
        pretrain(config, tiny_shards, tmp_path / "out", tmp_path / "run")

    assert "start has no masked-LM head: MLM and TLM train a new one with random weights" in caplog.text
    assert isinstance(reload(tmp_path / "out/encoder"), BertForMaskedLM)


def test_export_before_the_first_step_has_the_vectors_of_the_start(tiny_shards, tmp_path):
    save(xlmr(XLMRobertaModel), tmp_path / "start")
    write_modules(tmp_path / "start", pooling="cls", prefix="")
    config = tiny_config(
        model={"start": str(tmp_path / "start")},
        objectives=CONTRAST_ALONE,
        contrast={"layer": 1, "pooling": "mean"},
        optimization={"steps": 1, "warmup_steps": 0},
    )

    pretrain(config, tiny_shards, tmp_path / "out", tmp_path / "run")

    assert read_embedding_settings(tmp_path / "out/start") == (2, "cls")
    assert not (tmp_path / "out/start/projection.safetensors").exists()
    assert read_embedding_settings(tmp_path / "out/encoder") == (1, "mean")
    assert (tmp_path / "out/encoder/projection.safetensors").exists()


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"hidden_act": "relu"}, "hidden_act is 'relu', not 'gelu'"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key', not 'absolute'"),
        ({"is_decoder": True}, "is_decoder is True, not False"),
        ({"model_type": "gte"}, "model_type is 'gte', not one of xlm-roberta, roberta, bert, distilbert: start from"),
    ],
)
def test_start_that_the_encoder_cannot_compute_is_refused(change, error, tiny_shards, tmp_path):
    save(bert(BertModel), tmp_path / "start")
    path = tmp_path / "start/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))

    with pytest.raises(InputError, match=error):
        build(tiny_config(model={"start": str(tmp_path / "start")}), open_shards(tiny_shards))


def test_start_whose_padding_differs_from_the_tokenizer_is_refused(wordpiece_shards, tmp_path):
    save(xlmr(XLMRobertaModel), tmp_path / "start")  # counts positions from its padding 1 on; the shards pad with 0

    with pytest.raises(ConfigError, match="pad_token_id is 1, but the tokenizer pads with 0"):
        build(tiny_config(model={"start": str(tmp_path / "start")}), open_shards(wordpiece_shards))

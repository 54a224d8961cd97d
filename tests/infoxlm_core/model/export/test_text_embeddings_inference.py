"""An export has every file, field and weight that text-embeddings-inference reads.

text-embeddings-inference itself is not run. The names and types are those of its source, version 1.9.3: `ModelConfig`,
`PoolConfig`, `STConfig` and `NewSTConfig` in router/src/lib.rs, `BertConfig`, `DistilBertConfig` and the functions
`load` in backends/candle/src/models, and `ModuleType` in backends/src/lib.rs.
"""

import json

import pytest
from pydantic import TypeAdapter
from tokenizers import Tokenizer

from infoxlm_core.model.export import sentence_encoder, sentence_transformers
from infoxlm_core.model.huggingface import stored_weights
from tests.toys.exports import save_encoder

BERT_FIELDS = {
    "vocab_size": int, "hidden_size": int, "num_hidden_layers": int, "num_attention_heads": int,
    "intermediate_size": int, "hidden_act": str, "hidden_dropout_prob": float, "max_position_embeddings": int,
    "type_vocab_size": int, "initializer_range": float, "layer_norm_eps": float, "pad_token_id": int,
}  # fmt: skip
DISTILBERT_FIELDS = {
    "vocab_size": int, "dim": int, "n_layers": int, "n_heads": int, "hidden_dim": int, "activation": str,
    "max_position_embeddings": int, "pad_token_id": int,
}  # fmt: skip
MODULE_TYPES = [f"sentence_transformers.models.{name}" for name in ("Transformer", "Pooling", "Normalize")]


def linear(name, rows, columns):
    return {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}


def norm(name, size):
    return {f"{name}.weight": (size,), f"{name}.bias": (size,)}


def bert_weights(config):
    """Names and shapes of the weights that are read for the model types bert and xlm-roberta."""
    width = config["hidden_size"]
    weights = {
        "embeddings.word_embeddings.weight": (config["vocab_size"], width),
        "embeddings.token_type_embeddings.weight": (config["type_vocab_size"], width),
        "embeddings.position_embeddings.weight": (config["max_position_embeddings"], width),
    }
    weights |= norm("embeddings.LayerNorm", width)
    for number in range(config["num_hidden_layers"]):
        layer = f"encoder.layer.{number}"
        for name in ("self.query", "self.key", "self.value", "output.dense"):
            weights |= linear(f"{layer}.attention.{name}", width, width)
        weights |= norm(f"{layer}.attention.output.LayerNorm", width)
        weights |= linear(f"{layer}.intermediate.dense", config["intermediate_size"], width)
        weights |= linear(f"{layer}.output.dense", width, config["intermediate_size"])
        weights |= norm(f"{layer}.output.LayerNorm", width)
    return weights


def distilbert_weights(config):
    """Names and shapes of the weights that are read for the model type distilbert."""
    width = config["dim"]
    weights = {
        "embeddings.word_embeddings.weight": (config["vocab_size"], width),
        "embeddings.position_embeddings.weight": (config["max_position_embeddings"], width),
    }
    weights |= norm("embeddings.LayerNorm", width)
    for number in range(config["n_layers"]):
        layer = f"transformer.layer.{number}"
        for name in ("q_lin", "k_lin", "v_lin", "out_lin"):
            weights |= linear(f"{layer}.attention.{name}", width, width)
        weights |= linear(f"{layer}.ffn.lin1", config["hidden_dim"], width)
        weights |= linear(f"{layer}.ffn.lin2", width, config["hidden_dim"])
        weights |= norm(f"{layer}.sa_layer_norm", width)
        weights |= norm(f"{layer}.output_layer_norm", width)
    return weights


@pytest.mark.parametrize(
    ("kind", "model_type", "position_offset"),
    [("infoxlm", "xlm-roberta", 2), ("e5", "bert", 0), ("bge", "bert", 0), ("distilbert", "distilbert", 0)],
)
def test_an_export_has_the_files_fields_and_weights_that_are_read(tmp_path, kind, model_type, position_offset):
    source = save_encoder(tmp_path / "source", kind)
    output = tmp_path / "output"
    encoder = sentence_encoder.load(source)
    sentence_transformers.write(encoder, source, output, sentence_transformers.read_tokenizer(source))

    def read(name):
        return json.loads((output / name).read_bytes())

    config = read("config.json")
    assert config["model_type"] == model_type and config["architectures"][0].endswith("Model")
    is_distilbert = model_type == "distilbert"
    fields = DISTILBERT_FIELDS if is_distilbert else BERT_FIELDS
    for name, field_type in fields.items():
        TypeAdapter(field_type).validate_python(config[name], strict=True)
    weights = distilbert_weights(config) if is_distilbert else bert_weights(config)
    stored = {name: weight.shape for name, weight in stored_weights.read_headers(output).items()}
    assert weights.items() <= stored.items()

    max_tokens = read("sentence_bert_config.json")["max_seq_length"]
    assert 0 < max_tokens <= config["max_position_embeddings"] - position_offset
    pooling = read("1_Pooling/config.json")
    assert pooling["pooling_mode_cls_token"] is (kind == "bge")
    assert pooling["pooling_mode_mean_tokens"] is (kind != "bge")
    modules = read("modules.json")
    assert [module["type"] for module in modules] == MODULE_TYPES[: len(modules)]
    assert read("config_sentence_transformers.json")["prompts"] == ({"query": "query: "} if kind == "e5" else {})
    assert Tokenizer.from_file(str(output / "tokenizer.json")).get_vocab_size() == config["vocab_size"]

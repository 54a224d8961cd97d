import json
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from pydantic import TypeAdapter
from tokenizers import Tokenizer

from infoxlm_core.errors import InputError
from infoxlm_core.model.export import sentence_encoder, sentence_transformers
from infoxlm_core.model.huggingface import pretrained, stored_weights
from infoxlm_core.tasks.embedding import load_embedder
from infoxlm_core.tasks.reference_vectors import SENTENCES
from tests.toys.exports import MAX_TOKENS, save_encoder

KINDS = ("infoxlm", "e5", "bge", "distilbert")
CLASSES = {"infoxlm": "XLMRobertaModel", "e5": "BertModel", "bge": "BertModel", "distilbert": "DistilBertModel"}
LAYERS = {"infoxlm": 2, "e5": 3, "bge": 3, "distilbert": 2}
TEXTS = [*SENTENCES, " ".join(SENTENCES)]  # the last one has more tokens than the toy encoders read
BERT_FIELDS = {
    "vocab_size": int, "hidden_size": int, "num_hidden_layers": int, "num_attention_heads": int,
    "intermediate_size": int, "hidden_act": str, "hidden_dropout_prob": float, "max_position_embeddings": int,
    "type_vocab_size": int, "initializer_range": float, "layer_norm_eps": float, "pad_token_id": int,
}  # fmt: skip
DISTILBERT_FIELDS = {
    "vocab_size": int, "dim": int, "n_layers": int, "n_heads": int, "hidden_dim": int, "activation": str,
    "max_position_embeddings": int, "pad_token_id": int,
}  # fmt: skip
ENCODE = """
import json, sys, sentence_transformers
texts, directories = json.load(sys.stdin)
vectors = []
for directory in directories:
    model = sentence_transformers.SentenceTransformer(directory, device="cpu", local_files_only=True)
    vectors.append(model.encode(texts, show_progress_bar=False).tolist())
print(json.dumps({"version": sentence_transformers.__version__, "vectors": vectors}))
"""


def export(kind, folder):
    source = save_encoder(folder / kind, kind)
    encoder = sentence_encoder.load(source)
    sentence_transformers.write(encoder, source, folder / "out" / kind, sentence_transformers.read_tokenizer(source))
    return source, folder / "out" / kind


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Return the source and the export of each kind of encoder."""
    folder = tmp_path_factory.mktemp("exports")
    return {kind: export(kind, folder) for kind in KINDS}


def embed_original(source):
    """Return the vectors of `infoxlm embed`, divided by their lengths if the model has a module Normalize."""
    vectors = load_embedder(source)(TEXTS)
    return F.normalize(vectors, dim=1) if (source / "modules.json").is_file() else vectors


@pytest.mark.parametrize("kind", KINDS)
def test_export_ends_at_the_layer_of_its_vector_and_has_the_class_of_its_source(exported, kind):
    source, output = exported[kind]
    config = json.loads((output / "config.json").read_bytes())

    assert config["architectures"] == [CLASSES[kind]]
    assert config["n_layers" if kind == "distilbert" else "num_hidden_layers"] == LAYERS[kind]
    assert not any("lm_head" in name for name in stored_weights.read_headers(output))
    embedder = load_embedder(output)
    assert embedder.spec == ("cls" if kind == "bge" else "mean", LAYERS[kind])
    assert torch.allclose(embedder(TEXTS), load_embedder(source)(TEXTS), atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_files_describe_pooling_length_prompts_and_modules(exported, kind):
    """Check what sentence-transformers and text-embeddings-inference 1.9.3 read (router, backends/candle)."""
    _, output = exported[kind]

    def read(name):
        return json.loads((output / name).read_bytes())

    config = read("config.json")
    assert config["model_type"] == {"infoxlm": "xlm-roberta", "distilbert": "distilbert"}.get(kind, "bert")
    for name, field_type in (DISTILBERT_FIELDS if kind == "distilbert" else BERT_FIELDS).items():
        TypeAdapter(field_type).validate_python(config[name], strict=True)
    assert Tokenizer.from_file(str(output / "tokenizer.json")).get_vocab_size() == config["vocab_size"]
    assert read("1_Pooling/config.json") == {
        "word_embedding_dimension": 32,
        "pooling_mode_cls_token": kind == "bge",
        "pooling_mode_mean_tokens": kind != "bge",
        "pooling_mode_max_tokens": False,
        "pooling_mode_mean_sqrt_len_tokens": False,
    }
    has_modules = kind in ("e5", "bge")
    max_tokens = MAX_TOKENS if has_modules else pretrained.find_max_tokens(config)
    assert read("sentence_bert_config.json") == {"max_seq_length": max_tokens, "do_lower_case": False}
    assert read("tokenizer_config.json")["model_max_length"] == max_tokens
    prompts = read("config_sentence_transformers.json")
    assert prompts["prompts"] == ({"query": "query: "} if kind == "e5" else {})
    assert prompts["default_prompt_name"] == ("query" if kind == "e5" else None)
    types = [module["type"].removeprefix("sentence_transformers.models.") for module in read("modules.json")]
    assert types == ["Transformer", "Pooling", "Normalize"][: 3 if has_modules else 2]


@pytest.mark.slow
@pytest.mark.parametrize("version", ["3.4.1", "6.2.0"])
def test_old_and_new_versions_of_sentence_transformers_compute_our_vectors(exported, tmp_path, version):
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(tmp_path / "packages")]
    subprocess.run([*install, f"sentence-transformers=={version}"], check=True)
    directories = [str(output) for _, output in exported.values()]
    process = subprocess.run(
        [sys.executable, "-P", "-c", ENCODE], input=json.dumps([TEXTS, directories]), capture_output=True, text=True,
        check=True, env={**os.environ, "PYTHONPATH": str(tmp_path / "packages")},
    )  # fmt: skip
    result = json.loads(process.stdout)

    assert result["version"] == version
    for (kind, (source, _)), vectors in zip(exported.items(), result["vectors"], strict=True):
        assert torch.allclose(torch.tensor(vectors), embed_original(source), atol=1e-5), kind


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"pooling": "median"}, r"pooling median cannot be exported: give a model with cls or mean"),
        ({"layer": 0}, r"vectors of layer 0 cannot be exported: give layer 1 to 3"),
    ],
)
def test_vector_that_cannot_be_exported_is_refused(change, problem, tmp_path):
    source = save_encoder(tmp_path / "model", "infoxlm")
    config = json.loads((source / "config.json").read_bytes())
    config["infoxlm"] |= change
    (source / "config.json").write_text(json.dumps(config))

    with pytest.raises(InputError, match=problem):
        sentence_encoder.load(source)

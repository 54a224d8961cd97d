"""Exports an encoder as a sentence-transformers model, in the layout of version 2.

    config.json, model.safetensors           the encoder without its head and the layers above its sentence vectors
    tokenizer.json, tokenizer_config.json    its tokenizer, with the maximum length in tokens
    modules.json                             the modules in order: encoder, pooling, normalization
    sentence_bert_config.json                the maximum length in tokens
    1_Pooling/config.json                    the pooling mode
    config_sentence_transformers.json        prompts: texts to prepend to a sentence

sentence-transformers 2 to 6 and Hugging Face's text-embeddings-inference all read this layout. Some of them cannot read
the layout that version 6 writes.
"""

import json
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from infoxlm_core import user_files
from infoxlm_core.errors import InputError
from infoxlm_core.model.export.sentence_encoder import SentenceEncoder
from infoxlm_core.model.huggingface import pretrained, tokenizers
from infoxlm_core.model.huggingface.any_encoder import LENGTH_FILE, PROMPTS_FILE, read_max_seq_length
from infoxlm_core.model.huggingface.directories import MODULES, POOLING

_MODULE_PACKAGE = "sentence_transformers.models"


def write(encoder: SentenceEncoder, source: Path, directory: Path, tokenizer: str) -> None:
    """Write a sentence-transformers model.

    Args:
        encoder: the encoder, loaded from `source`.
        source: Hugging Face directory of the encoder.
        directory: output directory.
        tokenizer: content of tokenizer.json: the source's tokenizer, possibly trimmed.
    """
    directory.mkdir(parents=True, exist_ok=True)
    max_tokens = read_max_seq_length(source)
    _write_encoder(encoder, source, directory)
    (directory / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
    _write_tokenizer_settings(source, directory, max_tokens)
    _write_modules(encoder, directory)
    _write_json(directory / LENGTH_FILE, {"max_seq_length": max_tokens, "do_lower_case": False})
    prompts = encoder.settings.prompts
    prompt_config = {
        "__version__": {"sentence_transformers": "3.0.0"},  # the oldest version with all of these keys
        "prompts": dict(prompts.text_by_name),
        "default_prompt_name": prompts.default_name,
        "similarity_fn_name": "cosine",
    }
    _write_json(directory / PROMPTS_FILE, prompt_config)


def _write_modules(encoder: SentenceEncoder, directory: Path) -> None:
    """Write modules.json, which lists the modules in order, and the config of the pooling module."""
    path_by_module = {"Transformer": "", "Pooling": POOLING}
    if encoder.settings.normalise:
        path_by_module["Normalize"] = "2_Normalize"  # only a name: this module has no files, so no directory
    modules = []
    for number, (name, path) in enumerate(path_by_module.items()):
        modules.append({"idx": number, "name": str(number), "path": path, "type": f"{_MODULE_PACKAGE}.{name}"})
    _write_json(directory / MODULES, modules)
    pooling_config = {
        "word_embedding_dimension": encoder.encoder.config.hidden_size,
        "pooling_mode_cls_token": encoder.settings.pooling == "cls",
        "pooling_mode_mean_tokens": encoder.settings.pooling == "mean",
        "pooling_mode_max_tokens": False,
        "pooling_mode_mean_sqrt_len_tokens": False,
    }
    _write_json(directory / POOLING / "config.json", pooling_config)


def _write_encoder(encoder: SentenceEncoder, source: Path, directory: Path) -> None:
    """Write model.safetensors and config.json. Weight names and config fields are those of the source model."""
    model = encoder.encoder
    settings = encoder.settings
    weights = {name: value.contiguous() for name, value in model.state_dict().items()}
    save_file(weights, directory / pretrained.WEIGHTS, metadata={"format": "pt"})
    config = pretrained.read_config(source)
    for name in config:
        if name == "vocab_size" or name.endswith("_token_id"):  # a trimmed tokenizer has different ids
            config[name] = getattr(model.config, name)
    config["architectures"] = [type(model).__name__]
    # The layers above the sentence vectors were removed. DistilBERT calls the number of layers n_layers.
    layer_field = model.config.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    config[layer_field] = settings.layer
    config.pop("torch_dtype", None)  # former name of `dtype`
    config["dtype"] = "float32"
    # `infoxlm embed` reads this key, so it computes the same vectors as sentence-transformers.
    config["infoxlm"] = {"layer": settings.layer, "pooling": settings.pooling, "normalise": settings.normalise}
    if settings.prefix:
        config["infoxlm"]["prefix"] = settings.prefix
    _write_json(directory / "config.json", config)


def read_tokenizer(source: Path) -> str:
    """Return the content of a model's tokenizer.json, or convert the model's other tokenizer files.

    Raises:
        InputError: the tokenizer cannot be converted.
    """
    path = source / "tokenizer.json"
    if path.is_file():
        return user_files.read_text(path, user_files.MAX_JSON)
    backend = getattr(tokenizers.load(source), "backend_tokenizer", None)
    if backend is None:
        raise InputError(f"{source} has no tokenizer.json: save its tokenizer with transformers 5")
    return str(backend.to_str())


def _write_tokenizer_settings(source: Path, directory: Path, max_tokens: int) -> None:
    """Write a tokenizer_config.json with the generic tokenizer class, which uses tokenizer.json unchanged.

    In some versions of Transformers, classes such as XLMRobertaTokenizer replace the normalizer of tokenizer.json.
    """
    tokenizer = tokenizers.load(source)
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_tokens,
        "model_input_names": ["input_ids", "attention_mask"],  # no token types, because a single text has type 0
    }
    for role in tokenizers.USUAL_TOKENS:
        token = getattr(tokenizer, role)
        if token is not None:
            settings[role] = str(token)
    _write_json(directory / "tokenizer_config.json", settings)


def _write_json(path: Path, content: Any) -> None:
    """Write a JSON file, and create its directory if necessary."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

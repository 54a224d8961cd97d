"""Reads and writes XLM-R, RoBERTa, BERT and DistilBERT models in Hugging Face's format.

Weights of all types are read under the names of XLM-R, `roberta.…` and `lm_head.…`, the *canonical names*. They are
written under the names of their own type.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, NotRequired

import torch
from pydantic import Field
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, PretrainedConfig, XLMRobertaConfig
from typing_extensions import TypedDict

from infoxlm_core import manifests, user_files
from infoxlm_core.data.vocabulary import BOS, EOS, PAD
from infoxlm_core.errors import InputError, one_line
from infoxlm_core.model.encoder import Encoder, EncoderSize
from infoxlm_core.model.heads import InfoXLM
from infoxlm_core.model.huggingface import stored_weights, tokenizers
from infoxlm_core.model.task_head import NameRules

WEIGHTS = "model.safetensors"
PROJECTION = "projection.safetensors"
CLASS_PREFIXES = {"xlm-roberta": "XLMRoberta", "roberta": "Roberta", "bert": "Bert", "distilbert": "DistilBert"}
"""A model_type that `Encoder` can compute -> the first part of the names of its classes."""
TASK_MODEL_TYPES = ("xlm-roberta", "roberta", "bert")  # types for which `task_models` has heads too
FINETUNING_DROPOUT = 0.1
"""Dropout in the config.json of exported encoders, as in XLM-R. Only Transformers reads it; our own fine-tuning takes
dropout from its settings."""

_Rows = Annotated[int, Field(gt=0, lt=2**31)]
_Width = Annotated[int, Field(gt=0, le=2**17)]
_Layers = Annotated[int, Field(ge=0, le=1000)]
_Epsilon = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


class _ContrastSettings(TypedDict):
    """The contrast settings that our models record in config.json."""

    layer: _Layers
    pooling: str
    normalise: NotRequired[bool]
    prefix: NotRequired[str]


@user_files.allow_extra_keys
class ModelDescription(TypedDict):
    """The keys of config.json that are read for models of all types. All of them are optional."""

    model_type: NotRequired[str | None]
    architectures: NotRequired[list[str] | None]
    infoxlm: NotRequired[_ContrastSettings | None]
    num_hidden_layers: NotRequired[_Layers]
    layer_norm_eps: NotRequired[_Epsilon | None]
    max_position_embeddings: NotRequired[int | None]
    pad_token_id: NotRequired[int | None]


@user_files.allow_extra_keys
class ModelSizes(TypedDict):
    """The keys of config.json that describe the sizes of an encoder."""

    vocab_size: _Rows
    num_hidden_layers: _Layers
    hidden_size: _Width
    intermediate_size: Annotated[int, Field(gt=0, le=2**20)]
    num_attention_heads: _Width
    max_position_embeddings: _Rows
    layer_norm_eps: NotRequired[_Epsilon]
    type_vocab_size: NotRequired[Annotated[int, Field(ge=0, lt=2**20)]]
    pad_token_id: NotRequired[Annotated[int, Field(ge=0, lt=2**20)] | None]


NAME_RULES = [  # our name -> canonical name
    (r"^encoder\.token_embedding\.", "roberta.embeddings.word_embeddings."),
    (r"^encoder\.position_embedding\.", "roberta.embeddings.position_embeddings."),
    (r"^encoder\.type_embedding\.", "roberta.embeddings.token_type_embeddings."),
    (r"^encoder\.embedding_norm\.", "roberta.embeddings.LayerNorm."),
    (r"^encoder\.layers\.(\d+)\.(query|key|value)\.", r"roberta.encoder.layer.\1.attention.self.\2."),
    (r"^encoder\.layers\.(\d+)\.attention_output\.", r"roberta.encoder.layer.\1.attention.output.dense."),
    (r"^encoder\.layers\.(\d+)\.attention_norm\.", r"roberta.encoder.layer.\1.attention.output.LayerNorm."),
    (r"^encoder\.layers\.(\d+)\.up\.", r"roberta.encoder.layer.\1.intermediate.dense."),
    (r"^encoder\.layers\.(\d+)\.down\.", r"roberta.encoder.layer.\1.output.dense."),
    (r"^encoder\.layers\.(\d+)\.output_norm\.", r"roberta.encoder.layer.\1.output.LayerNorm."),
    (r"^head\.dense\.", "lm_head.dense."),
    (r"^head\.norm\.", "lm_head.layer_norm."),
    (r"^head\.bias$", "lm_head.bias"),
]
_REPLACEMENTS = {  # model_type -> {part of a canonical name: its replacement}, applied in this order
    "bert": {
        "lm_head.dense.": "cls.predictions.transform.dense.",
        "lm_head.layer_norm.": "cls.predictions.transform.LayerNorm.",
        "lm_head.bias": "cls.predictions.bias",
    },
    "distilbert": {
        ".encoder.layer.": ".transformer.layer.",
        ".attention.self.query.": ".attention.q_lin.",
        ".attention.self.key.": ".attention.k_lin.",
        ".attention.self.value.": ".attention.v_lin.",
        ".attention.output.dense.": ".attention.out_lin.",
        ".attention.output.LayerNorm.": ".sa_layer_norm.",
        ".intermediate.dense.": ".ffn.lin1.",
        ".output.dense.": ".ffn.lin2.",
        ".output.LayerNorm.": ".output_layer_norm.",
        "lm_head.dense.": "vocab_transform.",
        "lm_head.layer_norm.": "vocab_layer_norm.",
        "lm_head.bias": "vocab_projector.bias",
    },
}
_ENCODER_PREFIX = re.compile(r"^(roberta|bert|distilbert)\.")  # of an encoder's weights in a class with a head
_HEAD_PREFIXES = ("lm_head.", "cls.", "classifier.", "qa_outputs.", "vocab_")  # in Hugging Face's classes
_DISTILBERT_KEYS = {  # key in DistilBERT's config.json -> the same key in BERT's
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "hidden_dim": "intermediate_size",
    "activation": "hidden_act",
}

TYPE_ROW = "roberta.embeddings.token_type_embeddings.weight"  # a single row in XLM-R, which has one token type


def to_hugging_face_name(name: str, extra_rules: NameRules = ()) -> str:
    """Return the canonical name of one of our parameters. `extra_rules` are tried before the rules of the encoder.

    Example: `encoder.layers.0.up.bias` -> `roberta.encoder.layer.0.intermediate.dense.bias`.
    """
    return rename(name, (*extra_rules, *NAME_RULES))


def rename(name: str, rules: NameRules) -> str:
    """Apply the first rule (pattern, replacement) that matches a name. Raise KeyError if no rule matches."""
    for pattern, replacement in rules:
        renamed, match_count = re.subn(pattern, replacement, name)
        if match_count:
            return renamed
    raise KeyError(name)


def make_hugging_face_config(
    size: EncoderSize, config_class: Callable[..., PretrainedConfig] = XLMRobertaConfig, **fields: Any
) -> PretrainedConfig:
    """Return the Hugging Face config of an encoder, as for XLM-R unless another class is given.

    Args:
        size: sizes of the encoder.
        config_class: a class of configs whose sizes have the same names as XLM-R's.
        fields: additional fields of the config.
    """
    return config_class(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        intermediate_size=size.ffn,
        max_position_embeddings=size.positions,
        type_vocab_size=max(1, size.types),  # Transformers always adds a token type
        layer_norm_eps=size.epsilon,
        hidden_dropout_prob=FINETUNING_DROPOUT,
        attention_probs_dropout_prob=FINETUNING_DROPOUT,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
        **fields,
    )


def write_model(weights: Mapping[str, Tensor], config: PretrainedConfig, directory: Path) -> None:
    """Write config.json, and model.safetensors with the given weights in fp32."""
    directory.mkdir(parents=True, exist_ok=True)
    fp32_weights = {name: value.detach().float().cpu().contiguous() for name, value in weights.items()}
    save_file(fp32_weights, directory / WEIGHTS, metadata={"format": "pt"})
    config.save_pretrained(directory)


def write(
    module: nn.Module,
    config: PretrainedConfig,
    tokenizer: Path,
    directory: Path,
    name_rules: NameRules = (),
    untrained: Mapping[str, Tensor] | None = None,
) -> None:
    """Write a module and its tokenizer as a Hugging Face directory, without the contrast projection.

    Args:
        module: the module.
        config: its config, whose model type and class determine the names of the weights.
        tokenizer: directory of the tokenizer.
        directory: where to write.
        name_rules: rules for the names of the head's parameters.
        untrained: additional weights that the module does not have, by their canonical names.
    """
    weights: dict[str, Tensor] = dict(untrained or {})
    for name, parameter in module.named_parameters():
        if name != "projection":
            weights[to_hugging_face_name(name, name_rules)] = parameter
    if TYPE_ROW not in weights and config.model_type != "distilbert":  # which has no token types
        weights[TYPE_ROW] = torch.zeros(1, config.hidden_size)
    weights_in_class = {_to_name_in_class(name, config): weight for name, weight in weights.items()}
    write_model(weights_in_class, config, directory)
    tokenizers.copy(tokenizer, directory, find_max_tokens(config.to_dict()))


def _to_name_in_class(name: str, config: PretrainedConfig) -> str:
    """Convert a canonical name to the name in the class that a config names in `architectures`."""
    for canonical_part, replacement in _REPLACEMENTS.get(config.model_type, {}).items():
        name = name.replace(canonical_part, replacement)
    class_name = config.architectures[0] if config.architectures else "Model"
    has_head = not class_name.endswith("Model")
    prefix = config.model_type.removeprefix("xlm-") + "." if has_head else ""
    return re.sub(r"^roberta\.", prefix, name)


def export(model: InfoXLM, tokenizer: Path, directory: Path, start: Path | None = None, prefix: str = "") -> None:
    """Write a trained model as a Hugging Face directory, which `AutoModel` and `AutoTokenizer` load.

    The contrast projection (d, d) is in `projection.safetensors`: z = h @ projection. The key `infoxlm` of
    `config.json` records how the vector of a sentence is computed.

    Args:
        model: the trained model.
        tokenizer: directory of its tokenizer.
        directory: where to write.
        start: directory of the model that the training started from. The export has its class, and its weights that
            were not trained, such as the pooler.
        prefix: text that was added before every sentence in training.
    """
    if start is None:
        config = make_hugging_face_config(model.encoder.size)
        start_weights: dict[str, Tensor] = {}
    else:
        config = CONFIG_MAPPING[read_config(start)["model_type"]].from_dict(read_config(start))
        config.dtype = torch.float32
        start_weights = _read_independent_weights(start)
    config.infoxlm = {"layer": model.contrast_layer, "pooling": model.pooling, "normalise": model.normalise}
    if prefix:
        config.infoxlm["prefix"] = prefix
    has_head = model.head is not None or "lm_head.bias" in start_weights
    config.architectures = [_choose_class(config, has_head)]
    write(model, config, tokenizer, directory, untrained=start_weights)
    if model.projection is not None:
        projection = model.projection.detach().float().cpu().contiguous()
        save_file({"projection": projection}, directory / PROJECTION)


def _read_independent_weights(directory: Path) -> dict[str, Tensor]:
    """Return the weights of a model by their canonical names, without tied weights and constants."""
    weights: dict[str, Tensor] = {}
    for name, weight in read_weights(directory).items():
        is_tied = "decoder." in name  # the output layer of the masked-LM head
        is_constant = name.endswith("_ids")
        if not is_tied and not is_constant:
            weights[name] = weight
    return weights


def _choose_class(config: PretrainedConfig, has_head: bool) -> str:
    """Return the class of an export: that in `config`, unless only one of the two has a masked-LM head."""
    prefix = CLASS_PREFIXES[config.model_type]
    start_class: str = config.architectures[0] if config.architectures else f"{prefix}Model"
    start_has_head = start_class.endswith(("ForMaskedLM", "ForPreTraining"))
    if has_head == start_has_head:
        return start_class
    return f"{prefix}ForMaskedLM" if has_head else f"{prefix}Model"


def read_config(directory: Path) -> dict[str, Any]:
    """Return the content of config.json. Raise InputError if it is missing, or if a size in it is impossible."""
    path = directory / "config.json"
    config = user_files.read_json(path, ModelDescription, "give a Hugging Face model directory")
    stored_weights.check_counts(config, path)
    return {"model_type": None} | config  # so that callers can read the key even if the file does not have it


def can_run_packed(config: Mapping[str, Any]) -> bool:
    """Return whether our task models can compute a model with packed sequences, given the content of config.json."""
    return config["model_type"] in TASK_MODEL_TYPES and not find_unsupported_setting(config)


def find_unsupported_setting(config: Mapping[str, Any]) -> str:
    """Describe the first setting of a config.json that `Encoder` does not support. Return "" if it supports all."""
    if config["model_type"] not in CLASS_PREFIXES:
        return f"model_type is {config['model_type']!r}, not one of {', '.join(CLASS_PREFIXES)}"
    supported_values = {
        "hidden_act": "gelu",
        "activation": "gelu",
        "position_embedding_type": "absolute",
        "is_decoder": False,
        "tie_word_embeddings": True,
    }
    for key, supported_value in supported_values.items():
        if config.get(key, supported_value) != supported_value:
            return f"{key} is {config[key]!r}, not {supported_value!r}"
    return ""


def find_first_position(config: Mapping[str, Any]) -> int:
    """Return the row of a sequence's first token in the position embeddings, given the content of config.json."""
    if config["model_type"] in ("bert", "distilbert"):
        return 0
    padding_id = config.get("pad_token_id")
    if padding_id is None:
        padding_id = PAD
    return padding_id + 1  # RoBERTa and XLM-R use the row of the padding id for padding


def find_max_tokens(config: Mapping[str, Any]) -> int:
    """Return the largest number of tokens of a sequence, special tokens included, given the content of config.json."""
    position_count = config.get("max_position_embeddings") or 0
    if config["model_type"] in CLASS_PREFIXES:
        return position_count - find_first_position(config)
    # Some other types number positions like RoBERTa, from 2. For the rest, two unused positions do no harm.
    return position_count - 2 if position_count > 2 else 512


def read_encoder_size(directory: Path) -> EncoderSize:
    """Return the sizes of an encoder from its config.json, and check that the stored weights have these sizes.

    Raises:
        InputError: there is no config.json, it describes a model that `Encoder` cannot compute, or the weights have
            other shapes.
    """
    config = _read_supported_config(directory)
    headers = stored_weights.read_headers(directory)
    type_count = config.get("type_vocab_size", 2)  # 2 and 1e-12 are the defaults of Transformers
    if type_count == 1 and not _has_nonzero_type_row(headers):
        type_count = 0  # a row of zeros adds nothing, and is not trained
    size = EncoderSize(
        vocabulary=config["vocab_size"],
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        ffn=config["intermediate_size"],
        heads=config["num_attention_heads"],
        positions=config["max_position_embeddings"],
        epsilon=config.get("layer_norm_eps", 1e-12),
        types=type_count,
        first_position=find_first_position(config),
    )
    if headers:  # without weights, a training run can still be planned
        _check_size(size, headers, directory)
    return size


def _read_supported_config(directory: Path) -> dict[str, Any]:
    """Return the content of config.json with the keys of XLM-R.

    Raises:
        InputError: `Encoder` cannot compute the model, or a size is invalid.
    """
    path = directory / "config.json"
    config = read_config(directory)
    unsupported_setting = find_unsupported_setting(config)
    if unsupported_setting:
        raise InputError(
            f"{path}: {unsupported_setting}: start from another model; "
            "infoxlm evaluate and infoxlm embed can use this one"
        )
    if config["model_type"] == "distilbert":
        config = {_DISTILBERT_KEYS.get(key, key): value for key, value in config.items()}
        config["type_vocab_size"] = 0  # DistilBERT has no token types
    user_files.validate(config, ModelSizes, path, "give a complete model")
    if config["hidden_size"] % config["num_attention_heads"]:
        raise InputError(f"{path}: num_attention_heads must divide hidden_size: give a complete model")
    return config


def _has_nonzero_type_row(headers: Mapping[str, stored_weights.StoredWeight]) -> bool:
    """Return whether the embedding of the only token type is not zero. It is zero in FacebookAI's XLM-R."""
    for name, canonical_name in find_canonical_names(headers).items():
        if canonical_name == TYPE_ROW:
            with safe_open(headers[name].path, "pt") as file:
                return bool(file.get_tensor(name).any())
    return False


def _check_size(size: EncoderSize, headers: Mapping[str, stored_weights.StoredWeight], directory: Path) -> None:
    """Raise InputError if the weight files do not contain an encoder of this size."""
    stored_shapes = {}
    for name, canonical_name in find_canonical_names(headers).items():
        stored_shapes[canonical_name] = headers[name].shape
    with torch.device("meta"):
        encoder = Encoder(size)
    expected_shapes = {}
    for name, parameter in encoder.named_parameters(prefix="encoder"):
        expected_shapes[to_hugging_face_name(name)] = tuple(parameter.shape)
    stored_weights.compare_shapes(expected_shapes, stored_shapes, directory)


def find_weight_files(directory: Path) -> list[Path]:
    """Return the safetensors files of a model, one or several. Raise InputError if it has none."""
    path = directory / WEIGHTS
    if path.is_file():
        return [path]
    paths = sorted(directory.glob("model-*.safetensors"))
    if not paths:
        raise InputError(f"{path} is missing: convert the model to safetensors (pickled weights are not read)")
    return paths


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file. Raise InputError if it is missing or damaged."""
    try:
        return load_file(user_files.check_readable(path))
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path} is damaged ({one_line(error)}): copy it again") from None


def read_projection(path: Path) -> Tensor:
    """Return the contrast projection in a file. Raise InputError if it is missing, damaged, or not finite."""
    projection = read_tensors(path).get("projection")
    if projection is None:
        raise InputError(f"{path} has no tensor projection: copy it again")
    if not projection.isfinite().all():
        raise InputError(f"{path} contains NaN or infinity: copy it again, or use another model")
    return projection


def digest_weights(directory: Path) -> str:
    """Return the digest of the weight files of a model, which identifies the model."""
    digests = [manifests.file_sha256(path) for path in find_weight_files(directory)]
    if len(digests) == 1:
        return f"sha256:{digests[0]}"
    return manifests.digest(digests)


def read_weights(directory: Path) -> dict[str, Tensor]:
    """Return the weights of a model, with or without a head, by their canonical names.

    Raises:
        InputError: the weights are missing or damaged.
    """
    weights: dict[str, Tensor] = {}
    for path in find_weight_files(directory):
        weights |= read_tensors(path)
    return {canonical_name: weights[name] for name, canonical_name in find_canonical_names(weights).items()}


def find_canonical_names(stored_names: Iterable[str]) -> dict[str, str]:
    """Return the canonical names of the weights of a model by their stored names."""
    stored_names = list(stored_names)
    # In a model without a head, the names of the encoder's weights have no prefix.
    is_encoder = not any(_ENCODER_PREFIX.match(name) for name in stored_names)
    canonical_names = {}
    for stored_name in stored_names:
        name = _ENCODER_PREFIX.sub("roberta.", stored_name)
        # In Google's BERT, the parameters of LayerNorm have the names of TensorFlow.
        name = re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", name)
        name = re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", name)
        if is_encoder and not name.startswith(_HEAD_PREFIXES):
            name = f"roberta.{name}"
        canonical_names[stored_name] = _undo_replacements(name)
    return canonical_names


def _undo_replacements(name: str) -> str:
    """Return a name in which the parts that are specific to BERT or DistilBERT are replaced by canonical parts."""
    for replacements in _REPLACEMENTS.values():
        for canonical_part, replacement in reversed(replacements.items()):
            name = name.replace(replacement, canonical_part)
    return name


def has_masked_lm_head(directory: Path) -> bool:
    """Return whether the weights of a model include a masked-LM head."""
    canonical_names = find_canonical_names(stored_weights.read_headers(directory)).values()
    return any(name.startswith("lm_head.") for name in canonical_names)


def load_weights(
    module: nn.Module, directory: Path, optional: tuple[str, ...] = ("projection",), name_rules: NameRules = ()
) -> None:
    """Copy the weights of a Hugging Face directory into the parameters of a module.

    Args:
        module: the module, whose parameters have our names.
        directory: directory of the weights.
        optional: prefixes of parameters that keep their values if they are not stored.
        name_rules: rules for the names of a head, see `to_hugging_face_name`.

    Raises:
        InputError: a weight is missing, has another shape, or is not finite.
    """
    stored_weights.check_dtypes(directory)
    weights = read_weights(directory)
    if (directory / PROJECTION).is_file():
        weights["projection"] = read_projection(directory / PROJECTION)
    for name, parameter in module.named_parameters():
        path = directory / WEIGHTS
        stored_name = name
        if name == "projection":
            path = directory / PROJECTION
        else:
            stored_name = to_hugging_face_name(name, name_rules)
        if stored_name in weights:
            _copy_weight(weights[stored_name], parameter, f"{path}: {stored_name}")
        elif not name.startswith(optional):
            raise InputError(f"{path} has no {stored_name}: give a complete model")


def _copy_weight(weight: Tensor, parameter: nn.Parameter, subject: str) -> None:
    """Copy a stored weight into a parameter. Raise InputError if its shape differs or a value is not finite."""
    if weight.shape != parameter.shape:
        raise InputError(f"{subject} is {tuple(weight.shape)}, not {tuple(parameter.shape)}")
    if not weight.isfinite().all():  # `check_finite` would also check optional parameters, which may be uninitialised
        raise InputError(f"{subject} {stored_weights.NOT_FINITE}")
    with torch.no_grad():
        parameter.copy_(weight)

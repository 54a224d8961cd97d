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


_NAME_RULES = [  # our name -> canonical name
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


def hugging_face_name(name: str, first: NameRules = ()) -> str:
    """Return the canonical name of one of our parameters. The rules in `first` take precedence.

    Example: `encoder.layers.0.up.bias` -> `roberta.encoder.layer.0.intermediate.dense.bias`.
    """
    return rename(name, (*first, *_NAME_RULES))


def rename(name: str, rules: NameRules) -> str:
    """Apply the first rule (pattern, replacement) that matches a name. Raise KeyError if no rule matches."""
    for pattern, replacement in rules:
        renamed, match_count = re.subn(pattern, replacement, name)
        if match_count:
            return renamed
    raise KeyError(name)


def hugging_face_config(
    size: EncoderSize, config_class: Callable[..., PretrainedConfig] = XLMRobertaConfig, **fields: Any
) -> PretrainedConfig:
    """Return a config of XLM-R, or of another class whose sizes have the same names, with additional fields."""
    return config_class(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        intermediate_size=size.ffn,
        max_position_embeddings=size.positions,
        type_vocab_size=max(1, size.types),
        layer_norm_eps=size.epsilon,
        hidden_dropout_prob=FINETUNING_DROPOUT,
        attention_probs_dropout_prob=FINETUNING_DROPOUT,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
        **fields,
    )


def write_model(weights: Mapping[str, Tensor], config: PretrainedConfig, directory: Path) -> None:
    """Write a config, and weights under the given names in fp32."""
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
    """Write the config and the parameters of a module, except its projection, and copy its tokenizer.

    Args:
        module: the module.
        config: its config, whose model type and class determine the names of the weights.
        tokenizer: directory of the tokenizer.
        directory: where to write.
        name_rules: rules for the names of the head's parameters.
        untrained: additional weights that the module does not have, by their canonical names.
    """
    weights: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters():
        if name != "projection":
            weights[hugging_face_name(name, name_rules)] = parameter
    if untrained:
        weights = dict(untrained) | weights
    if TYPE_ROW not in weights and config.model_type != "distilbert":
        weights[TYPE_ROW] = torch.zeros(1, config.hidden_size)
    write_model({name_in_class(name, config): value for name, value in weights.items()}, config, directory)
    tokenizers.copy(tokenizer, directory, max_tokens_of(config.to_dict()))


def name_in_class(name: str, config: PretrainedConfig) -> str:
    """Convert a canonical name to the name in the class that a config names in `architectures`."""
    for canonical_part, part in _REPLACEMENTS.get(config.model_type, {}).items():
        name = name.replace(canonical_part, part)
    prefix = config.model_type.removeprefix("xlm-") + "."
    if (config.architectures or ["Model"])[0].endswith("Model"):  # a class without a head
        prefix = ""
    return re.sub(r"^roberta\.", prefix, name)


def export(model: InfoXLM, tokenizer: Path, directory: Path, start: Path | None = None, prefix: str = "") -> None:
    """Write a directory that `AutoModel` and `AutoTokenizer` load.

    The contrast projection (d, d) is in `projection.safetensors`: z = h @ projection. The key `infoxlm` of
    `config.json` records how the vector of a sentence is computed.

    Args:
        model: the trained model.
        tokenizer: directory of its tokenizer.
        directory: where to write.
        start: the model that the training started from. The export has its class, and its weights that were not
            trained, such as the pooler.
        prefix: text that was added before every sentence in training.
    """
    contrast = {"layer": model.contrast_layer, "pooling": model.pooling, "normalise": model.normalise}
    if prefix:
        contrast["prefix"] = prefix
    untrained: dict[str, Tensor] = {}
    if start is None:
        config = hugging_face_config(model.encoder.size)
    else:
        config = CONFIG_MAPPING[read_config(start)["model_type"]].from_dict(read_config(start))
        config.dtype = torch.float32
        for name, weight in read_weights(start).items():
            is_computed = "decoder." in name or name.endswith("_ids")  # tied to other weights, or constant
            if not is_computed:
                untrained[name] = weight
    config.infoxlm = contrast
    config.architectures = [_choose_class(config, has_head=model.head is not None or "lm_head.bias" in untrained)]
    write(model, config, tokenizer, directory, untrained=untrained)
    if model.projection is not None:
        save_file({"projection": model.projection.detach().float().cpu().contiguous()}, directory / PROJECTION)


def _choose_class(config: PretrainedConfig, has_head: bool) -> str:
    """Return the class of an export: that of the start, unless only one of the two has a masked-LM head."""
    prefix = CLASS_PREFIXES[config.model_type]
    start_class: str = (config.architectures or [f"{prefix}Model"])[0]
    start_has_head = start_class.endswith(("ForMaskedLM", "ForPreTraining"))
    if has_head == start_has_head:
        return start_class
    return f"{prefix}ForMaskedLM" if has_head else f"{prefix}Model"


def read_config(directory: Path) -> dict[str, Any]:
    """Return the content of config.json. Raise InputError if it is missing or a size in it is impossible."""
    path = directory / "config.json"
    config = user_files.read_json(path, ModelDescription, "give a Hugging Face model directory")
    stored_weights.check_counts(config, path)
    return {"model_type": None} | config


def runs_packed(config: Mapping[str, Any]) -> bool:
    """Return whether `task_models` can compute a model with packed sequences, given the content of its config.json."""
    return config["model_type"] in TASK_MODEL_TYPES and not find_obstacle(config)


def find_obstacle(config: Mapping[str, Any]) -> str:
    """Return a description of the setting in a config.json that `Encoder` cannot compute, or "" if there is none."""
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


def first_position(config: Mapping[str, Any]) -> int:
    """Return the row of the position table for the first token. RoBERTa and XLM-R start after their padding id."""
    if config["model_type"] in ("bert", "distilbert"):
        return 0
    padding_id = config.get("pad_token_id")
    return (PAD if padding_id is None else padding_id) + 1


def max_tokens_of(config: Mapping[str, Any]) -> int:
    """Return the largest number of tokens that a model can read, given the content of its config.json."""
    positions = config.get("max_position_embeddings") or 0
    if config["model_type"] in CLASS_PREFIXES:
        return positions - first_position(config)
    # Some other types number positions like RoBERTa. For the rest, two unused positions do no harm.
    return positions - 2 if positions > 2 else 512


def size_of(directory: Path) -> EncoderSize:
    """Return the sizes in a config.json, after comparing them with the stored weights if there are any.

    Raises:
        InputError: there is no config.json, it describes a model that `Encoder` cannot compute, or the weights have
            other shapes.
    """
    config = _read_sizes(directory)
    stored = stored_weights.read_headers(directory)
    types = config.get("type_vocab_size", 2)  # the default of Transformers, like 1e-12 for epsilon
    if types == 1 and not _has_nonzero_type_row(stored):
        types = 0  # the row adds nothing, and stays untrained
    size = EncoderSize(
        vocabulary=config["vocab_size"],
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        ffn=config["intermediate_size"],
        heads=config["num_attention_heads"],
        positions=config["max_position_embeddings"],
        epsilon=config.get("layer_norm_eps", 1e-12),
        types=types,
        first_position=first_position(config),
    )
    if stored:  # a run can be planned without the weights
        _check_size(size, stored, directory)
    return size


def _read_sizes(directory: Path) -> dict[str, Any]:
    """Return the content of config.json, in which the keys of `ModelSizes` are valid. See `size_of` for errors."""
    path = directory / "config.json"
    config = read_config(directory)
    obstacle = find_obstacle(config)
    if obstacle:
        raise InputError(
            f"{path}: {obstacle}: start from another model; infoxlm evaluate and infoxlm embed can use this one"
        )
    if config["model_type"] == "distilbert":
        config = {_DISTILBERT_KEYS.get(key, key): value for key, value in config.items()}
        config["type_vocab_size"] = 0
    user_files.validate(config, ModelSizes, path, "give a complete model")
    if config["hidden_size"] % config["num_attention_heads"]:
        raise InputError(f"{path}: num_attention_heads must divide hidden_size: give a complete model")
    return config


def _has_nonzero_type_row(stored: Mapping[str, stored_weights.StoredWeight]) -> bool:
    """Return whether the embedding of the only token type is not zero. It is zero in FacebookAI's XLM-R."""
    for name, canonical_name in canonical_names(stored).items():
        if canonical_name == TYPE_ROW:
            with safe_open(stored[name].path, "pt") as file:
                return bool(file.get_tensor(name).any())
    return False


def _check_size(size: EncoderSize, stored: Mapping[str, stored_weights.StoredWeight], directory: Path) -> None:
    """Raise InputError if the weight files do not contain an encoder of this size."""
    stored_shapes = {canonical: stored[name].shape for name, canonical in canonical_names(stored).items()}
    with torch.device("meta"):
        encoder = Encoder(size)
    expected_shapes = {}
    for name, parameter in encoder.named_parameters(prefix="encoder"):
        expected_shapes[hugging_face_name(name)] = tuple(parameter.shape)
    stored_weights.compare_shapes(expected_shapes, stored_shapes, directory)


def find_weight_files(directory: Path) -> list[Path]:
    """Return the safetensors files of a model, one or several. Raise InputError if there are none."""
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


def digest_of(directory: Path) -> str:
    """Return the digest of the weight files of a model, which identifies the model."""
    digests = [manifests.file_sha256(path) for path in find_weight_files(directory)]
    return f"sha256:{digests[0]}" if len(digests) == 1 else manifests.digest(digests)


def read_weights(directory: Path) -> dict[str, Tensor]:
    """Return the weights of a model, with or without a head, by their canonical names.

    Raises:
        InputError: the weights are missing or damaged.
    """
    weights: dict[str, Tensor] = {}
    for path in find_weight_files(directory):
        weights |= read_tensors(path)
    return {canonical: weights[name] for name, canonical in canonical_names(weights).items()}


def canonical_names(names: Iterable[str]) -> dict[str, str]:
    """Map the names of stored weights to their canonical names."""
    names = list(names)
    has_prefix = any(_ENCODER_PREFIX.match(name) for name in names)
    canonical_by_stored = {}
    for stored_name in names:
        name = _ENCODER_PREFIX.sub("roberta.", stored_name)
        # In Google's BERT, the parameters of LayerNorm have the names of TensorFlow.
        name = re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", name)
        name = re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", name)
        if not has_prefix and not name.startswith(_HEAD_PREFIXES):  # an encoder without a head
            name = f"roberta.{name}"
        for replacements in _REPLACEMENTS.values():
            for canonical_part, part in reversed(replacements.items()):
                name = name.replace(part, canonical_part)
        canonical_by_stored[stored_name] = name
    return canonical_by_stored


def has_masked_lm_head(directory: Path) -> bool:
    """Return whether the weights of a model include a masked-LM head."""
    stored = stored_weights.read_headers(directory)
    return any(name.startswith("lm_head.") for name in canonical_names(stored).values())


def load_into(
    module: nn.Module, directory: Path, optional: tuple[str, ...] = ("projection",), name_rules: NameRules = ()
) -> None:
    """Copy the weights of a Hugging Face directory into one of our models.

    Args:
        module: the model.
        directory: directory of the weights.
        optional: prefixes of parameters that keep their values if they are not stored.
        name_rules: rules that take precedence, see `hugging_face_name`.

    Raises:
        InputError: a weight is missing, has another shape, or is not finite.
    """
    stored_weights.check_dtypes(directory)
    weights = read_weights(directory)
    if (directory / PROJECTION).is_file():
        weights["projection"] = read_projection(directory / PROJECTION)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            is_projection = name == "projection"
            stored_name = name if is_projection else hugging_face_name(name, name_rules)
            path = directory / (PROJECTION if is_projection else WEIGHTS)
            weight = weights.get(stored_name)
            if weight is None:
                if name.startswith(optional):
                    continue
                raise InputError(f"{path} has no {stored_name}: give a complete model")
            if weight.shape != parameter.shape:
                raise InputError(f"{path}: {stored_name} is {tuple(weight.shape)}, not {tuple(parameter.shape)}")
            if not weight.isfinite().all():  # `check_finite` would also check skipped, uninitialised parameters
                raise InputError(f"{path}: {stored_name} {stored_weights.NOT_FINITE}")
            parameter.copy_(weight)

"""Reads and writes XLM-R, RoBERTa, BERT and DistilBERT models in Hugging Face's format.

Readers convert all weight names to the names in XLM-R, `roberta.…` and `lm_head.…`: the *canonical names*. Writers
convert canonical names back to the names of the model type.
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
"""model_type that `Encoder` supports -> prefix of its class names."""
TASK_MODEL_TYPES = ("xlm-roberta", "roberta", "bert")  # types that `task_models` also runs without padding
FINETUNING_DROPOUT = 0.1
"""Dropout in the config.json of exported encoders, as in XLM-R. Only Transformers reads this value; our own fine-tuning
reads dropout from its settings."""

_Rows = Annotated[int, Field(gt=0, lt=2**31)]
_Width = Annotated[int, Field(gt=0, le=2**17)]
_Layers = Annotated[int, Field(ge=0, le=1000)]
_Epsilon = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


class _ContrastSettings(TypedDict):
    """The contrast settings in the config.json of our models."""

    layer: _Layers
    pooling: str
    normalise: NotRequired[bool]
    prefix: NotRequired[str]


@user_files.allow_extra_keys
class ModelDescription(TypedDict):
    """The keys that we read from every config.json. All keys are optional."""

    model_type: NotRequired[str | None]
    architectures: NotRequired[list[str] | None]
    infoxlm: NotRequired[_ContrastSettings | None]
    num_hidden_layers: NotRequired[_Layers]
    layer_norm_eps: NotRequired[_Epsilon | None]
    max_position_embeddings: NotRequired[int | None]
    pad_token_id: NotRequired[int | None]


@user_files.allow_extra_keys
class ModelSizes(TypedDict):
    """The keys of config.json that describe an encoder's sizes."""

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
_ENCODER_PREFIX = re.compile(r"^(roberta|bert|distilbert)\.")  # prefix of the encoder's weights in a class with a head
_HEAD_PREFIXES = ("lm_head.", "cls.", "classifier.", "qa_outputs.", "vocab_")  # prefixes of a head's weights
_DISTILBERT_KEYS = {  # key in DistilBERT's config.json -> key in BERT's
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "hidden_dim": "intermediate_size",
    "activation": "hidden_act",
}

TYPE_ROW = "roberta.embeddings.token_type_embeddings.weight"  # one row in XLM-R, because it has one token type


def to_hugging_face_name(name: str, extra_rules: NameRules = ()) -> str:
    """Convert one of our parameter names to its canonical name. `extra_rules` take precedence over `NAME_RULES`.

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
    """Return the Hugging Face config of an encoder.

    Args:
        size: the encoder's sizes.
        config_class: config class with the same size fields as XLM-R's class.
        fields: additional config fields.
    """
    return config_class(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        intermediate_size=size.ffn,
        max_position_embeddings=size.positions,
        type_vocab_size=max(1, size.types),  # Transformers requires at least one token type
        layer_norm_eps=size.epsilon,
        hidden_dropout_prob=FINETUNING_DROPOUT,
        attention_probs_dropout_prob=FINETUNING_DROPOUT,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
        **fields,
    )


def write_model(weights: Mapping[str, Tensor], config: PretrainedConfig, directory: Path) -> None:
    """Write config.json and, in fp32, model.safetensors."""
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
        module: module to write.
        config: the module's config. Its model type and class determine the weight names.
        tokenizer: directory of the tokenizer.
        directory: output directory.
        name_rules: rules for the head's parameter names.
        untrained: additional weights that the module lacks, by canonical name.
    """
    weights: dict[str, Tensor] = dict(untrained or {})
    for name, parameter in module.named_parameters():
        if name != "projection":
            weights[to_hugging_face_name(name, name_rules)] = parameter
    # Hugging Face's classes require a type embedding, except DistilBERT's. A row of zeros does not change the output.
    if TYPE_ROW not in weights and config.model_type != "distilbert":
        weights[TYPE_ROW] = torch.zeros(1, config.hidden_size)
    weights_in_class = {_to_name_in_class(name, config): weight for name, weight in weights.items()}
    write_model(weights_in_class, config, directory)
    tokenizers.copy(tokenizer, directory, find_max_tokens(config.to_dict()))


def _to_name_in_class(name: str, config: PretrainedConfig) -> str:
    """Convert a canonical name to its name in the class from the config's `architectures`."""
    for canonical_part, replacement in _REPLACEMENTS.get(config.model_type, {}).items():
        name = name.replace(canonical_part, replacement)
    class_name = config.architectures[0] if config.architectures else "Model"
    has_head = not class_name.endswith("Model")  # only classes with a head store the encoder under a prefix
    prefix = config.model_type.removeprefix("xlm-") + "." if has_head else ""
    return re.sub(r"^roberta\.", prefix, name)


def export(model: InfoXLM, tokenizer: Path, directory: Path, start: Path | None = None, prefix: str = "") -> None:
    """Write a trained model to a directory that `AutoModel` and `AutoTokenizer` can load.

    `projection.safetensors` contains the (d, d) contrast projection: z = h @ projection. The key `infoxlm` of
    `config.json` records how sentence vectors are computed.

    Args:
        model: trained model.
        tokenizer: directory of the tokenizer.
        directory: output directory.
        start: directory of the model that the training started from. The export has the class of this model, and
            includes its weights that were not trained, such as the pooler.
        prefix: text that was prepended to every sentence in training.
    """
    if start is None:
        config = make_hugging_face_config(model.encoder.size)
        start_weights: dict[str, Tensor] = {}
    else:
        config = CONFIG_MAPPING[read_config(start)["model_type"]].from_dict(read_config(start))
        config.dtype = torch.float32
        start_weights = _read_untied_weights(start)
    config.infoxlm = {"layer": model.contrast_layer, "pooling": model.pooling, "normalise": model.normalise}
    if prefix:
        config.infoxlm["prefix"] = prefix
    # Without MLM and TLM, the model has no head, and the export keeps the head of the start model.
    has_head = model.head is not None or "lm_head.bias" in start_weights
    config.architectures = [_choose_class(config, has_head)]
    write(model, config, tokenizer, directory, untrained=start_weights)
    if model.projection is not None:
        projection = model.projection.detach().float().cpu().contiguous()
        save_file({"projection": projection}, directory / PROJECTION)


def _read_untied_weights(directory: Path) -> dict[str, Tensor]:
    """Return a model's weights by canonical name, except constants (`_ids`) and copies of tied weights.

    The copies are `decoder.weight` and `decoder.bias` of a masked-LM head, and DistilBERT's `vocab_projector.weight`.
    """
    untied_weights = {}
    for name, weight in read_weights(directory).items():
        is_copy = "decoder." in name or name == "vocab_projector.weight"
        if not is_copy and not name.endswith("_ids"):
            untied_weights[name] = weight
    return untied_weights


def _choose_class(config: PretrainedConfig, has_head: bool) -> str:
    """Return an export's class: that of the start in `config`, or another if a masked-LM head was added or removed."""
    prefix = CLASS_PREFIXES[config.model_type]
    start_class: str = config.architectures[0] if config.architectures else f"{prefix}Model"
    start_has_head = start_class.endswith(("ForMaskedLM", "ForPreTraining"))
    if has_head == start_has_head:
        return start_class
    return f"{prefix}ForMaskedLM" if has_head else f"{prefix}Model"


def read_config(directory: Path) -> dict[str, Any]:
    """Return the content of config.json. Raise InputError if the file is missing, or describes an impossible size."""
    path = directory / "config.json"
    config = user_files.read_json(path, ModelDescription, "give a Hugging Face model directory")
    stored_weights.check_counts(config, path)
    return {"model_type": None} | config  # so that the key always exists


def can_run_packed(config: Mapping[str, Any]) -> bool:
    """Return whether our task models can run a model on packed sequences, given the content of config.json."""
    return config["model_type"] in TASK_MODEL_TYPES and not find_unsupported_setting(config)


def find_unsupported_setting(config: Mapping[str, Any]) -> str:
    """Describe the first setting in a config.json that `Encoder` does not support. Return "" if all are supported."""
    if config["model_type"] not in CLASS_PREFIXES:
        return f"model_type is {config['model_type']!r}, not one of {', '.join(CLASS_PREFIXES)}"
    supported_values = {
        "hidden_act": "gelu",
        "activation": "gelu",  # DistilBERT's name of hidden_act
        "position_embedding_type": "absolute",
        "is_decoder": False,
        "tie_word_embeddings": True,
    }
    for key, supported_value in supported_values.items():
        if config.get(key, supported_value) != supported_value:
            return f"{key} is {config[key]!r}, not {supported_value!r}"
    return ""


def find_first_position(config: Mapping[str, Any]) -> int:
    """Return the first token's row in the position embeddings, given the content of config.json."""
    if config["model_type"] in ("bert", "distilbert"):
        return 0
    padding_id = config.get("pad_token_id")
    return (PAD if padding_id is None else padding_id) + 1  # RoBERTa and XLM-R reserve the padding id's row for padding


def find_max_tokens(config: Mapping[str, Any]) -> int:
    """Return the maximum sequence length, special tokens included, given the content of config.json."""
    position_count = config.get("max_position_embeddings") or 0
    if config["model_type"] in CLASS_PREFIXES:
        return position_count - find_first_position(config)
    # Some other model types also count positions from 2. For the rest, two unused positions do no harm. Models without
    # a fixed maximum get XLM-R's.
    return position_count - 2 if position_count > 2 else 512


def read_encoder_size(directory: Path) -> EncoderSize:
    """Read an encoder's sizes from its config.json, and compare them with the shapes of the stored weights.

    Raises:
        InputError: config.json is missing or describes a model that `Encoder` does not support, or the stored weights
            have different shapes.
    """
    config = _read_supported_config(directory)
    headers = stored_weights.read_headers(directory)
    type_count = config.get("type_vocab_size", 2)  # 2 and 1e-12 are the defaults of Transformers
    if type_count == 1 and not _has_nonzero_type_row(headers):
        type_count = 0  # a row of zeros adds nothing, so do not train it
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
    if headers:  # plans, and checks of config.json before the download, have no weights
        check_size(size, headers, directory)
    return size


def _read_supported_config(directory: Path) -> dict[str, Any]:
    """Return the content of config.json, with keys named as in XLM-R.

    Raises:
        InputError: `Encoder` does not support the model, or a size is invalid.
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
    """Return whether the embedding of the only token type has nonzero values, unlike in FacebookAI's XLM-R."""
    for name, canonical_name in find_canonical_names(headers).items():
        if canonical_name == TYPE_ROW:
            with safe_open(headers[name].path, "pt") as file:
                return bool(file.get_tensor(name).any())
    return False


def check_size(
    size: EncoderSize, weights: Mapping[str, stored_weights.StoredWeight] | Mapping[str, Tensor], source: Path
) -> None:
    """Raise InputError if weights do not contain an encoder of this size.

    Args:
        size: the encoder's sizes.
        weights: the headers of the weights, or the weights, by their names in a file of Hugging Face.
        source: file or directory of the weights, for the error message.
    """
    canonical_names = find_canonical_names(weights)
    stored_shapes = {canonical_names[name]: tuple(weight.shape) for name, weight in weights.items()}
    with torch.device("meta"):
        parameters = Encoder(size).named_parameters(prefix="encoder")
    expected_shapes = {to_hugging_face_name(name): tuple(parameter.shape) for name, parameter in parameters}
    stored_weights.compare_shapes(expected_shapes, stored_shapes, source)


def find_weight_files(directory: Path) -> list[Path]:
    """Return the paths of a model's safetensors files. Raise InputError if there are none."""
    path = directory / WEIGHTS
    if path.is_file():
        return [path]
    paths = sorted(directory.glob("model-*.safetensors"))
    if not paths:
        raise InputError(f"{path} is missing: convert the model to safetensors (pickled weights are not read)")
    return paths


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors in a safetensors file. Raise InputError if the file is missing or damaged."""
    try:
        return load_file(user_files.check_readable(path))
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path} is damaged ({one_line(error)}): copy it again") from None


def read_projection(path: Path) -> Tensor:
    """Return the contrast projection in a file. Raise InputError if the file is missing, damaged, or not finite."""
    projection = read_tensors(path).get("projection")
    if projection is None:
        raise InputError(f"{path} has no tensor projection: copy it again")
    if not projection.isfinite().all():
        raise InputError(f"{path} contains NaN or infinity: copy it again, or use another model")
    return projection


def digest_weights(directory: Path) -> str:
    """Return a digest of a model's weight files, to identify the model."""
    digests = [manifests.file_sha256(path) for path in find_weight_files(directory)]
    if len(digests) == 1:
        return f"sha256:{digests[0]}"
    return manifests.digest(digests)


def read_weights(directory: Path) -> dict[str, Tensor]:
    """Return a model's weights, including any head, by canonical name: the name in XLM-R.

    Raises:
        InputError: the weights are missing or damaged.
    """
    weights: dict[str, Tensor] = {}
    for path in find_weight_files(directory):
        weights |= read_tensors(path)
    return {canonical_name: weights[name] for name, canonical_name in find_canonical_names(weights).items()}


def find_canonical_names(stored_names: Iterable[str]) -> dict[str, str]:
    """Return a mapping from the stored names of a model's weights to their canonical names."""
    stored_names = list(stored_names)
    # In a model without a head, the encoder's weight names have no prefix. A head's names never have it.
    has_prefix = any(_ENCODER_PREFIX.match(name) for name in stored_names)
    canonical_names = {}
    for stored_name in stored_names:
        name = _ENCODER_PREFIX.sub("roberta.", stored_name)
        # Google's BERT uses TensorFlow's names for the parameters of LayerNorm.
        name = re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", name)
        name = re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", name)
        if not has_prefix and not name.startswith(_HEAD_PREFIXES):
            name = f"roberta.{name}"
        canonical_names[stored_name] = _restore_canonical_parts(name)
    return canonical_names


def _restore_canonical_parts(name: str) -> str:
    """Replace the parts of a name that are specific to BERT or DistilBERT with their canonical forms."""
    for replacements in _REPLACEMENTS.values():
        # The reverse order of `_to_name_in_class`, which this function inverts.
        for canonical_part, replacement in reversed(replacements.items()):
            name = name.replace(replacement, canonical_part)
    return name


def has_masked_lm_head(directory: Path) -> bool:
    """Return whether a model's weight files include a masked-LM head."""
    canonical_names = find_canonical_names(stored_weights.read_headers(directory)).values()
    return any(name.startswith("lm_head.") for name in canonical_names)


def load_weights(
    module: nn.Module, directory: Path, optional: tuple[str, ...] = ("projection",), name_rules: NameRules = ()
) -> None:
    """Load weights from a Hugging Face directory into a module.

    Args:
        module: module with our parameter names.
        directory: Hugging Face directory with the weights.
        optional: name prefixes of the parameters that keep their values if they are not stored.
        name_rules: rules for the head's parameter names.

    Raises:
        InputError: a weight is missing, has the wrong shape, or is not finite.
    """
    stored_weights.check_dtypes(directory)
    weights = read_weights(directory)
    if (directory / PROJECTION).is_file():
        weights["projection"] = read_projection(directory / PROJECTION)
    for name, parameter in module.named_parameters():
        is_projection = name == "projection"
        path = directory / (PROJECTION if is_projection else WEIGHTS)
        stored_name = name if is_projection else to_hugging_face_name(name, name_rules)
        if stored_name in weights:
            _copy_weight(weights[stored_name], parameter, f"{path}: {stored_name}")
        elif not name.startswith(optional):
            raise InputError(f"{path} has no {stored_name}: give a complete model")


def _copy_weight(weight: Tensor, parameter: nn.Parameter, subject: str) -> None:
    """Copy a stored weight into a parameter. Raise InputError if the shapes differ or a value is not finite."""
    if weight.shape != parameter.shape:
        raise InputError(f"{subject} is {tuple(weight.shape)}, not {tuple(parameter.shape)}")
    if not weight.isfinite().all():  # not `check_finite`, because optional parameters may be uninitialized
        raise InputError(f"{subject} {stored_weights.NOT_FINITE}")
    with torch.no_grad():
        parameter.copy_(weight)

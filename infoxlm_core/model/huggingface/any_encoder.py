"""Loads Hugging Face encoders of any type, and finds out which vectors of an encoder represent sentences."""

import json
import logging
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import transformers
from torch import Tensor
from transformers import PretrainedConfig
from typing_extensions import TypedDict

from infoxlm_core import user_files
from infoxlm_core.errors import InputError, one_line
from infoxlm_core.model import devices, padded
from infoxlm_core.model.huggingface import directories, pretrained, stored_weights, tokenizers
from infoxlm_core.model.huggingface.directories import MODULES
from infoxlm_core.model.huggingface.pretrained import PROJECTION

if TYPE_CHECKING:  # their import takes three seconds, so only processes that load a model pay for it
    from transformers import PreTrainedModel as Model
    from transformers import PreTrainedTokenizerBase as Tokenizer

logger = logging.getLogger(__name__)
PROMPTS = "config_sentence_transformers.json"
LENGTH = "sentence_bert_config.json"
_POOLING_MODES = {"pooling_mode_cls_token": "cls", "pooling_mode_mean_tokens": "mean", "cls": "cls", "mean": "mean"}


@user_files.allow_extra_keys
class _Module(TypedDict):
    """An entry of modules.json."""

    type: str
    path: str


def has_language_model_head(directory: Path) -> bool:
    """Return whether a Hugging Face directory contains a masked language model, not only an encoder."""
    config = pretrained.read_config(directory)
    architectures = config.get("architectures") or []
    if "XLMWithLMHeadModel" in architectures:  # XLM has one class for both of its objectives
        return not config.get("causal")
    if "BertForPreTraining" in architectures:  # our mBERT, which has a masked-LM head and one for NSP
        return True
    return any("ForMaskedLM" in architecture for architecture in architectures)


def load_encoder(directory: Path | str, device: str | None = None) -> "tuple[Model, Tokenizer]":
    """Load an encoder and its tokenizer in fp32 and evaluation mode, with the masked-LM head if there is one.

    Args:
        directory: Hugging Face directory of the model.
        device: where to load it; None: on a GPU if possible.

    Raises:
        InputError: the model is incomplete or damaged, or is not an encoder.
    """
    directory = Path(directory)
    if not (directory / "config.json").is_file():
        raise InputError(f"{directory} has no config.json: give a Hugging Face model directory")
    if directories.is_translator(directory):
        raise InputError(f"{directory} has a translator: give an encoder, or use `infoxlm translate`")
    pretrained.read_config(directory)  # first, because it refuses impossible values on which other readers would fail
    tokenizer = tokenizers.load(directory)
    if tokenizer.pad_token_id is None:
        raise InputError(f"{directory}: its tokenizer has no padding token: set pad_token in tokenizer_config.json")
    tokenizer.padding_side = "right"  # position 0 is then always the first token
    auto_class = transformers.AutoModelForMaskedLM if has_language_model_head(directory) else transformers.AutoModel
    model = stored_weights.load_model(auto_class, directory, padded.read_config(directory))
    if model.config.is_encoder_decoder:
        raise InputError(f"{directory} is an encoder-decoder ({model.config.model_type}): give an encoder-only model")
    _check_forward_pass(model, directory)
    return model.to(device or devices.choose()), tokenizer


def _check_forward_pass(model: Any, directory: Path) -> None:
    """Switch a model to evaluation mode, and raise InputError if it fails for one token."""
    one_token = torch.zeros(1, 1, dtype=torch.long)
    try:
        with torch.no_grad():
            model.eval()(one_token)
    except Exception as error:  # a config can describe a model that raises almost any exception
        raise InputError(f"{directory} cannot be used as a model ({one_line(error)}): export it again") from None


class Space(NamedTuple):
    """The layer and the pooling that produce the vector of a sentence."""

    layer: int  # counts as in `hidden_states`: 0 is the output of the embeddings
    pooling: str


def contrast_space(config: PretrainedConfig) -> Space | None:
    """Return the layer and pooling of a model's contrastive training, or None if its config does not record them."""
    contrast = getattr(config, "infoxlm", None)
    return Space(contrast["layer"], contrast["pooling"]) if contrast else None


def served_space(model: "Model | Path | str") -> Space:
    """Return the layer and pooling of the vectors that users get from a model.

    For our models, they are those of the contrastive training. For models of sentence-transformers, they are the last
    layer and the model's own pooling. For other models, they are the last layer and the mean of all tokens.

    Args:
        model: a loaded model, or its directory.

    Raises:
        InputError: the model of sentence-transformers has a pooling other than `cls` and `mean`.
    """
    if isinstance(model, Path | str):
        directory = Path(model)
        config = padded.read_config(directory)
    else:
        directory = Path(str(model.name_or_path))
        config = model.config
    space = contrast_space(config)
    if space is not None:
        return space
    pooling = "mean"
    if (directory / MODULES).is_file():
        pooling = _read_pooling(directory)
    return Space(config.num_hidden_layers, pooling)


def _read_pooling(directory: Path) -> str:
    """Return the pooling of a sentence-transformers model: `cls` or `mean`."""
    pooling = "mean"
    for module in user_files.read_json(directory / MODULES, list[_Module], "copy the model again"):
        class_name = module["type"].rpartition(".")[2]
        if class_name == "Dense":
            _warn_of_dense(directory)
        if class_name == "Pooling":
            path = directory / Path(module["path"]).name / "config.json"
            settings = user_files.read_json(path, dict[str, Any], "copy the model again")
            mode = settings.get("pooling_mode")  # since version 6; older versions have a key for each mode
            if mode is None:
                mode = [key for key, is_active in settings.items() if key in _POOLING_MODES and is_active]
            if isinstance(mode, list) and len(mode) == 1:
                mode = mode[0]
            if str(mode) not in _POOLING_MODES:
                raise InputError(f"{path}: its pooling is {mode!r:.100}, not cls or mean: give a layer and a pooling")
            pooling = _POOLING_MODES[str(mode)]
    return pooling


@cache
def _warn_of_dense(directory: Path) -> None:
    """Log once per model that its module Dense is not used."""
    logger.warning("%s: vectors are taken before its module Dense, which is not used", directory)


def keep_served_space(start: Path, export: Path) -> None:
    """Copy the layer and pooling of a start model, if it records them, to config.json of its untrained export.

    Otherwise the start would be measured with the layer and pooling of the training, which may be worse for it.

    Args:
        start: directory of the model that a training run starts from.
        export: directory of the export of this model before the first step.
    """
    if not pretrained.read_config(start).get("infoxlm") and not (start / MODULES).is_file():
        return
    try:
        space = served_space(start)
    except InputError as error:
        logger.warning("the start is measured with the layer and pooling of its training: %s", error)
        return
    path = export / "config.json"
    config = user_files.read_json(path, dict[str, Any], "export the model again")
    config["infoxlm"] |= space._asdict()
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    if not (start / PROJECTION).is_file():  # the projection is random
        (export / PROJECTION).unlink(missing_ok=True)


def served_prefix(model: "Model") -> str:
    """Return the text that a model needs before each sentence of a user.

    This is the prefix of our training, or the default prompt of a sentence-transformers model.
    """
    settings = getattr(model.config, "infoxlm", None)
    if settings:
        return settings.get("prefix", "")
    prompts, default_prompt = read_prompts(Path(str(model.name_or_path)))
    return prompts[default_prompt] if default_prompt else ""


def read_prompts(directory: Path) -> tuple[dict[str, str], str | None]:
    """Return the prompts of a sentence-transformers model by name, and the name of its default prompt, if any.

    Raises:
        InputError: the default prompt does not exist.
    """
    path = directory / PROMPTS
    if not (directory / MODULES).is_file() or not path.is_file():
        return {}, None
    settings = user_files.read_json(path, dict[str, Any], "copy the model again")
    stored_prompts = settings.get("prompts") or {}
    prompts = {name: text for name, text in stored_prompts.items() if isinstance(text, str)}
    default_prompt = settings.get("default_prompt_name")
    if default_prompt is not None and default_prompt not in prompts:
        raise InputError(f"{path}: no prompt {default_prompt!r:.100}: copy the model again")
    return prompts, default_prompt


def served_max_tokens(directory: Path) -> int:
    """Return the number of tokens, including special tokens, to which sentences of users are truncated.

    This is `max_seq_length` of a sentence-transformers model, limited to what the encoder can read.
    """
    max_tokens = pretrained.find_max_tokens(pretrained.read_config(directory))
    path = directory / LENGTH
    if path.is_file():
        limit = user_files.read_json(path, dict[str, Any], "copy the model again").get("max_seq_length")
        if limit is None:
            return max_tokens
        min_limit = 3  # one token between two special tokens
        if type(limit) is not int or limit < min_limit:
            raise InputError(f"{path}: max_seq_length is {limit!r}; set a whole number from {min_limit} on")
        max_tokens = min(max_tokens, limit)
    return max_tokens


def describe(model: "Model") -> dict[str, Any]:
    """Return the type, sizes, contrast settings and prefix of an encoder, for reports."""
    description = {
        "type": model.config.model_type,
        "layers": model.config.num_hidden_layers,
        "hidden": model.config.hidden_size,
        "vocabulary": model.config.vocab_size,
        "parameters": model.num_parameters(),
        "contrast": contrast_space(model.config),
    }
    prefix = served_prefix(model)
    if prefix:
        description["prefix"] = prefix
    return description


def load_projection(directory: Path | str, model: "Model") -> Tensor:
    """Return the contrast projection (d, d) that is stored with a model: z = h @ projection.

    Raises:
        InputError: the model was trained without contrast, or the file is missing or damaged.
    """
    path = Path(directory) / PROJECTION
    if not contrast_space(model.config) or not path.is_file():
        raise InputError(
            f"{directory} has no contrast vectors (infoxlm in config.json, {PROJECTION}): give mean or cls"
        )
    projection = pretrained.read_projection(path)
    expected_shape = (model.config.hidden_size, model.config.hidden_size)
    if projection.shape != expected_shape:
        raise InputError(f"{path}: projection is {tuple(projection.shape)}, not {expected_shape}: copy it again")
    return projection.to(model.device)


def layers_of(encoder: torch.nn.Module) -> torch.nn.ModuleList | None:
    """Return the layers of an encoder without a head, or None if they are not named as in BERT or DistilBERT."""
    for name in ("encoder", "transformer"):
        layers = getattr(getattr(encoder, name, None), "layer", None)
        if isinstance(layers, torch.nn.ModuleList):
            return layers
    return None


def drop_layers(model: "Model", top_layer: int) -> None:
    """Remove the layers above `top_layer` to save time. Do nothing if `layers_of` does not find the layers."""
    layers = layers_of(model.base_model)
    if layers is not None:
        num_layers = max(top_layer, 1)  # without any layer, Transformers returns no hidden states, not even layer 0
        del layers[num_layers:]

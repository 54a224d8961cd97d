"""Loads any Hugging Face encoder, and reads how the encoder computes sentence vectors."""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
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

if TYPE_CHECKING:  # this import takes three seconds, so leave it to processes that load a model
    from transformers import PreTrainedModel as Model
    from transformers import PreTrainedTokenizerBase as Tokenizer

logger = logging.getLogger(__name__)
PROMPTS_FILE = "config_sentence_transformers.json"
LENGTH_FILE = "sentence_bert_config.json"
_COPY_AGAIN = "copy the model again"  # remedy for a damaged file
_POOLING_MODES = {"pooling_mode_cls_token": "cls", "pooling_mode_mean_tokens": "mean", "cls": "cls", "mean": "mean"}


@user_files.allow_extra_keys
class _Module(TypedDict):
    """An entry of modules.json."""

    type: str
    path: str


def has_language_model_head(directory: Path) -> bool:
    """Return whether a Hugging Face directory contains a masked language model, not just an encoder."""
    config = pretrained.read_config(directory)
    architectures = config.get("architectures") or []
    if "XLMWithLMHeadModel" in architectures:  # XLM's class for both causal and masked LM
        return not config.get("causal")
    if "BertForPreTraining" in architectures:  # our mBERT, with heads for masked LM and NSP
        return True
    return any("ForMaskedLM" in architecture for architecture in architectures)


def load_encoder(directory: Path | str, device: str | None = None) -> "tuple[Model, Tokenizer]":
    """Load an encoder in fp32 and evaluation mode, with its masked-LM head (if any) and its tokenizer.

    Args:
        directory: Hugging Face directory of the model.
        device: device of the encoder; None: a GPU if possible.

    Raises:
        InputError: the model is incomplete, damaged, or not an encoder.
    """
    directory = Path(directory)
    if not (directory / "config.json").is_file():
        raise InputError(f"{directory} has no config.json: give a Hugging Face model directory")
    if directories.is_translator(directory):
        raise InputError(f"{directory} has a translator: give an encoder, or use `infoxlm translate`")
    pretrained.read_config(directory)  # raises InputError for impossible sizes
    tokenizer = tokenizers.load(directory)
    if tokenizer.pad_token_id is None:
        raise InputError(f"{directory}: its tokenizer has no padding token: set pad_token in tokenizer_config.json")
    tokenizer.padding_side = "right"  # so that position 0 is always the first token
    auto_class: Any = transformers.AutoModel
    if has_language_model_head(directory):
        auto_class = transformers.AutoModelForMaskedLM
    model = stored_weights.load_model(auto_class, directory, padded.load_config(directory))
    if model.config.is_encoder_decoder:
        raise InputError(f"{directory} is an encoder-decoder ({model.config.model_type}): give an encoder-only model")
    _check_forward_pass(model, directory)
    return model.to(device or devices.choose()), tokenizer


def _check_forward_pass(model: Any, directory: Path) -> None:
    """Switch a model to evaluation mode, and raise InputError if a forward pass of one token fails.

    Some errors in a config appear only in a forward pass, not when the model is loaded.
    """
    one_token = torch.zeros(1, 1, dtype=torch.long)
    try:
        with torch.no_grad():
            model.eval()(one_token)
    except Exception as error:  # a model with an unsuitable config can raise almost any exception
        raise InputError(f"{directory} cannot be used as a model ({one_line(error)}): export it again") from None


class EmbeddingSettings(NamedTuple):
    """The layer and the pooling that give a sentence vector."""

    layer: int  # layer number as in `hidden_states`: 0 is the output of the embeddings
    pooling: str


def read_contrast_settings(config: PretrainedConfig) -> EmbeddingSettings | None:
    """Return the layer and pooling of a model's contrastive training, or None if the config does not record any."""
    contrast = getattr(config, "infoxlm", None)
    if not contrast:
        return None
    return EmbeddingSettings(contrast["layer"], contrast["pooling"])


def find_embedding_settings(model: "Model") -> EmbeddingSettings:
    """Return the default layer and pooling of a loaded model. See `read_embedding_settings`."""
    # Transformers stores in `name_or_path` from which directory it loaded the model.
    return _choose_embedding_settings(model.config, Path(str(model.name_or_path)))


def read_embedding_settings(directory: Path) -> EmbeddingSettings:
    """Return a model's default layer and pooling for sentence vectors.

    Our models use the layer and pooling of contrastive training. sentence-transformers models use the last layer and
    their own pooling. All other models use the last layer and the mean of all tokens.

    Raises:
        InputError: the pooling of a sentence-transformers model is neither `cls` nor `mean`.
    """
    return _choose_embedding_settings(padded.load_config(directory), directory)


def _choose_embedding_settings(config: PretrainedConfig, directory: Path) -> EmbeddingSettings:
    """Return a model's default layer and pooling, given its config and directory."""
    contrast_settings = read_contrast_settings(config)
    if contrast_settings is not None:
        return contrast_settings
    pooling = _read_pooling(directory) if (directory / MODULES).is_file() else "mean"
    return EmbeddingSettings(config.num_hidden_layers, pooling)


def _read_pooling(directory: Path) -> str:
    """Return a sentence-transformers model's pooling: `cls` or `mean`."""
    pooling = "mean"  # without a Pooling module, as for all other models
    for module in user_files.read_json(directory / MODULES, list[_Module], _COPY_AGAIN):
        class_name = module["type"].rpartition(".")[2]
        if class_name == "Dense":
            _warn_about_dense_module(directory)
        elif class_name == "Pooling":
            # Use only the last part of the path, so that no file outside the model is read.
            pooling = _read_pooling_mode(directory / Path(module["path"]).name / "config.json")
    return pooling


def _read_pooling_mode(path: Path) -> str:
    """Read the pooling from the config of a `Pooling` module. Raise InputError unless it is `cls` or `mean`."""
    settings = user_files.read_json(path, dict[str, Any], _COPY_AGAIN)
    mode = settings.get("pooling_mode")  # a name or a list of names
    if mode is None:  # before version 6 of sentence-transformers, each mode had a key
        mode = [key for key, is_active in settings.items() if key in _POOLING_MODES and is_active]
    if isinstance(mode, list) and len(mode) == 1:
        (mode,) = mode
    if str(mode) not in _POOLING_MODES:  # another mode, or a combination of several
        raise InputError(f"{path}: its pooling is {mode!r:.100}, not cls or mean: give a layer and a pooling")
    return _POOLING_MODES[str(mode)]


@cache
def _warn_about_dense_module(directory: Path) -> None:
    """Warn, once per model, that the Dense module of a sentence-transformers model is not used."""
    logger.warning("%s: vectors are taken before its module Dense, which is not used", directory)


def copy_embedding_settings(start: Path, export: Path) -> None:
    """Copy the layer and pooling of a start model, if recorded, to the config.json of the start model's export.

    The export is the baseline of evaluations. With the layer and pooling of the training run, it might score worse.

    Args:
        start: directory of the model that a training run starts from.
        export: directory with the same weights in the format of the run, written before the first step.
    """
    if not pretrained.read_config(start).get("infoxlm") and not (start / MODULES).is_file():
        return
    try:
        settings = read_embedding_settings(start)
    except InputError as error:  # a pooling that we do not support; training is possible nevertheless
        logger.warning("the start model is evaluated with the layer and pooling of the training run: %s", error)
        return
    path = export / "config.json"
    config = user_files.read_json(path, dict[str, Any], "export the model again")
    config["infoxlm"] |= {"layer": settings.layer, "pooling": settings.pooling}
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    if not (start / PROJECTION).is_file():  # the export's projection has random initial weights
        (export / PROJECTION).unlink(missing_ok=True)


def find_default_prefix(model: "Model") -> str:
    """Return the text that a model expects before each sentence.

    Our models expect the prefix from their training. sentence-transformers models expect their default prompt.
    """
    settings = getattr(model.config, "infoxlm", None)
    if settings:
        return settings.get("prefix", "")
    return read_prompts(Path(str(model.name_or_path))).default_text


@dataclass(frozen=True)
class Prompts:
    """A sentence-transformers model's prompts: texts to prepend to a sentence."""

    text_by_name: Mapping[str, str]
    default_name: str | None  # prompt to use if the user names none

    @property
    def default_text(self) -> str:
        """The text to prepend to a sentence if the user names no prompt."""
        return self.text_by_name[self.default_name] if self.default_name else ""


def read_prompts(directory: Path) -> Prompts:
    """Return a model's prompts. Only sentence-transformers models have prompts.

    Raises:
        InputError: the default prompt does not exist.
    """
    path = directory / PROMPTS_FILE
    if not (directory / MODULES).is_file() or not path.is_file():
        return Prompts({}, None)
    settings = user_files.read_json(path, dict[str, Any], _COPY_AGAIN)
    stored_prompts = settings.get("prompts") or {}
    text_by_name = {name: text for name, text in stored_prompts.items() if isinstance(text, str)}
    default_name = settings.get("default_prompt_name")
    if default_name is not None and default_name not in text_by_name:
        raise InputError(f"{path}: default_prompt_name {default_name!r:.100} is not among its prompts: {_COPY_AGAIN}")
    return Prompts(text_by_name, default_name)


def read_max_seq_length(directory: Path) -> int:
    """Return the number of tokens, special tokens included, to which sentences are truncated.

    The number is `max_seq_length` of a sentence-transformers model or else `model_max_length` of the tokenizer, limited
    to the encoder's maximum. Version 6 of sentence-transformers stores only `model_max_length`.
    """
    max_tokens = pretrained.find_max_tokens(pretrained.read_config(directory))
    for file_name, key in ((LENGTH_FILE, "max_seq_length"), (tokenizers.SETTINGS, "model_max_length")):
        path = directory / file_name
        length = user_files.read_json(path, dict[str, Any], _COPY_AGAIN).get(key) if path.is_file() else None
        if length is None:
            continue
        shortest_length = 3  # one token between two special tokens
        is_integer = isinstance(length, int) and not isinstance(length, bool)
        if not is_integer or length < shortest_length:
            raise InputError(f"{path}: {key} is {length!r}; set a whole number from {shortest_length} on")
        return min(max_tokens, length)
    return max_tokens


def describe(model: "Model") -> dict[str, Any]:
    """Describe an encoder for reports: its type, sizes, contrast settings and prefix."""
    description = {
        "type": model.config.model_type,
        "layers": model.config.num_hidden_layers,
        "hidden": model.config.hidden_size,
        "vocabulary": model.config.vocab_size,
        "parameters": model.num_parameters(),
        "contrast": read_contrast_settings(model.config),
    }
    prefix = find_default_prefix(model)
    if prefix:
        description["prefix"] = prefix
    return description


def load_projection(directory: Path | str, model: "Model") -> Tensor:
    """Load the (d, d) contrast projection that is stored with a model: z = h @ projection.

    Raises:
        InputError: the model was trained without contrast, or the projection is missing or damaged.
    """
    path = Path(directory) / PROJECTION
    if read_contrast_settings(model.config) is None or not path.is_file():
        raise InputError(
            f"{directory} has no contrast vectors (no infoxlm in config.json, or no {PROJECTION}): give mean or cls "
            "as pooling"
        )
    projection = pretrained.read_projection(path)
    expected_shape = (model.config.hidden_size, model.config.hidden_size)
    if projection.shape != expected_shape:
        raise InputError(f"{path}: projection is {tuple(projection.shape)}, not {expected_shape}: copy it again")
    return projection.to(model.device)


def find_layers(encoder: torch.nn.Module) -> torch.nn.ModuleList | None:
    """Return the layers of an encoder without head, or None unless it names them as BERT or DistilBERT does."""
    for name in ("encoder", "transformer"):
        layers = getattr(getattr(encoder, name, None), "layer", None)
        if isinstance(layers, torch.nn.ModuleList):
            return layers
    return None


def drop_layers(model: "Model", top_layer: int) -> None:
    """Remove the layers above `top_layer` to save time, unless `find_layers` finds no layers."""
    layers = find_layers(model.base_model)
    if layers is not None:
        layer_count = max(top_layer, 1)  # without any layer, Transformers would not return hidden states
        del layers[layer_count:]

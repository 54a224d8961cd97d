"""Loads any Hugging Face encoder from its directory, with the contrast settings that its config records."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor

from infoxlm_core.errors import InputError, one_line
from infoxlm_core.model import devices, padded
from infoxlm_core.model.huggingface import pretrained, stored_weights, tokenizers
from infoxlm_core.model.huggingface.pretrained import PROJECTION

if TYPE_CHECKING:  # importing its models takes three seconds, so only processes that load a model do it
    from transformers import PreTrainedModel as Model
    from transformers import PreTrainedTokenizerBase as Tokenizer


def has_language_model_head(directory: Path) -> bool:
    """Return whether a Hugging Face directory holds a masked language model instead of only an encoder."""
    config = pretrained.read_config(directory)
    architectures = json.dumps(config.get("architectures"))
    is_masked_xlm = "XLMWithLMHeadModel" in architectures and not config.get("causal")
    return "ForMaskedLM" in architectures or is_masked_xlm


def load_encoder(directory: Path | str, device: str | None = None) -> "tuple[Model, Tokenizer]":
    """Load an encoder in fp32 and evaluation mode, with its language-model head if it has one.

    Args:
        directory: holds the model.
        device: where to load it; None takes a GPU if there is one.

    Raises:
        InputError: the directory or a weight is missing, unreadable or differs in shape from config.json, or the model
            is an encoder-decoder.
    """
    directory = Path(directory)
    if not (directory / "config.json").is_file():
        raise InputError(f"{directory} has no config.json: give a Hugging Face model directory")
    auto_class: Any = (
        transformers.AutoModelForMaskedLM if has_language_model_head(directory) else transformers.AutoModel
    )
    tokenizer = tokenizers.load(directory)
    stored_weights.check_dtypes(directory)
    try:
        with _silence_transformers():
            model, report = stored_weights.load_checked(auto_class, directory, padded.read_config(directory))
    except InputError:
        raise
    except Exception as error:  # a damaged file can raise almost any exception of four libraries
        raise InputError(f"{directory} cannot be loaded as a model ({one_line(error)}): export it again") from error
    # Transformers fills missing weights with random numbers. Only the pooler may be missing, since it is never used.
    missing = sorted(name for name in report["missing_keys"] if "pooler" not in name)
    if missing:
        raise InputError(
            f"{directory} lacks {len(missing)} weights ({missing[0]}, …): give a complete {auto_class.__name__}"
        )
    pretrained.check_numbers(model, directory)
    if model.config.is_encoder_decoder:
        raise InputError(f"{directory} is an encoder-decoder ({model.config.model_type}): give an encoder-only model")
    if tokenizer.pad_token_id is None:
        raise InputError(f"{directory}: its tokenizer has no padding token: set pad_token in tokenizer_config.json")
    try:
        with torch.no_grad():
            model.eval()(torch.zeros(1, 1, dtype=torch.long))
    except Exception as error:  # a config may describe a model that cannot compute, such as a dropout of NaN
        raise InputError(f"{directory} cannot be used as a model ({one_line(error)}): export it again") from None
    tokenizer.padding_side = "right"  # so that position 0 is always the first token
    return model.to(device or devices.choose()), tokenizer


@contextmanager
def _silence_transformers() -> Iterator[None]:
    """Suppress progress bars and the table of missing weights; our own errors name the weights that matter."""
    level, had_bars = transformers.logging.get_verbosity(), transformers.logging.is_progress_bar_enabled()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(level)
        if had_bars:
            transformers.logging.enable_progress_bar()


def contrast_space(model: "Model") -> tuple[int, str] | None:
    """Return the layer and pooling at which the model was trained by contrast; None if its config does not say."""
    space = getattr(model.config, "infoxlm", None)
    return (space["layer"], space["pooling"]) if space else None


def served_space(model: "Model") -> tuple[int, str]:
    """Return the layer and pooling of the vectors that users get.

    They are those of the contrast. For a model without contrast they are the last layer and the mean of all tokens.
    """
    return contrast_space(model) or (model.config.num_hidden_layers, "mean")


def describe(model: "Model") -> dict[str, Any]:
    """Return the type, sizes and contrast settings of an encoder."""
    return {
        "type": model.config.model_type,
        "layers": model.config.num_hidden_layers,
        "hidden": model.config.hidden_size,
        "vocabulary": model.config.vocab_size,
        "parameters": model.num_parameters(),
        "contrast": contrast_space(model),
    }


def load_projection(directory: Path | str, model: "Model") -> Tensor:
    """Return the contrast projection (d, d) that is stored beside a model: z = h @ projection.

    Raises:
        InputError: the model was trained without contrast, or the file is missing or damaged.
    """
    path = Path(directory) / PROJECTION
    if not contrast_space(model) or not path.is_file():
        raise InputError(
            f"{directory} has no contrast vectors (infoxlm in config.json, {PROJECTION}): give mean or cls"
        )
    projection, width = pretrained.read_projection(path), model.config.hidden_size
    if projection.shape != (width, width):
        raise InputError(f"{path}: projection is {tuple(projection.shape)}, not {(width, width)}: copy it again")
    return projection.to(model.device)


def drop_layers(model: "Model", top: int) -> None:
    """Remove the Transformer layers above `top`, which are not needed; only from models that name them as BERT does."""
    encoder = getattr(model.base_model, "encoder", None)
    if isinstance(getattr(encoder, "layer", None), torch.nn.ModuleList):
        encoder.layer = encoder.layer[:top]  # type: ignore[union-attr]

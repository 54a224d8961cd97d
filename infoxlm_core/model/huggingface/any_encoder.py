"""Any Hugging Face encoder from its directory, and what its config says of the vectors it was trained to compare."""

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

if TYPE_CHECKING:  # its models take three seconds to import, which only a process that loads one has to pay
    from transformers import PreTrainedModel as Model
    from transformers import PreTrainedTokenizerBase as Tokenizer


def has_language_model_head(directory: Path) -> bool:
    """Whether a Hugging Face directory holds a masked language model, not an encoder alone."""
    return "ForMaskedLM" in json.dumps(pretrained.read_config(directory))  # among its "architectures"


def load_encoder(directory: Path | str, device: str | None = None) -> "tuple[Model, Tokenizer]":
    """Load an encoder, with its language-model head if it has one, ready to predict in fp32, on the GPU if any.

    Raises:
        InputError: the directory or a weight is missing, unreadable or of another shape than config.json describes, or
            the model is an encoder-decoder.
    """
    directory = Path(directory)
    if not (directory / "config.json").is_file():
        raise InputError(f"{directory} is no model: it has no config.json; give a Hugging Face model directory")
    auto_class: Any = (
        transformers.AutoModelForMaskedLM if has_language_model_head(directory) else transformers.AutoModel
    )
    tokenizer = tokenizers.load(directory)
    stored_weights.check_dtypes(directory)
    try:
        with _quietly():
            model, report = stored_weights.load_checked(auto_class, directory, padded.read_config(directory))
    except InputError:
        raise
    except Exception as error:  # a damaged file raises almost any exception, of four libraries
        raise InputError(f"{directory} cannot be loaded as a model ({one_line(error)}): export it again") from error
    # Transformers fills missing weights with random numbers. Only the pooler is never read.
    missing = sorted(name for name in report["missing_keys"] if "pooler" not in name)
    if missing:
        raise InputError(
            f"{directory} lacks {len(missing)} weights ({missing[0]}, …): give a complete {auto_class.__name__}"
        )
    pretrained.check_numbers(model, directory)
    if model.config.is_encoder_decoder:
        raise InputError(f"{directory} is an encoder-decoder ({model.config.model_type}): give an encoder alone")
    if tokenizer.pad_token_id is None:
        raise InputError(f"{directory}: its tokenizer has no padding token: name one in tokenizer_config.json")
    try:
        with torch.no_grad():
            model.eval()(torch.zeros(1, 1, dtype=torch.long))
    except Exception as error:  # a config may describe what cannot be computed: a dropout of NaN
        raise InputError(f"{directory} cannot be used as a model ({one_line(error)}): export it again") from None
    tokenizer.padding_side = "right"  # position 0 is the first token
    return model.to(device or devices.choose()), tokenizer


@contextmanager
def _quietly() -> Iterator[None]:
    """Without a table of the weights that are missing: we say it ourselves where it matters."""
    level, bars = transformers.logging.get_verbosity(), transformers.logging.is_progress_bar_enabled()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(level)
        if bars:
            transformers.logging.enable_progress_bar()


def contrast_space(model: "Model") -> tuple[int, str] | None:
    """Layer and pooling that the model was trained to compare sentences with; None if it does not say."""
    space = getattr(model.config, "infoxlm", None)
    return (space["layer"], space["pooling"]) if space else None


def describe(model: "Model") -> dict[str, Any]:
    """Sizes of an encoder."""
    return {
        "type": model.config.model_type,
        "layers": model.config.num_hidden_layers,
        "hidden": model.config.hidden_size,
        "vocabulary": model.config.vocab_size,
        "parameters": model.num_parameters(),
        "contrast": contrast_space(model),
    }


def load_projection(directory: Path | str, model: "Model") -> Tensor:
    """The contrast projection (d, d) that stands beside a model: z = h @ projection. InputError if the model was not
    contrasted, or the file is missing or damaged."""
    path = Path(directory) / PROJECTION
    if not contrast_space(model) or not path.is_file():
        raise InputError(
            f"{directory} has no contrast vectors (infoxlm in config.json, {PROJECTION}): give mean or cls"
        )
    found, width = pretrained.read_projection(path), model.config.hidden_size
    if found.shape != (width, width):
        raise InputError(f"{path}: projection is {tuple(found.shape)}, not {(width, width)}: copy it again")
    return found.to(model.device)


def drop_layers(model: "Model", top: int) -> None:
    """Take the Transformer layers above `top` off a model, where they are found as in BERT: nobody will read them."""
    encoder = getattr(model.base_model, "encoder", None)
    if isinstance(getattr(encoder, "layer", None), torch.nn.ModuleList):
        encoder.layer = encoder.layer[:top]  # type: ignore[union-attr]

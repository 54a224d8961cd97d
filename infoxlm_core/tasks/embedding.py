"""Sentences -> vectors, from any Hugging Face encoder: the format that a user of the model has in hand.

Layers are counted as in Hugging Face's `hidden_states`: 0 is the output of the embeddings, T that of the last
Transformer layer. Pooling "mean" averages all tokens, `<s>` and `</s>` included; "cls" is position 0.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModel, AutoModelForMaskedLM, AutoTokenizer, DataCollatorWithPadding
from transformers import PreTrainedModel as Model
from transformers import PreTrainedTokenizerBase as Tokenizer

from infoxlm_core.errors import InputError

Features = list[dict[str, list[int]]]
POOLINGS = ("mean", "cls")


def load(directory: Path | str, kind: type) -> tuple[Model, Tokenizer]:
    """Load a model and its tokenizer from a local directory, ready to predict; on the GPU if there is one.

    Args:
        kind: an `AutoModel…` class.

    Raises:
        InputError: the directory, or a weight that `kind` needs, is missing or cannot be read.
    """
    directory = Path(directory)
    if not (directory / "config.json").is_file():
        raise InputError(f"{directory} is no model: it has no config.json; give a Hugging Face model directory")
    safe: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, **safe)
        model, report = kind.from_pretrained(directory, use_safetensors=True, output_loading_info=True, **safe)  # type: ignore[attr-defined]
    except Exception as error:  # a broken file shows itself by almost any exception, of four libraries
        raise InputError(f"{directory} cannot be loaded as a model: {' '.join(str(error).split())[:300]}") from error
    # Transformers would fill weights that are not there with random numbers. Nothing of ours reads the pooler.
    if missing := sorted(name for name in report["missing_keys"] if "pooler" not in name):
        raise InputError(f"{directory} lacks {len(missing)} weights ({missing[0]}, …): give a complete {kind.__name__}")
    return model.eval().to("cuda" if torch.cuda.is_available() else "cpu"), tokenizer


def load_encoder(directory: Path | str) -> tuple[Model, Tokenizer]:
    """Load an encoder, with its language-model head if it has one (see `load`)."""
    path = Path(directory) / "config.json"
    has_head = path.is_file() and "ForMaskedLM" in path.read_text(encoding="utf-8")  # among its "architectures"
    return load(directory, AutoModelForMaskedLM if has_head else AutoModel)


def contrast_space(model: Model) -> tuple[int, str] | None:
    """Layer and pooling that the model was trained to compare sentences with; None if it does not say."""
    space = getattr(model.config, "infoxlm", None)
    return (space["layer"], space["pooling"]) if space else None


def encode(
    model: Model, tokenizer: Tokenizer, texts: Sequence[str], max_tokens: int, pairs: Sequence[str] | None = None
) -> Features:
    """Tokenize texts, or text pairs, into the model's inputs; cut at what it can read."""
    # RoBERTa counts positions from 2; to leave two positions unused harms no other model.
    limit = min(max_tokens, getattr(model.config, "max_position_embeddings", max_tokens + 2) - 2)
    columns = tokenizer(list(texts), list(pairs) if pairs is not None else None, truncation=True, max_length=limit)
    return [{name: values[i] for name, values in columns.items()} for i in range(len(texts))]


def batches(tokenizer: Tokenizer, features: Features, batch_size: int) -> Iterator[tuple[list[int], dict[str, Tensor]]]:
    """Yield indices of `features` and their padded batch, similar lengths together, so that little is padding."""
    collate = DataCollatorWithPadding(tokenizer)
    order = sorted(range(len(features)), key=lambda i: (-len(features[i]["input_ids"]), i))
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        yield chosen, dict(collate([features[i] for i in chosen]))


def autocast(device: torch.device) -> torch.autocast:
    """bf16 on a GPU; on a CPU everything stays fp32."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda")


def mean_pool(hidden: Tensor, mask: Tensor) -> Tensor:
    """Average the tokens (B, L, d) where the mask (B, L) is 1: (B, d) float32."""
    weights = mask.unsqueeze(-1).float()  # (B, L, 1)
    return (hidden.float() * weights).sum(dim=1) / weights.sum(dim=1)


@torch.inference_mode()
def embed(
    model: Model, tokenizer: Tokenizer, texts: Sequence[str], batch_size: int, max_tokens: int
) -> dict[str, Tensor]:
    """Compute the vectors of sentences at every layer.

    Returns:
        {"mean": (T + 1, N, d), "cls": (T + 1, N, d)}, float32, on the model's device, rows in the order of `texts`.
    """
    vectors: dict[str, Tensor] = {}
    for chosen, batch in batches(tokenizer, encode(model, tokenizer, texts, max_tokens), batch_size):
        batch = {name: values.to(model.device) for name, values in batch.items()}
        with autocast(model.device):
            layers = model.base_model(**batch, output_hidden_states=True).hidden_states  # T + 1 of (B, L, d)
        pooled = {
            "mean": torch.stack([mean_pool(hidden, batch["attention_mask"]) for hidden in layers]),
            "cls": torch.stack([hidden[:, 0].float() for hidden in layers]),
        }
        for name, values in pooled.items():  # (T + 1, B, d)
            if name not in vectors:
                vectors[name] = values.new_empty(len(values), len(texts), values.shape[-1])
            vectors[name][:, chosen] = values
    return vectors


def embed_sentences(
    directory: Path | str,
    texts: Sequence[str],
    layer: int | None = None,
    pooling: str | None = None,
    batch_size: int = 64,
    max_tokens: int = 256,
) -> Tensor:
    """Embed sentences with a model on disk: (N, d) float32 on the CPU.

    Args:
        layer, pooling: which vectors; None: those that the model was trained to compare sentences with.

    Raises:
        InputError: no model there, no such layer or pooling, or none given for a model that does not say.
    """
    model, tokenizer = load_encoder(directory)
    known_layer, known_pooling = contrast_space(model) or (None, None)
    layer, pooling = known_layer if layer is None else layer, pooling or known_pooling
    last = model.config.num_hidden_layers
    if layer is None or not 0 <= layer <= last:
        raise InputError(f"{directory}: layer {layer} is not one of its layers: give 0 to {last}")
    if pooling not in POOLINGS:
        raise InputError(f"{directory}: pooling {pooling} is not known: give mean or cls")
    few = 16 * batch_size  # all layers of a few sentences at a time, so that a million sentences fit into memory
    parts = [
        embed(model, tokenizer, texts[start : start + few], batch_size, max_tokens)[pooling][layer].cpu()
        for start in range(0, len(texts), few)
    ]
    return torch.cat(parts) if parts else torch.empty(0, model.config.hidden_size)

"""Sentences -> vectors, from any Hugging Face encoder: the format that a user of the model has in hand.

A vector has a place, such as mean@8. Layers are counted as in Hugging Face's `hidden_states`: 0 is the output of the
embeddings, T that of the last Transformer layer. Poolings:

    mean               of all tokens, `<s>` and `</s>` included
    mean_no_special    of all others
    cls                position 0
    contrast           what pre-training compared: its own pooling at its own layer, times its projection
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedTokenizerBase as Tokenizer

from infoxlm_core.errors import InputError
from infoxlm_core.model.heads import project
from infoxlm_core.model.huggingface.any_encoder import contrast_space, drop_layers, load_encoder, load_projection

if TYPE_CHECKING:
    from infoxlm_core.model.huggingface.any_encoder import Model

Features = list[dict[str, list[int]]]
POOLINGS = ("mean", "cls")  # those of the paper, which every evaluation shows at every layer
ALL_POOLINGS = (*POOLINGS, "mean_no_special", "contrast")
FULL = 0.8  # of the longest sentence of a batch has the shortest; the rest is padding
AT_ONCE = 16_384  # texts that are tokenized, and sorted by length, together


class Place(NamedTuple):
    """Where a vector is read."""

    pooling: str
    layer: int


def encode(model: "Model", tokenizer: Tokenizer, texts: Sequence[str], max_tokens: int) -> Features:
    """Tokenize texts into the model's inputs; cut at what it can read."""
    # RoBERTa counts positions from 2; to leave two positions unused harms no other model.
    limit = min(max_tokens, getattr(model.config, "max_position_embeddings", max_tokens + 2) - 2)
    columns = tokenizer(list(texts), truncation=True, max_length=limit)
    known = inspect.signature(model.base_model.forward).parameters  # DistilBERT, for one, has no token types
    return [{name: values[i] for name, values in columns.items() if name in known} for i in range(len(texts))]


def batches(tokenizer: Tokenizer, features: Features, batch_size: int) -> Iterator[tuple[list[int], dict[str, Tensor]]]:
    """Yield indices of `features` and their padded batch, the longest first, similar lengths together."""
    collate = transformers.DataCollatorWithPadding(tokenizer)
    lengths = [len(feature["input_ids"]) for feature in features]
    chosen: list[int] = []
    for i in sorted(range(len(features)), key=lambda i: (-lengths[i], i)):
        if chosen and (len(chosen) == batch_size or lengths[i] < FULL * lengths[chosen[0]]):
            yield chosen, dict(collate([features[j] for j in chosen]))
            chosen = []
        chosen.append(i)
    if chosen:
        yield chosen, dict(collate([features[j] for j in chosen]))


def mean_pool(hidden: Tensor, mask: Tensor) -> Tensor:
    """Average the tokens (B, L, d) where the mask (B, L) is 1: (B, d) float32."""
    weights = mask.unsqueeze(-1).float()  # (B, L, 1)
    return (hidden.float() * weights).sum(dim=1) / weights.sum(dim=1)


def find_words(tokenizer: Tokenizer, ids: Tensor, mask: Tensor) -> Tensor:
    """The mask (B, L) without special tokens; `<unk>` is a word, and a text of nothing else keeps them."""
    names = ("cls", "sep", "bos", "eos", "pad")
    special = {getattr(tokenizer, f"{name}_token_id") for name in names} - {None}
    words = mask * ~torch.isin(ids, torch.tensor(sorted(special), device=ids.device))
    return torch.where(words.any(dim=1, keepdim=True), words, mask)


@torch.inference_mode()
def embed(
    model: "Model",
    tokenizer: Tokenizer,
    texts: Sequence[str],
    places: Sequence[Place],
    batch_size: int,
    max_tokens: int,
    projection: Tensor | None = None,
    advance: Callable[[int], None] = lambda _: None,
) -> dict[Place, Tensor]:
    """Compute the vectors of N sentences at some places, in one pass: (N, d) float32 each, on the model's device.

    All is computed in fp32, on a GPU too: cosines of neighbours differ less than a rounding to bf16 moves them.
    `projection` is for places of pooling contrast (see `load_projection`); `advance` is told how many more are done.
    """
    _, own = contrast_space(model) or (0, "")
    vectors = {place: torch.empty(len(texts), model.config.hidden_size, device=model.device) for place in places}
    for start in range(0, len(texts), AT_ONCE):
        features = encode(model, tokenizer, texts[start : start + AT_ONCE], max_tokens)
        for chosen, batch in batches(tokenizer, features, batch_size):
            batch = {name: values.to(model.device) for name, values in batch.items()}
            layers = model.base_model(**batch, output_hidden_states=True).hidden_states  # T + 1 of (B, L, d)
            mask = batch["attention_mask"]
            words = find_words(tokenizer, batch["input_ids"], mask)
            rows = torch.tensor(chosen, device=model.device) + start
            for place in places:
                pooling = own if place.pooling == "contrast" else place.pooling
                hidden = layers[place.layer]
                if pooling == "cls":
                    pooled = hidden[:, 0].float()
                else:
                    pooled = mean_pool(hidden, mask if pooling == "mean" else words)
                if projection is not None and place.pooling == "contrast":
                    pooled = project(pooled, projection, model.config.infoxlm["normalise"])
                vectors[place][rows] = pooled
            advance(len(chosen))
    return vectors


def embedder(
    directory: Path | str,
    layer: int | None = None,
    pooling: str | None = None,
    batch_size: int = 64,
    max_tokens: int = 256,
) -> Callable[[Sequence[str]], Tensor]:
    """Load a model on disk; return what embeds sentences with it: (N, d) float32 on the CPU.

    Without `layer` and `pooling` the vectors are those that the model was trained to compare sentences with.

    Raises:
        InputError: no model there, no such layer or pooling, or none given for a model that does not say.
    """
    model, tokenizer = load_encoder(directory)
    known_layer, known_pooling = contrast_space(model) or (None, None)
    layer, pooling = known_layer if layer is None else layer, known_pooling if pooling is None else pooling
    last = model.config.num_hidden_layers
    if layer is None or not 0 <= layer <= last:
        raise InputError(f"{directory}: layer {layer} is not one of its layers: give 0 to {last}")
    if pooling not in ALL_POOLINGS:
        raise InputError(f"{directory}: pooling {pooling!r:.100} is not known: give {', '.join(ALL_POOLINGS)}")
    projection = load_projection(directory, model) if pooling == "contrast" else None
    if projection is not None and layer != known_layer:
        raise InputError(f"{directory}: its contrast vectors are of layer {known_layer}, not {layer}: leave layer out")
    drop_layers(model, layer)
    place = Place(pooling, layer)

    def embed_texts(texts: Sequence[str]) -> Tensor:
        return embed(model, tokenizer, texts, [place], batch_size, max_tokens, projection)[place].cpu()

    return embed_texts


def embed_sentences(directory: Path | str, texts: Sequence[str], *how: Any, **named: Any) -> Tensor:
    """Embed sentences with a model on disk; the other arguments, the result and the errors are those of `embedder`."""
    return embedder(directory, *how, **named)(texts)

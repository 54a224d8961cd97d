"""Sentence vectors from any Hugging Face encoder.

A vector is specified as POOLING@LAYER, such as mean@8. Layers are counted as in Hugging Face's `hidden_states`: 0 is
the output of the embeddings, T that of the last Transformer layer. Poolings:

    mean               mean of all tokens, including `<s>` and `</s>`
    mean_no_special    mean of all tokens that are not special
    cls                the token at position 0
    contrast           what pre-training contrasted: its pooling at its layer, times its projection
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedTokenizerBase as Tokenizer

from infoxlm_core.errors import InputError
from infoxlm_core.model import padded
from infoxlm_core.model.heads import project
from infoxlm_core.model.huggingface import pretrained
from infoxlm_core.model.huggingface.any_encoder import (
    contrast_space,
    drop_layers,
    load_encoder,
    load_projection,
    served_max_tokens,
    served_prefix,
    served_space,
)

if TYPE_CHECKING:
    from infoxlm_core.model.huggingface.any_encoder import Model

Features = list[dict[str, list[int]]]
POOLINGS = ("mean", "cls")  # those of the paper, which every evaluation measures at every layer
ALL_POOLINGS = (*POOLINGS, "mean_no_special", "contrast")
TOKENS_PER_TEXT = 256  # a batch of B texts has at most B times as many tokens, so that long texts fit into memory
LEAST_FILLED = 0.8  # the shortest text of a batch has at least this share of the longest one's tokens
CHUNK = 16_384  # texts that are tokenized, and sorted by length, together


class VectorSpec(NamedTuple):
    """Which vector of a sentence is meant."""

    pooling: str
    layer: int


def encode(model: "Model", tokenizer: Tokenizer, texts: Sequence[str], max_tokens: int) -> Features:
    """Tokenize texts into the model's inputs, truncated to what the model can read."""
    limit = min(max_tokens, pretrained.find_max_tokens(model.config.to_dict()))
    columns = tokenizer(list(texts), truncation=True, max_length=limit)
    accepted_names = inspect.signature(model.base_model.forward).parameters
    input_names = [name for name in columns if name in accepted_names]  # DistilBERT, for example, has no token types
    return [{name: columns[name][row] for name in input_names} for row in range(len(texts))]


def batches(
    model: "Model", tokenizer: Tokenizer, features: Features, batch_size: int, language: str | None = None
) -> Iterator[tuple[list[int], dict[str, Tensor]]]:
    """Group texts of similar length into padded batches on the model's device, the longest texts first.

    Yield the indices of the texts of a batch, and the batch. If the model has language embeddings, `language` selects
    one.
    """
    language_number = None if language is None else padded.find_language_id(model.config, language)
    for rows in _group_by_length(features, batch_size):
        batch = transformers.DataCollatorWithPadding(tokenizer)([features[row] for row in rows])
        batch = {name: values.to(model.device) for name, values in batch.items()}
        if language_number is not None:
            batch["langs"] = torch.full_like(batch["input_ids"], language_number)
        yield rows, batch


def _group_by_length(features: Features, batch_size: int) -> Iterator[list[int]]:
    """Yield the indices of each batch: `batch_size` texts, or fewer long ones."""
    lengths = [len(feature["input_ids"]) for feature in features]
    longest_first = sorted(range(len(features)), key=lambda row: -lengths[row])
    batch: list[int] = []
    for row in longest_first:
        if batch:
            longest = lengths[batch[0]]
            # A batch is padded to its longest text, so much shorter texts begin a new batch.
            is_full = len(batch) == batch_size or (len(batch) + 1) * longest > batch_size * TOKENS_PER_TEXT
            is_too_short = lengths[row] < LEAST_FILLED * longest
            if is_full or is_too_short:
                yield batch
                batch = []
        batch.append(row)
    if batch:
        yield batch


def mean_pool(hidden: Tensor, mask: Tensor) -> Tensor:
    """Average the tokens (B, L, d) where the mask (B, L) is 1: (B, d) float32."""
    weights = mask.unsqueeze(-1).float()  # (B, L, 1)
    return (hidden.float() * weights).sum(dim=1) / weights.sum(dim=1)


def mask_special(tokenizer: Tokenizer, ids: Tensor, mask: Tensor) -> Tensor:
    """Return the mask (B, L) without special tokens. A text of special tokens alone keeps them.

    `<unk>` stands for a word, so it is not special here.
    """
    names = ("cls", "sep", "bos", "eos", "pad")
    special_ids = {getattr(tokenizer, f"{name}_token_id") for name in names} - {None}
    is_special = torch.isin(ids, torch.tensor(sorted(special_ids), device=ids.device))  # (B, L)
    word_mask = mask * ~is_special
    has_words = word_mask.any(dim=1, keepdim=True)  # (B, 1)
    return torch.where(has_words, word_mask, mask)


@dataclass(frozen=True)
class VectorEncoder:
    """A loaded model that computes sentence vectors with any pooling at any layer.

    It computes in fp32 on GPUs too, because rounding to bf16 changes a cosine by more than the difference between two
    neighbours.
    """

    model: "Model"
    tokenizer: Tokenizer
    batch_size: int  # sentences per forward pass; changes memory and speed, not the result
    max_tokens: int  # longer sentences are truncated
    prefix: str = ""  # text before every sentence
    projection: Tensor | None = None  # (d, d) from `load_projection`; only the pooling `contrast` needs it

    @torch.inference_mode()
    def embed(
        self,
        texts: Sequence[str],
        specs: Sequence[VectorSpec],
        language: str | None = None,
        advance: Callable[[int], None] = lambda _: None,
    ) -> dict[VectorSpec, Tensor]:
        """Compute several vectors of N sentences in one pass: (N, d) float32 each, on the model's device.

        Args:
            texts: N sentences.
            specs: the vectors to compute.
            language: that of the texts, for models with language embeddings, such as XLM; without it none is added.
            advance: called with the number of sentences of every finished batch.
        """
        model = self.model
        vectors = {spec: torch.empty(len(texts), model.config.hidden_size, device=model.device) for spec in specs}
        for start in range(0, len(texts), CHUNK):
            chunk = [self.prefix + text for text in texts[start : start + CHUNK]]
            features = encode(model, self.tokenizer, chunk, self.max_tokens)
            for rows, batch in batches(model, self.tokenizer, features, self.batch_size, language):
                layers = model.base_model(**batch, output_hidden_states=True).hidden_states  # T + 1 of (B, L, d)
                mask = batch["attention_mask"]
                word_mask = mask_special(self.tokenizer, batch["input_ids"], mask)
                positions = torch.tensor(rows, device=model.device) + start
                for spec in specs:
                    vectors[spec][positions] = self._pool(layers[spec.layer], spec.pooling, mask, word_mask)
                advance(len(rows))
        return vectors

    def _pool(self, hidden: Tensor, pooling: str, mask: Tensor, word_mask: Tensor) -> Tensor:
        """Pool hidden states (B, L, d) with the masks (B, L) of all tokens and of words: (B, d)."""
        if pooling == "contrast":
            contrast = contrast_space(self.model.config)
            assert contrast and self.projection is not None  # noqa: S101 - `load_projection` has checked it
            pooled = self._pool(hidden, contrast.pooling, mask, word_mask)
            return project(pooled, self.projection, self.model.config.infoxlm["normalise"])
        if pooling == "cls":
            return hidden[:, 0].float()
        return mean_pool(hidden, mask if pooling == "mean" else word_mask)


@dataclass(frozen=True)
class Embedder:
    """A loaded model that computes one vector of each sentence."""

    encoder: VectorEncoder
    spec: VectorSpec

    def __call__(self, texts: Sequence[str], advance: Callable[[int], None] = lambda _: None) -> Tensor:
        """Return the vectors of N sentences, (N, d) float32 on the CPU. `advance` is that of `VectorEncoder.embed`."""
        return self.encoder.embed(texts, [self.spec], advance=advance)[self.spec].cpu()


def load_embedder(
    directory: Path | str,
    layer: int | None = None,
    pooling: str | None = None,
    batch_size: int = 64,
    max_tokens: int | None = None,
    prefix: str | None = None,
) -> Embedder:
    """Load a model on disk as a function from sentences to vectors.

    Args:
        directory: the model in Hugging Face format.
        layer: number as in `hidden_states`; None: the layer of the vectors that users get (`served_space`).
        pooling: one of `ALL_POOLINGS`; None: the pooling of these vectors.
        batch_size: sentences per forward pass.
        max_tokens: longer sentences are truncated; None: `served_max_tokens`, the limit of sentence-transformers.
        prefix: text before every sentence; None: that of `served_prefix`.

    Raises:
        InputError: there is no model, or it has no such layer or pooling.
    """
    model, tokenizer = load_encoder(directory)
    if layer is None or pooling is None:
        served = served_space(model)
        layer = served.layer if layer is None else layer
        pooling = served.pooling if pooling is None else pooling
    last_layer = model.config.num_hidden_layers
    if not 0 <= layer <= last_layer:
        raise InputError(f"{directory}: layer {layer} is not one of its layers: give 0 to {last_layer}")
    if pooling not in ALL_POOLINGS:
        raise InputError(f"{directory}: pooling {pooling!r:.100} is not known: give {', '.join(ALL_POOLINGS)}")
    projection = load_projection(directory, model) if pooling == "contrast" else None
    contrast = contrast_space(model.config)
    if projection is not None and contrast is not None and layer != contrast.layer:
        raise InputError(
            f"{directory}: its contrast vectors are of layer {contrast.layer}, not {layer}: leave layer out"
        )
    drop_layers(model, layer)
    prefix = served_prefix(model) if prefix is None else prefix
    max_tokens = served_max_tokens(Path(directory)) if max_tokens is None else max_tokens
    encoder = VectorEncoder(model, tokenizer, batch_size, max_tokens, prefix, projection)
    return Embedder(encoder, VectorSpec(pooling, layer))


def embed_sentences(directory: Path | str, texts: Sequence[str], *args: Any, **options: Any) -> Tensor:
    """Embed sentences with a model on disk. Other arguments, result and errors are those of `load_embedder`."""
    return load_embedder(directory, *args, **options)(texts)

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
    drop_layers,
    find_default_prefix,
    find_embedding_settings,
    load_encoder,
    load_projection,
    read_contrast_settings,
    read_max_seq_length,
)

if TYPE_CHECKING:
    from infoxlm_core.model.huggingface.any_encoder import Model

Features = list[dict[str, list[int]]]
POOLINGS = ("mean", "cls")  # those of the paper, which every evaluation measures at every layer
ALL_POOLINGS = (*POOLINGS, "mean_no_special", "contrast")
TOKENS_PER_TEXT = 256  # a batch of B texts has at most B times as many tokens, so that long texts fit into memory
LEAST_FILLED = 0.8  # the shortest text of a batch has at least this share of the longest text's tokens
CHUNK = 16_384  # texts that are tokenized, and sorted by length, together


class VectorSpec(NamedTuple):
    """How a sentence vector is computed: the pooling, and the layer whose hidden states are pooled."""

    pooling: str
    layer: int


def encode(model: "Model", tokenizer: Tokenizer, texts: Sequence[str], max_tokens: int) -> Features:
    """Tokenize texts into the model's inputs, truncated to what the model can read."""
    limit = min(max_tokens, pretrained.find_max_tokens(model.config.to_dict()))
    columns = tokenizer(list(texts), truncation=True, max_length=limit)
    accepted_names = inspect.signature(model.base_model.forward).parameters
    input_names = [name for name in columns if name in accepted_names]  # DistilBERT, for example, has no token types
    return [{name: columns[name][row] for name in input_names} for row in range(len(texts))]


def iterate_batches(
    model: "Model", tokenizer: Tokenizer, features: Features, batch_size: int, language: str | None = None
) -> Iterator[tuple[list[int], dict[str, Tensor]]]:
    """Yield padded batches of texts of similar length, the longest first, with the indices of their texts.

    Args:
        model: reads the batches, which are on its device.
        tokenizer: pads the batches.
        features: the model's inputs of each text, from `encode`.
        batch_size: largest number of texts in a batch.
        language: that of the texts, for models with language embeddings.
    """
    language_id = None if language is None else padded.find_language_id(model.config, language)
    collator = transformers.DataCollatorWithPadding(tokenizer)
    for indices in _group_by_length(features, batch_size):
        batch = collator([features[index] for index in indices])
        batch = {name: values.to(model.device) for name, values in batch.items()}
        if language_id is not None:
            batch["langs"] = torch.full_like(batch["input_ids"], language_id)
        yield indices, batch


def _group_by_length(features: Features, batch_size: int) -> Iterator[list[int]]:
    """Yield the indices of the texts of each batch. Batches of long texts have fewer than `batch_size` texts."""
    lengths = [len(feature["input_ids"]) for feature in features]
    longest_first = sorted(range(len(features)), key=lambda index: -lengths[index])
    batch: list[int] = []
    for index in longest_first:
        if batch:
            longest = lengths[batch[0]]
            # A batch is padded to its longest text, so much shorter texts begin a new batch.
            is_full = len(batch) == batch_size or (len(batch) + 1) * longest > batch_size * TOKENS_PER_TEXT
            is_too_short = lengths[index] < LEAST_FILLED * longest
            if is_full or is_too_short:
                yield batch
                batch = []
        batch.append(index)
    if batch:
        yield batch


def mean_pool(hidden: Tensor, mask: Tensor) -> Tensor:
    """Average the tokens (B, L, d) where the mask (B, L) is 1: (B, d) float32."""
    weights = mask.unsqueeze(-1).float()  # (B, L, 1)
    return (hidden.float() * weights).sum(dim=1) / weights.sum(dim=1)


def mask_special(tokenizer: Tokenizer, ids: Tensor, mask: Tensor) -> Tensor:
    """Remove special tokens from an attention mask (B, L), except in texts that have no other tokens.

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
        advance: Callable[[int], None] | None = None,
    ) -> dict[VectorSpec, Tensor]:
        """Compute several vectors of N sentences in one pass: (N, d) float32 each, on the model's device.

        Args:
            texts: N sentences.
            specs: the vectors to compute.
            language: that of the texts, for models with language embeddings, such as XLM; without it none is added.
            advance: updates a progress bar with the number of sentences of a finished batch.
        """
        model = self.model
        vectors = {spec: torch.empty(len(texts), model.config.hidden_size, device=model.device) for spec in specs}
        for start in range(0, len(texts), CHUNK):
            chunk = [self.prefix + text for text in texts[start : start + CHUNK]]
            features = encode(model, self.tokenizer, chunk, self.max_tokens)
            for indices, batch in iterate_batches(model, self.tokenizer, features, self.batch_size, language):
                hidden_states = model.base_model(**batch, output_hidden_states=True).hidden_states
                mask = batch["attention_mask"]
                word_mask = mask_special(self.tokenizer, batch["input_ids"], mask)
                rows = torch.tensor(indices, device=model.device) + start
                for spec in specs:
                    layer_states = hidden_states[spec.layer]  # (B, L, d)
                    vectors[spec][rows] = self._pool(layer_states, spec.pooling, mask, word_mask)
                if advance:
                    advance(len(indices))
        return vectors

    def _pool(self, hidden: Tensor, pooling: str, mask: Tensor, word_mask: Tensor) -> Tensor:
        """Pool hidden states (B, L, d) to sentence vectors (B, d).

        Args:
            hidden: hidden states of one layer.
            pooling: one of `ALL_POOLINGS`.
            mask: (B, L) attention mask.
            word_mask: (B, L) the same without special tokens.
        """
        if pooling == "cls":
            return hidden[:, 0].float()
        if pooling == "mean":
            return mean_pool(hidden, mask)
        if pooling == "mean_no_special":
            return mean_pool(hidden, word_mask)
        contrast = read_contrast_settings(self.model.config)
        assert contrast and self.projection is not None  # noqa: S101 - `load_projection` has checked it
        vectors = self._pool(hidden, contrast.pooling, mask, word_mask)
        return project(vectors, self.projection, self.model.config.infoxlm["normalise"])


@dataclass(frozen=True)
class Embedder:
    """A loaded model that computes one vector of each sentence."""

    encoder: VectorEncoder
    spec: VectorSpec

    def __call__(self, texts: Sequence[str], advance: Callable[[int], None] | None = None) -> Tensor:
        """Return the vectors of N sentences, (N, d) float32 on the CPU. See `VectorEncoder.embed` for `advance`."""
        return self.encoder.embed(texts, [self.spec], advance=advance)[self.spec].cpu()


def load_embedder(
    directory: Path | str,
    layer: int | None = None,
    pooling: str | None = None,
    batch_size: int = 64,
    max_tokens: int | None = None,
    prefix: str | None = None,
) -> Embedder:
    """Load a model that computes one vector of each sentence, by default the vector of `infoxlm embed`.

    Args:
        directory: the model in Hugging Face format.
        layer: number as in `hidden_states`; None: the layer of `find_embedding_settings`.
        pooling: one of `ALL_POOLINGS`; None: the pooling of `find_embedding_settings`.
        batch_size: sentences per forward pass.
        max_tokens: longer sentences are truncated; None: `read_max_seq_length`, the limit of sentence-transformers.
        prefix: text before every sentence; None: that of `find_default_prefix`.

    Raises:
        InputError: there is no model, or it has no such layer or pooling.
    """
    model, tokenizer = load_encoder(directory)
    if layer is None:
        layer = find_embedding_settings(model).layer
    if pooling is None:
        pooling = find_embedding_settings(model).pooling
    if prefix is None:
        prefix = find_default_prefix(model)
    if max_tokens is None:
        max_tokens = read_max_seq_length(Path(directory))
    last_layer = model.config.num_hidden_layers
    if not 0 <= layer <= last_layer:
        raise InputError(f"{directory}: layer {layer} is not one of its layers: give 0 to {last_layer}")
    if pooling not in ALL_POOLINGS:
        raise InputError(f"{directory}: pooling {pooling!r:.100} is not known: give {', '.join(ALL_POOLINGS)}")
    projection = load_projection(directory, model) if pooling == "contrast" else None
    contrast = read_contrast_settings(model.config)
    if projection is not None and contrast is not None and layer != contrast.layer:
        raise InputError(
            f"{directory}: its contrast vectors are of layer {contrast.layer}, not {layer}: leave layer out"
        )
    drop_layers(model, layer)
    encoder = VectorEncoder(model, tokenizer, batch_size, max_tokens, prefix, projection)
    return Embedder(encoder, VectorSpec(pooling, layer))


def embed_sentences(directory: Path | str, texts: Sequence[str], *args: Any, **options: Any) -> Tensor:
    """Embed sentences with a model on disk. Other arguments, result and errors are those of `load_embedder`."""
    return load_embedder(directory, *args, **options)(texts)

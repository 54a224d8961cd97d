"""Sentence vectors from any Hugging Face encoder.

A vector is specified as POOLING@LAYER, such as mean@8. Layers are indices of Hugging Face's `hidden_states`: 0 is the
output of the embeddings, and T is the output of the last of T Transformer layers. Poolings:

    mean               mean of all tokens, including `<s>` and `</s>`
    mean_no_special    mean of all tokens except special tokens
    cls                the token at position 0
    contrast           the query vector of pre-training: its pooling at its layer, then its projection
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
POOLINGS = ("mean", "cls")  # the poolings of the InfoXLM paper; every evaluation measures them at every layer
ALL_POOLINGS = (*POOLINGS, "mean_no_special", "contrast")
TOKENS_PER_TEXT = 256  # a batch has at most `batch_size` times this many tokens, so that long texts fit into memory
LEAST_FILLED = 0.8  # smallest ratio of the shortest to the longest text of a batch, in tokens
CHUNK = 16_384  # number of texts to tokenize and sort by length at a time


class VectorSpec(NamedTuple):
    """The pooling of a sentence vector, and the layer to pool."""

    pooling: str
    layer: int


def encode(model: "Model", tokenizer: Tokenizer, texts: Sequence[str], max_tokens: int) -> Features:
    """Tokenize texts into the model's inputs, truncated to the model's maximum length."""
    limit = min(max_tokens, pretrained.find_max_tokens(model.config.to_dict()))
    columns = tokenizer(list(texts), truncation=True, max_length=limit)
    accepted_names = inspect.signature(model.base_model.forward).parameters
    input_names = [name for name in columns if name in accepted_names]  # DistilBERT, for example, has no token types
    return [{name: columns[name][row] for name in input_names} for row in range(len(texts))]


def iterate_batches(
    model: "Model", tokenizer: Tokenizer, features: Features, batch_size: int, language: str | None = None
) -> Iterator[tuple[list[int], dict[str, Tensor]]]:
    """Yield each batch's text indices and padded inputs. Texts of similar length share a batch, the longest first.

    Args:
        model: model that determines the batches' device and language ids.
        tokenizer: tokenizer that pads the batches.
        features: the model's inputs for each text, from `encode`.
        batch_size: maximum number of texts in a batch; batches of long texts are smaller.
        language: language of the texts, for models with language embeddings.
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
    """Yield the text indices of each batch. Batches of long texts have fewer than `batch_size` texts."""
    lengths = [len(feature["input_ids"]) for feature in features]
    longest_first = sorted(range(len(features)), key=lambda index: -lengths[index])
    batch: list[int] = []
    for index in longest_first:
        if batch:
            longest = lengths[batch[0]]
            # All texts of a batch are padded to the longest, so a much shorter text begins a new batch.
            is_full = len(batch) == batch_size or (len(batch) + 1) * longest > batch_size * TOKENS_PER_TEXT
            is_too_short = lengths[index] < LEAST_FILLED * longest
            if is_full or is_too_short:
                yield batch
                batch = []
        batch.append(index)
    if batch:
        yield batch


def mean_pool(hidden: Tensor, mask: Tensor) -> Tensor:
    """Return the mean (B, d) of the hidden states (B, L, d) where the mask (B, L) is 1, in float32."""
    weights = mask.unsqueeze(-1).float()  # (B, L, 1)
    return (hidden.float() * weights).sum(dim=1) / weights.sum(dim=1)


def mask_special(tokenizer: Tokenizer, ids: Tensor, mask: Tensor) -> Tensor:
    """Remove special tokens from an attention mask (B, L), except in texts that have no other tokens.

    `<unk>` counts as a word, because it stands for one.
    """
    names = ("cls", "sep", "bos", "eos", "pad")  # `all_special_ids` would include <unk>
    special_ids = {getattr(tokenizer, f"{name}_token_id") for name in names} - {None}
    is_special = torch.isin(ids, torch.tensor(sorted(special_ids), device=ids.device))  # (B, L)
    word_mask = mask * ~is_special
    has_words = word_mask.any(dim=1, keepdim=True)  # (B, 1)
    return torch.where(has_words, word_mask, mask)


@dataclass(frozen=True)
class VectorEncoder:
    """A loaded model that computes sentence vectors with any pooling at any layer.

    It computes in fp32 even on GPUs, because rounding to bf16 can change which neighbour of a vector is nearest.
    """

    model: "Model"
    tokenizer: Tokenizer
    batch_size: int  # sentences per forward pass; affects memory and speed, not the result
    max_tokens: int  # longer sentences are truncated
    prefix: str = ""  # text to add before every sentence
    projection: Tensor | None = None  # (d, d) from `load_projection`, for the pooling `contrast`

    @torch.inference_mode()
    def embed(
        self,
        texts: Sequence[str],
        specs: Sequence[VectorSpec],
        language: str | None = None,
        advance: Callable[[int], None] | None = None,
    ) -> dict[VectorSpec, Tensor]:
        """Compute several kinds of vectors for N sentences in one pass.

        Args:
            texts: N sentences.
            specs: the kinds of vectors to compute.
            language: language of the texts, for models with language embeddings such as XLM; None: add no embedding.
            advance: function that adds the number of finished sentences to a progress bar.

        Returns:
            Mapping from spec to vectors (N, d), float32 on the model's device.
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
        """Pool one layer's hidden states (B, L, d) to sentence vectors (B, d).

        `word_mask` (B, L) is the attention mask `mask` (B, L) without special tokens.
        """
        if pooling == "cls":
            return hidden[:, 0].float()
        if pooling == "mean":
            return mean_pool(hidden, mask)
        if pooling == "mean_no_special":
            return mean_pool(hidden, word_mask)
        contrast = read_contrast_settings(self.model.config)  # for the remaining pooling, `contrast`
        assert contrast and self.projection is not None  # noqa: S101 - `load_projection` checks both
        vectors = self._pool(hidden, contrast.pooling, mask, word_mask)
        return project(vectors, self.projection, self.model.config.infoxlm["normalise"])


@dataclass(frozen=True)
class Embedder:
    """A loaded model that computes one vector per sentence."""

    encoder: VectorEncoder
    spec: VectorSpec

    def __call__(self, texts: Sequence[str], advance: Callable[[int], None] | None = None) -> Tensor:
        """Return the vectors (N, d) of N sentences, float32 on the CPU. See `VectorEncoder.embed` for `advance`."""
        return self.encoder.embed(texts, [self.spec], advance=advance)[self.spec].cpu()


def load_embedder(
    directory: Path | str,
    layer: int | None = None,
    pooling: str | None = None,
    batch_size: int = 64,
    max_tokens: int | None = None,
    prefix: str | None = None,
) -> Embedder:
    """Load a model that computes one vector per sentence, by default the vector of `infoxlm embed`.

    Args:
        directory: model in Hugging Face format.
        layer: index into `hidden_states`; None: the layer of `find_embedding_settings`.
        pooling: one of `ALL_POOLINGS`; None: the pooling of `find_embedding_settings`.
        batch_size: sentences per forward pass.
        max_tokens: maximum length of a sentence; None: the limit from `read_max_seq_length`.
        prefix: text to add before every sentence; None: the prefix from `find_default_prefix`.

    Raises:
        InputError: the model is missing, or does not have the layer or pooling.
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
        raise InputError(f"{directory}: the model has no layer {layer}: give 0 to {last_layer}")
    if pooling not in ALL_POOLINGS:
        raise InputError(f"{directory}: pooling {pooling!r:.100} is not known: give {', '.join(ALL_POOLINGS)}")
    projection = load_projection(directory, model) if pooling == "contrast" else None
    contrast = read_contrast_settings(model.config)
    # The projection was trained only on the output of the contrast layer.
    if projection is not None and contrast is not None and layer != contrast.layer:
        raise InputError(
            f"{directory}: its contrast vectors come from layer {contrast.layer}, not {layer}: omit the layer"
        )
    drop_layers(model, layer)  # saves time, because the vector needs no higher layers
    encoder = VectorEncoder(model, tokenizer, batch_size, max_tokens, prefix, projection)
    return Embedder(encoder, VectorSpec(pooling, layer))


def embed_sentences(directory: Path | str, texts: Sequence[str], *args: Any, **options: Any) -> Tensor:
    """Embed sentences with a model on disk. All other arguments are passed to `load_embedder`."""
    return load_embedder(directory, *args, **options)(texts)

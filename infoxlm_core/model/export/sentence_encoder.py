"""An encoder that ends at the layer of its sentence vectors, for all export formats."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn

from infoxlm_core import user_files
from infoxlm_core.errors import InputError
from infoxlm_core.model.huggingface import any_encoder, pretrained
from infoxlm_core.model.huggingface.directories import MODULES

DEFAULT_PROMPT = "query"
POOLINGS = ("cls", "mean")
BATCH = 32  # texts per forward pass of `embed`

VectorFunction = Callable[[Tensor, Tensor], Tensor]
"""Computes (B, d) sentence vectors for (B, L) int64 token ids and their attention mask."""


@dataclass(frozen=True)
class VectorSettings:
    """The settings for computing a sentence vector."""

    layer: int  # layer number as in `hidden_states`: 0 is the output of the embeddings
    pooling: str
    normalise: bool  # whether vectors are scaled to length 1
    prompts: any_encoder.Prompts

    @property
    def prefix(self) -> str:
        """The text to prepend to a sentence if the user names no prompt."""
        return self.prompts.default_text


class SentenceEncoder(nn.Module):
    """Computes sentence vectors for padded token ids. The encoder ends at the layer of the vectors."""

    def __init__(self, encoder: Any, settings: VectorSettings) -> None:
        super().__init__()
        self.encoder = encoder
        self.settings = settings
        self.eval()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Compute token vectors and sentence vectors.

        Args:
            input_ids: (B, L) int64 token ids.
            attention_mask: (B, L) int64, 0 for padding.

        Returns:
            Token vectors, (B, L, d), and sentence vectors, (B, d).
        """
        token_vectors = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        if self.settings.pooling == "cls":
            sentence_vectors = token_vectors[:, 0]
        else:
            mask = attention_mask.unsqueeze(-1).to(token_vectors.dtype)  # (B, L, 1)
            sentence_vectors = (token_vectors * mask).sum(dim=1) / mask.sum(dim=1)
        if self.settings.normalise:
            sentence_vectors = F.normalize(sentence_vectors, dim=1)
        return token_vectors, sentence_vectors

    @torch.inference_mode()
    def run(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return (B, d) sentence vectors. See `forward` for the arguments."""
        _, vectors = self(input_ids, attention_mask)
        return vectors


def load(directory: Path) -> SentenceEncoder:
    """Load an encoder on the CPU in fp32. Remove its head, and all layers above the layer of its sentence vectors.

    Raises:
        InputError: the Hugging Face directory has no encoder, or the encoder's vectors cannot be exported.
    """
    model, _ = any_encoder.load_encoder(directory, "cpu")
    settings = read_settings(directory)
    encoder: Any = model.base_model
    _check_exportable(directory, settings, encoder)
    any_encoder.drop_layers(model, settings.layer)
    encoder.config.num_hidden_layers = settings.layer
    if getattr(encoder, "pooler", None) is not None:
        encoder.pooler = None  # sentence vectors are pooled from the hidden states instead
    return SentenceEncoder(encoder, settings)


def _check_exportable(directory: Path, settings: VectorSettings, encoder: Any) -> None:
    """Raise InputError if the pooling is unsupported, or if the layers above the vectors cannot be removed."""
    if settings.pooling not in POOLINGS:
        raise InputError(
            f"{directory}: pooling {settings.pooling} cannot be exported: give a model with {' or '.join(POOLINGS)}"
        )
    layer_count = encoder.config.num_hidden_layers
    if not 1 <= settings.layer <= layer_count:
        raise InputError(
            f"{directory}: vectors of layer {settings.layer} cannot be exported: give layer 1 to {layer_count}"
        )
    if settings.layer < layer_count and any_encoder.find_layers(encoder) is None:
        raise InputError(
            f"{directory}: layers of a {encoder.config.model_type} cannot be removed: give a model with vectors of the "
            "last layer"
        )


def read_settings(directory: Path) -> VectorSettings:
    """Read how a model computes sentence vectors, from our config.json or from sentence-transformers files."""
    layer, pooling = any_encoder.read_embedding_settings(directory)
    our_settings = pretrained.read_config(directory).get("infoxlm")
    prompts = any_encoder.read_prompts(directory)  # none if the model has no sentence-transformers files
    if not our_settings:
        normalise = (directory / MODULES).is_file() and _has_normalize_module(directory)
        return VectorSettings(layer, pooling, normalise, prompts)
    normalise = bool(our_settings.get("normalise", False))
    prefix = our_settings.get("prefix", "")
    is_export = (directory / MODULES).is_file()  # an export has the prompts of its source
    if prefix and not is_export:
        # `encode_query` uses the prompt "query" (DEFAULT_PROMPT), and `encode_document` "document"
        prompts = any_encoder.Prompts({DEFAULT_PROMPT: prefix, "document": prefix}, DEFAULT_PROMPT)
    return VectorSettings(layer, pooling, normalise, prompts)


def _has_normalize_module(directory: Path) -> bool:
    """Return whether a sentence-transformers model scales its vectors to length 1."""
    modules = user_files.read_json(directory / MODULES, list[dict[str, Any]], "copy the model again")
    return any(str(module.get("type")).endswith(".Normalize") for module in modules)


def embed(compute_vectors: VectorFunction, tokenizer: Tokenizer, texts: Sequence[str]) -> Tensor:
    """Return (N, d) vectors of N texts. Batches contain texts of similar length, to minimize padding.

    Args:
        compute_vectors: function that computes the vectors of a batch.
        tokenizer: the export's tokenizer, from `load_tokenizer`.
        texts: N texts, prefixes included.
    """
    shortest_first = np.argsort([len(text) for text in texts], kind="stable")
    vectors: list[Tensor] = [torch.empty(0)] * len(texts)
    for start in range(0, len(texts), BATCH):
        indices = shortest_first[start : start + BATCH]
        encodings = tokenizer.encode_batch([texts[index] for index in indices])
        ids = torch.tensor([encoding.ids for encoding in encodings])  # (B, L)
        mask = torch.tensor([encoding.attention_mask for encoding in encodings])  # (B, L)
        for index, vector in zip(indices, compute_vectors(ids, mask), strict=True):
            vectors[index] = vector
    return torch.stack(vectors)


def load_tokenizer(directory: Path) -> Tokenizer:
    """Load an export's tokenizer, with padding and truncation, using only the library `tokenizers`."""
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    settings = user_files.read_json(directory / "tokenizer_config.json", dict[str, Any], "export the model again")
    tokenizer.enable_truncation(settings["model_max_length"])
    pad_token = settings["pad_token"]
    tokenizer.enable_padding(pad_id=tokenizer.token_to_id(pad_token), pad_token=pad_token)
    return tokenizer

"""An encoder that ends at the layer of its sentence vector, from which all export formats are written."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
BATCH = 32

Run = Callable[[Tensor, Tensor], Tensor]
"""Computes sentence vectors (B, d) from ids and mask, (B, L) int64."""


@dataclass(frozen=True)
class VectorSettings:
    """The settings that determine the vector of a sentence."""

    layer: int  # numbered as in `hidden_states`: 0 is the output of the embeddings
    pooling: str
    normalise: bool  # whether vectors are divided by their length
    prompts: Mapping[str, str]  # name -> text that is added before a sentence
    default_prompt: str | None  # name of the prompt that is used if the user names none

    @property
    def prefix(self) -> str:
        """The text that is added before a sentence if the user names no prompt."""
        return self.prompts[self.default_prompt] if self.default_prompt else ""


class SentenceEncoder(nn.Module):
    """Computes sentence vectors from padded token ids. Its encoder ends with the layer of the vector."""

    def __init__(self, encoder: Any, settings: VectorSettings) -> None:
        super().__init__()
        self.encoder = encoder
        self.settings = settings
        self.eval()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return the vectors of tokens (B, L, d) and of sentences (B, d), given ids and mask, (B, L) int64."""
        tokens = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        if self.settings.pooling == "cls":
            vectors = tokens[:, 0]
        else:
            weights = attention_mask.unsqueeze(-1).to(tokens.dtype)  # (B, L, 1)
            vectors = (tokens * weights).sum(dim=1) / weights.sum(dim=1)
        if self.settings.normalise:
            vectors = F.normalize(vectors, dim=1)
        return tokens, vectors

    @torch.inference_mode()
    def run(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return the vectors of the sentences (B, d)."""
        _, vectors = self(input_ids, attention_mask)
        return vectors


def load(directory: Path) -> SentenceEncoder:
    """Load an encoder on the CPU in fp32, without its head and the layers above its sentence vector.

    Raises:
        InputError: the Hugging Face directory has no encoder, or its vector cannot be exported.
    """
    model, _ = any_encoder.load_encoder(directory, "cpu")
    settings = read_settings(directory)
    encoder: Any = model.base_model
    _check_exportable(directory, settings, encoder)
    any_encoder.drop_layers(model, settings.layer)
    encoder.config.num_hidden_layers = settings.layer
    if getattr(encoder, "pooler", None) is not None:
        encoder.pooler = None  # it is never used
    return SentenceEncoder(encoder, settings)


def _check_exportable(directory: Path, settings: VectorSettings, encoder: Any) -> None:
    """Raise InputError if the vector cannot be expressed as the pooling of the last layer of a shorter encoder."""
    if settings.pooling not in POOLINGS:
        expected = " or ".join(POOLINGS)
        raise InputError(f"{directory}: its vector is {settings.pooling}, which cannot be exported: give {expected}")
    layer_count = encoder.config.num_hidden_layers
    if not 1 <= settings.layer <= layer_count:
        raise InputError(
            f"{directory}: its vector is of layer {settings.layer}, which cannot be exported: give 1 to {layer_count}"
        )
    if settings.layer < layer_count and any_encoder.layers_of(encoder) is None:
        raise InputError(
            f"{directory}: layers of a {encoder.config.model_type} cannot be removed: give one whose vector is of "
            "the last layer"
        )


def read_settings(directory: Path) -> VectorSettings:
    """Read how a model computes its sentence vectors, from our config.json or the files of sentence-transformers."""
    layer, pooling = any_encoder.served_space(directory)
    recorded_settings = pretrained.read_config(directory).get("infoxlm")
    prompts: dict[str, str] = {}
    default_prompt = None
    normalise = False
    if recorded_settings:
        normalise = bool(recorded_settings.get("normalise", False))
        prefix = recorded_settings.get("prefix", "")
        if prefix:
            prompts = {DEFAULT_PROMPT: prefix, "document": prefix}
            default_prompt = DEFAULT_PROMPT
    elif (directory / MODULES).is_file():
        modules = user_files.read_json(directory / MODULES, list[dict[str, Any]], "copy the model again")
        normalise = any(str(module.get("type")).endswith(".Normalize") for module in modules)
        prompts, default_prompt = any_encoder.read_prompts(directory)
    return VectorSettings(layer, pooling, normalise, prompts, default_prompt)


def embed(run: Run, tokenizer: Tokenizer, texts: Sequence[str]) -> Tensor:
    """Compute the vectors (N, d) of texts, in batches of similar length.

    Args:
        run: computes the vectors of a batch.
        tokenizer: the tokenizer of an export, from `load_tokenizer`.
        texts: N texts, with their prefix.
    """
    rows_by_length = sorted(range(len(texts)), key=lambda row: len(texts[row]))
    vectors: list[Tensor] = [torch.empty(0)] * len(texts)
    for start in range(0, len(texts), BATCH):
        rows = rows_by_length[start : start + BATCH]
        encodings = tokenizer.encode_batch([texts[row] for row in rows])
        ids = torch.tensor([encoding.ids for encoding in encodings])
        mask = torch.tensor([encoding.attention_mask for encoding in encodings])
        for row, vector in zip(rows, run(ids, mask), strict=True):
            vectors[row] = vector
    return torch.stack(vectors)


def load_tokenizer(directory: Path) -> Tokenizer:
    """Load the tokenizer of an export with the library `tokenizers` alone, with padding and truncation."""
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    settings = user_files.read_json(directory / "tokenizer_config.json", dict[str, Any], "export the model again")
    tokenizer.enable_truncation(settings["model_max_length"])
    pad_token = settings["pad_token"]
    tokenizer.enable_padding(pad_id=tokenizer.token_to_id(pad_token), pad_token=pad_token)
    return tokenizer

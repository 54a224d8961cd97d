"""Interpolate between the weights of an encoder and those of the model that its training started from.

A weight between 0 and 1 keeps part of what the training taught, and part of what the start knew (LM-Cocktail, Xiao et
al. 2023).
"""

import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from infoxlm_core import manifests, outside
from infoxlm_core.errors import InputError
from infoxlm_core.model.huggingface import pretrained, tokenizers
from infoxlm_core.model.huggingface.pretrained import PROJECTION, WEIGHTS

_REMEDY = "give the encoder, and the model that its training started from"


def interpolate(start: Path, encoder: Path, weight: float, output: Path) -> None:
    """Write the model `start + weight * (encoder - start)` as a copy of the encoder's directory with other weights.

    A projection that only the encoder has is copied. The manifest is not copied.

    Args:
        start: directory of the model at weight 0.
        encoder: directory of the model at weight 1.
        weight: from 0 to 1.
        output: directory to create.

    Raises:
        InputError: the models differ in type, tokenizer, or in names or shapes of their weights.
    """
    _check_equal_kind(start, encoder)
    weights = _interpolate_weights(start, encoder, weight)

    def ignore(folder: str, names: list[str]) -> list[str]:
        """Return the files that are not copied: the manifest, and the weights in one file or several."""
        if Path(folder) != encoder:
            return []
        ignored_names = (WEIGHTS, PROJECTION, manifests.NAME)
        return [name for name in names if name in ignored_names or name.startswith(("model-", "model.safetensors."))]

    shutil.copytree(encoder, output, ignore=ignore)
    save_file(weights, output / WEIGHTS, metadata={"format": "pt"})
    if (encoder / PROJECTION).is_file():
        projection = pretrained.read_projection(encoder / PROJECTION)
        if (start / PROJECTION).is_file():
            start_projection = pretrained.read_projection(start / PROJECTION)
            _check_shape("the projection", start_projection, projection, start)
            projection = torch.lerp(start_projection.float(), projection.float(), weight)
        save_file({"projection": projection.contiguous()}, output / PROJECTION)


def _check_equal_kind(start: Path, encoder: Path) -> None:
    """Raise InputError if the models have different types or tokenizers."""
    start_type = pretrained.read_config(start)["model_type"]
    encoder_type = pretrained.read_config(encoder)["model_type"]
    if start_type != encoder_type:
        raise InputError(f"{start} is a model of type {start_type!r}, {encoder} of type {encoder_type!r}: {_REMEDY}")
    for name in (tokenizers.MODEL, tokenizers.FAST):
        if not (start / name).is_file() or not (encoder / name).is_file():
            continue
        if manifests.file_sha256(start / name) != manifests.file_sha256(encoder / name):
            raise InputError(f"{start} and {encoder} have different tokenizers ({name}): {_REMEDY}")
        return  # each of these files defines the whole tokenizer, so comparing one is enough


def _interpolate_weights(start: Path, encoder: Path, weight: float) -> dict[str, Tensor]:
    """Return the weights of the new model under the encoder's names, in fp32."""
    start_weights = pretrained.read_weights(start)
    weights: dict[str, Tensor] = {}
    for name, canonical_name, encoder_weight in _read_named_weights(encoder):
        start_weight = start_weights.get(canonical_name)
        if start_weight is None:
            raise InputError(f"{start} has no {canonical_name}, which {encoder} has: {_REMEDY}")
        _check_shape(canonical_name, start_weight, encoder_weight, start)
        if encoder_weight.is_floating_point():
            weights[name] = torch.lerp(start_weight.float(), encoder_weight.float(), weight).contiguous()
        else:  # a buffer such as position_ids
            weights[name] = encoder_weight
    return weights


def _read_named_weights(directory: Path) -> Iterator[tuple[str, str, Tensor]]:
    """Yield the name of each weight in the file, its name in `XLMRobertaFor…`, and its value."""
    for path in pretrained.find_weight_files(directory):
        tensors = pretrained.read_tensors(outside.check_readable(path))
        for name, canonical_name in pretrained.canonical_names(tensors).items():
            yield name, canonical_name, tensors[name]


def _check_shape(name: str, start_weight: Tensor, encoder_weight: Tensor, start: Path) -> None:
    if start_weight.shape != encoder_weight.shape:
        raise InputError(
            f"{start}: {name} is {tuple(start_weight.shape)}, not {tuple(encoder_weight.shape)} as in the encoder: "
            f"{_REMEDY}"
        )

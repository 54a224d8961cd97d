"""Interpolates between the weights of an encoder and of the model that its training started from.

The result keeps part of the abilities of the start and part of what the training added (LM-Cocktail, Xiao et al. 2023).
"""

import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from infoxlm_core import manifests
from infoxlm_core.errors import InputError
from infoxlm_core.model.huggingface import pretrained, tokenizers
from infoxlm_core.model.huggingface.pretrained import PROJECTION, WEIGHTS

_REMEDY = "give the encoder, and the model that its training started from"


def interpolate(start: Path, encoder: Path, weight: float, output: Path) -> None:
    """Write the model `start + weight * (encoder - start)` with all other files of the encoder except its manifest.

    A contrast projection that the start does not have is copied from the encoder.

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
    weight_files = ("model.safetensors*", "model-*.safetensors")  # one file, or several with their index
    select_replaced = shutil.ignore_patterns(*weight_files, PROJECTION, manifests.NAME)

    def ignore(folder: str, names: list[str]) -> set[str]:
        # Subfolders hold other modules of sentence-transformers, such as 2_Dense, with weights of their own.
        return select_replaced(folder, names) if Path(folder) == encoder else set()

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
        return  # each of these files defines the complete tokenizer


def _interpolate_weights(start: Path, encoder: Path, weight: float) -> dict[str, Tensor]:
    """Return the weights of the new model in fp32, under the names that they have in the encoder's files."""
    start_weights = pretrained.read_weights(start)
    weights: dict[str, Tensor] = {}
    for path in pretrained.find_weight_files(encoder):
        encoder_weights = pretrained.read_tensors(path)
        for name, canonical_name in pretrained.find_canonical_names(encoder_weights).items():
            start_weight = start_weights.get(canonical_name)
            if start_weight is None:
                raise InputError(f"{start} has no {canonical_name}, which {encoder} has: {_REMEDY}")
            encoder_weight = encoder_weights[name]
            _check_shape(canonical_name, start_weight, encoder_weight, start)
            if encoder_weight.is_floating_point():
                weights[name] = torch.lerp(start_weight.float(), encoder_weight.float(), weight).contiguous()
            else:  # a buffer such as position_ids
                weights[name] = encoder_weight
    return weights


def _check_shape(name: str, start_weight: Tensor, encoder_weight: Tensor, start: Path) -> None:
    if start_weight.shape != encoder_weight.shape:
        raise InputError(
            f"{start}: {name} is {tuple(start_weight.shape)}, not {tuple(encoder_weight.shape)} as in the encoder: "
            f"{_REMEDY}"
        )

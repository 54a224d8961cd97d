"""Interpolates between the weights of an encoder and of its start model, the model that the training started from.

The result combines abilities of the start model with abilities from the training (LM-Cocktail, Xiao et al. 2023).
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from infoxlm_core import manifests, user_files
from infoxlm_core.errors import InputError
from infoxlm_core.model.huggingface import pretrained, tokenizers
from infoxlm_core.model.huggingface.pretrained import PROJECTION, WEIGHTS

_REMEDY = "give the encoder, and the model that its training started from"
_NOT_COPIED = (PROJECTION, manifests.NAME, "README.md", "onnx", "openvino")
"""Names of an encoder's files and directories that do not fit the interpolated model. The model card describes the
encoder's own results, and the exports in `onnx` and `openvino` contain its own weights."""


def interpolate(start: Path, encoder: Path, weight: float, output: Path) -> None:
    """Write the model `start + weight * (encoder - start)`, with the encoder's other files except `_NOT_COPIED`.

    If the start model has no contrast projection, the encoder's projection is copied.

    Args:
        start: directory of the start model, the result for weight 0.
        encoder: directory of the encoder, the result for weight 1.
        weight: the encoder's share, from 0 to 1.
        output: directory to create.

    Raises:
        InputError: the models differ in type, tokenizer, weight names or weight shapes.
    """
    _check_same_type_and_tokenizer(start, encoder)
    weights = _interpolate_weights(start, encoder, weight)
    _copy_other_files(encoder, output)
    _set_dtype(output / "config.json")
    save_file(weights, output / WEIGHTS, metadata={"format": "pt"})
    if (encoder / PROJECTION).is_file():
        projection = _interpolate_projections(start, encoder, weight)
        save_file({"projection": projection}, output / PROJECTION)


def _copy_other_files(encoder: Path, output: Path) -> None:
    """Copy all files and directories of an encoder except its weights and `_NOT_COPIED`."""
    output.mkdir(parents=True)
    weight_files = {*encoder.glob("model.safetensors*"), *encoder.glob("model-*.safetensors")}  # including their index
    for path in encoder.iterdir():
        if path in weight_files or path.name in _NOT_COPIED:
            continue
        if path.is_dir():  # a sentence-transformers module with its own weights, such as 2_Dense
            shutil.copytree(path, output / path.name)
        else:
            shutil.copy2(path, output / path.name)


def _set_dtype(config_file: Path) -> None:
    """Set the data type in a config.json to fp32. Transformers would convert the weights to a different type."""
    config = user_files.read_json(config_file, dict[str, Any], "copy the model again")
    former_dtype = config.pop("torch_dtype", "float32")  # former name of `dtype`
    if config.get("dtype", former_dtype) != "float32":  # otherwise, keep the file as it is
        config["dtype"] = "float32"
        config_file.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _check_same_type_and_tokenizer(start: Path, encoder: Path) -> None:
    """Raise InputError if two models have different types or tokenizers."""
    start_type = pretrained.read_config(start)["model_type"]
    encoder_type = pretrained.read_config(encoder)["model_type"]
    if start_type != encoder_type:
        raise InputError(f"{start} is a model of type {start_type!r}, {encoder} of type {encoder_type!r}: {_REMEDY}")
    # Each of these files defines a complete tokenizer, so it is enough to compare one file that both models have.
    for name in (tokenizers.MODEL, tokenizers.FAST):
        if (start / name).is_file() and (encoder / name).is_file():
            if manifests.file_sha256(start / name) != manifests.file_sha256(encoder / name):
                raise InputError(f"{start} and {encoder} have different tokenizers ({name}): {_REMEDY}")
            return


def _interpolate_weights(start: Path, encoder: Path, weight: float) -> dict[str, Tensor]:
    """Return the fp32 weights `start + weight * (encoder - start)` by their names in the encoder's files."""
    start_weights = pretrained.read_weights(start)  # by canonical name
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


def _interpolate_projections(start: Path, encoder: Path, weight: float) -> Tensor:
    """Interpolate the contrast projections. If the start model has none, return the encoder's projection."""
    projection = pretrained.read_projection(encoder / PROJECTION)
    if not (start / PROJECTION).is_file():
        return projection.contiguous()
    start_projection = pretrained.read_projection(start / PROJECTION)
    _check_shape("the projection", start_projection, projection, start)
    return torch.lerp(start_projection.float(), projection.float(), weight).contiguous()


def _check_shape(name: str, start_weight: Tensor, encoder_weight: Tensor, start: Path) -> None:
    """Raise InputError if the two models' shapes of a weight differ."""
    if start_weight.shape != encoder_weight.shape:
        raise InputError(
            f"{start}: {name} is {tuple(start_weight.shape)}, not {tuple(encoder_weight.shape)} as in the encoder: "
            f"{_REMEDY}"
        )

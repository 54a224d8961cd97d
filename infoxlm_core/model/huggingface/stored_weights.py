"""Compares a model with the headers of its weight files before allocating memory for the model.

A config.json can describe a model of any size. Kubernetes nodes overcommit memory: they grant any amount, and kill the
process when it uses too much. Therefore, each model is first built on torch's meta device, without memory, to compare
its shapes with those of the stored weights.
"""

import copy
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PretrainedConfig
from transformers.initialization import meta_device_safe_creation_ops

from infoxlm_core import user_files
from infoxlm_core.errors import InputError, one_line

NOT_FINITE = "contains NaN or infinity: its training failed, so use another model"
REMEDY = "give the config.json that belongs to these weights"
SPARE_VALUES = 1 << 24
"""Number of values (in heads, poolers, buffers) that even a small model's weight files may lack."""
_MAX_MODULES = 1000  # far above any published encoder
_MAX_LABELS = 1 << 20
_MODULE_COUNT_SUFFIXES = ("layers", "groups", "group_num", "blocks", "experts")  # of fields in config.json


class StoredWeight(NamedTuple):
    """The header of a tensor in a safetensors file."""

    path: Path
    dtype: str  # as spelled by safetensors: F32, BF16, I64
    shape: tuple[int, ...]


def read_headers(directory: Path) -> dict[str, StoredWeight]:
    """Return the headers of all weights in a directory's safetensors files, by weight name.

    Raises:
        InputError: a file is damaged, or its size differs from its header.
    """
    weights: dict[str, StoredWeight] = {}
    for path in sorted(directory.glob("*.safetensors")):
        try:
            with safe_open(user_files.check_readable(path), "pt") as file:
                for name in file.keys():  # noqa: SIM118 - the file is not a mapping
                    tensor_slice = file.get_slice(name)
                    shape = tuple(tensor_slice.get_shape())
                    weights[name] = StoredWeight(path, tensor_slice.get_dtype(), shape)
        except (SafetensorError, OSError) as error:
            raise InputError(f"{path} is damaged ({one_line(error)}): copy it again") from None
    return weights


def check_dtypes(directory: Path) -> None:
    """Raise InputError for quantized weights, because they cannot be used without their scales."""
    for name, weight in read_headers(directory).items():
        is_index = name.endswith("_ids")  # old exports store position_ids
        if weight.dtype.startswith(("I", "U", "F8")) and not is_index:
            raise InputError(
                f"{weight.path}: {name} is stored as {weight.dtype}: give the model as it was before quantization"
            )


def check_counts(config: Mapping[str, Any], path: Path) -> None:
    """Raise InputError if a config.json claims an impossible number of layers, other modules, or labels.

    Transformers creates a Python object for every module and label, even on the meta device.
    """
    for name, value in config.items():
        if isinstance(value, Mapping):  # the config of a submodel
            check_counts(value, path)
        elif isinstance(value, int) and name == "num_labels":
            _check_count(name, value, _MAX_LABELS, path)
        elif isinstance(value, int) and name.endswith(_MODULE_COUNT_SUFFIXES):
            _check_count(name, value, _MAX_MODULES, path)


def _check_count(name: str, count: int, limit: int, path: Path) -> None:
    """Raise InputError if a count in a config.json exceeds its limit."""
    if count > limit:
        raise InputError(f"{path}: {name} is {count}, more than {limit}: {REMEDY}")


def compare_shapes(
    expected_shapes: Mapping[str, tuple[int, ...]], stored_shapes: Mapping[str, tuple[int, ...]], directory: Path
) -> None:
    """Raise InputError if a weight that config.json describes is missing, or is stored with a different shape."""
    for name, expected_shape in expected_shapes.items():
        if name not in stored_shapes:
            raise InputError(f"{directory} has no weight {name}: give a complete model")
        if stored_shapes[name] != expected_shape:
            raise InputError(
                f"{directory}: {name} is {stored_shapes[name]}, but config.json describes {expected_shape}: {REMEDY}"
            )


def check_shapes(model: nn.Module, directory: Path, prefix: str = "", new_head: bool = False) -> None:
    """Compare a model on the meta device with the weights in a directory.

    Args:
        model: model that config.json describes.
        directory: Hugging Face directory with the weights.
        prefix: prefix of the encoder's weight names in a class with a head, such as `roberta.`. The names in the files
            may have this prefix or not, whatever the class of the model.
        new_head: whether a new head replaces the stored head, so that only the encoder must match.

    Raises:
        InputError: a shape differs from config.json, or the files lack too many of the values that it describes.
    """
    headers = read_headers(directory)
    # Buffers count as missing: even if an old export stores them, only config.json determines their size.
    missing_values = sum(buffer.numel() for buffer in model.buffers())
    for name, parameter in model.named_parameters():
        header = headers.get(name) or headers.get(name.removeprefix(prefix)) or headers.get(f"{prefix}{name}")
        is_in_new_head = new_head and not name.startswith(prefix)
        if header is None or is_in_new_head:
            missing_values += parameter.numel()
        elif header.shape != tuple(parameter.shape):
            raise InputError(
                f"{header.path}: {name} is {header.shape}, but config.json describes {tuple(parameter.shape)}: {REMEDY}"
            )
    # The files may lack a head or a pooler. Limit what they may lack, so that memory stays in proportion to the files.
    stored_values = sum(math.prod(header.shape) for header in headers.values())
    if missing_values > stored_values + SPARE_VALUES:
        raise InputError(
            f"{directory / 'config.json'} describes {missing_values:,} values that no weight file holds, and the files "
            f"hold {stored_values:,} values: {REMEDY}"
        )


def check_finite(model: nn.Module, directory: Path) -> None:
    """Raise InputError if a model from a directory has NaN or infinite weights."""
    for name, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            raise InputError(f"{directory}: {name} {NOT_FINITE}")


def load_model(auto_class: Any, directory: Path, config: PretrainedConfig, new_head: bool = False) -> Any:
    """Load a Hugging Face model in fp32, after comparing its config with its weight files.

    Args:
        auto_class: class from Transformers, such as `AutoModel`.
        directory: Hugging Face directory of the model.
        config: config of the model, possibly with changed labels or dropout.
        new_head: whether to add a random head if the stored head is missing or differs in shape.

    Raises:
        InputError: the model cannot be loaded, lacks weights, has shapes that differ from config.json, or has NaN or
            infinite weights.
    """
    check_dtypes(directory)
    try:
        with torch.device("meta"), meta_device_safe_creation_ops():
            # A copy, because from_config changes the config.
            empty_model = auto_class.from_config(copy.deepcopy(config), dtype=torch.float32)
        encoder_prefix = f"{empty_model.base_model_prefix}."
        check_shapes(empty_model, directory, encoder_prefix, new_head)
        with _silence_transformers():
            model, report = auto_class.from_pretrained(
                directory,
                config=config,
                use_safetensors=True,
                output_loading_info=True,
                local_files_only=True,
                trust_remote_code=False,
                dtype=torch.float32,
                ignore_mismatched_sizes=new_head,
            )
    except InputError:
        raise
    except Exception as error:  # a damaged file can raise almost any exception
        raise InputError(
            f"{directory} cannot be loaded as {auto_class.__name__} ({one_line(error)}): give another model"
        ) from error
    # Transformers initializes missing weights with random numbers. Accept this only for a new head and for the pooler,
    # which many checkpoints lack and nothing uses.
    required_prefix = encoder_prefix if new_head else ""
    missing_names = [
        name for name in sorted(report["missing_keys"]) if name.startswith(required_prefix) and "pooler" not in name
    ]
    if missing_names:
        raise InputError(
            f"{directory} lacks {len(missing_names)} weights ({missing_names[0]}, …): give a complete model"
        )
    check_finite(model, directory)
    return model


@contextmanager
def _silence_transformers() -> Iterator[None]:
    """Hide Transformers' progress bars and its table of missing weights, because our errors replace the table."""
    verbosity = transformers.logging.get_verbosity()
    had_progress_bars = transformers.logging.is_progress_bar_enabled()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(verbosity)
        if had_progress_bars:
            transformers.logging.enable_progress_bar()

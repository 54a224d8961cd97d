"""Linear layers in FP8 by torchao: all three matrix products, with one scale per row.

Weights stay fp32 parameters with the same names. The bf16 factors of a product are scaled and rounded to e4m3, and the
product is bf16. Small linear layers stay in bf16, since scaling would cost more than FP8 saves.
"""

import dataclasses

import torch
from torch import nn

from infoxlm_core.errors import ConfigError

MIN_FEATURES = 768
"""Smallest number of inputs and outputs at which a linear layer is faster in FP8, by torchao's measurements on H100."""
_FEATURES_MULTIPLE = 16  # the kernel requires that inputs and outputs are multiples of it
_FIELD = "pretraining.model.precision is fp8"


def check(device: torch.device, compiler: str) -> None:
    """Raise ConfigError if layers cannot compute in FP8, or would be slower than in bf16."""
    requirement = f"{_FIELD}, which takes a GPU of compute capability 8.9 or more"
    if device.type != "cuda":
        raise ConfigError(f"{requirement} (this one computes on the CPU): set it to auto")
    if torch.cuda.get_device_capability(device) < (8, 9):
        raise ConfigError(f"{requirement} ({torch.cuda.get_device_name(device)}): set it to auto")
    if not compiler:
        raise ConfigError(f"{_FIELD}, which is slower than bf16 where layers cannot be compiled: set it to auto")


def convert(layers: nn.Module, emulate: bool = False) -> None:
    """Convert the large linear layers of a module to FP8.

    Args:
        layers: the module, which is changed in place.
        emulate: compute in bf16 with the roundings of FP8, which works on any device.

    Raises:
        ConfigError: torchao is missing, or no linear layer is large enough.
    """
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError:
        raise ConfigError(f"{_FIELD}, and torchao is not installed: pip install torchao, or set it to auto") from None
    converted_names = {
        name for name, module in layers.named_modules() if isinstance(module, nn.Linear) and _is_faster_in_fp8(module)
    }
    if not converted_names:
        raise ConfigError(f"{_FIELD}, and no linear map has {MIN_FEATURES} inputs and outputs: set it to auto")
    recipe = Float8LinearConfig.from_recipe_name("rowwise")
    # The top layer has one row per target, and their number is not a multiple of 16, so pad it.
    recipe = dataclasses.replace(recipe, emulate=emulate, pad_inner_dim=True)
    convert_to_float8_training(layers, module_filter_fn=lambda _, name: name in converted_names, config=recipe)


def _is_faster_in_fp8(linear: nn.Linear) -> bool:
    features = (linear.in_features, linear.out_features)
    return min(features) >= MIN_FEATURES and all(count % _FEATURES_MULTIPLE == 0 for count in features)

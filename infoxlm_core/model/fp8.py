"""Linear layers in FP8 by torchao: all three matrix products, with one scale per row.

Weights stay fp32 parameters with the same names. The bf16 factors of a product are scaled and rounded to e4m3, and the
product is bf16. Small linear layers stay in bf16, since scaling would cost more than FP8 saves.
"""

import dataclasses

import torch
from torch import nn

from infoxlm_core.errors import ConfigError

SMALLEST = 768
"""Smallest number of inputs and outputs at which a linear layer is faster in FP8, by torchao's measurements on H100."""
_MULTIPLE = 16  # of inputs and outputs, required by the kernel
_FIELD = "pretraining.model.precision is fp8"


def check(device: torch.device, compiler: str) -> None:
    """Raise ConfigError if layers cannot compute in FP8, or would be slower than in bf16."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9):
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "this one computes on the CPU"
        raise ConfigError(f"{_FIELD}, which takes a GPU of compute capability 8.9 or more ({name}): set it to auto")
    if not compiler:
        raise ConfigError(f"{_FIELD}, which is slower than bf16 where layers cannot be compiled: set it to auto")


def convert(layers: nn.Module, emulate: bool = False) -> None:
    """Convert the large linear maps of layers to FP8; `emulate`: round alike, on any device.

    Raises ConfigError if torchao is missing or no linear map is large enough.
    """
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError:
        raise ConfigError(f"{_FIELD}, and torchao is not installed: pip install torchao, or set it to auto") from None
    chosen = {name for name, part in layers.named_modules() if isinstance(part, nn.Linear) and _is_large(part)}
    if not chosen:
        raise ConfigError(f"{_FIELD}, and no linear map has {SMALLEST} inputs and outputs: set it to auto")
    # The last layer has one row per target, so that its row count is not a multiple of 16.
    recipe = Float8LinearConfig.from_recipe_name("rowwise")
    recipe = dataclasses.replace(recipe, emulate=emulate, pad_inner_dim=True)
    convert_to_float8_training(layers, module_filter_fn=lambda _, name: name in chosen, config=recipe)


def _is_large(linear: nn.Linear) -> bool:
    sizes = linear.in_features, linear.out_features
    return min(sizes) >= SMALLEST and not any(size % _MULTIPLE for size in sizes)

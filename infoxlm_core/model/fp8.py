"""The linear maps of layers in FP8, by torchao: all three products of each, rows scaled one by one.

Weights stay the fp32 parameters that they were, by the same names; what autocast has in bf16 is scaled, rounded to e4m3
and multiplied, and comes out in bf16. What is small stays in bf16, as scaling would cost more than FP8 saves.
"""

import dataclasses

import torch
from torch import nn

from infoxlm_core.errors import ConfigError

SMALLEST = 768
"""Inputs and outputs of a linear map that gains from FP8 (torchao's measurements on an H100)."""
_MULTIPLE = 16  # of inputs and outputs, for the products' kernel
_FIELD = "pretraining.model.precision is fp8"


def check(device: torch.device, compiler: str) -> None:
    """Raise ConfigError where layers cannot compute in FP8, or only slower than without."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9):
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "this one computes on the CPU"
        raise ConfigError(f"{_FIELD}, which takes a GPU of compute capability 8.9 or more ({name}): set it to auto")
    if not compiler:
        raise ConfigError(f"{_FIELD}, which is slower than bf16 where layers cannot be compiled: set it to auto")


def convert(layers: nn.Module, emulate: bool = False) -> None:
    """Let the linear maps of layers multiply in FP8; `emulate`: with the same roundings, on any device.

    Raises ConfigError if torchao is missing or no linear map is large enough.
    """
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError:
        raise ConfigError(f"{_FIELD}, and torchao is not installed: pip install torchao, or set it to auto") from None
    chosen = {name for name, part in layers.named_modules() if isinstance(part, nn.Linear) and _is_large(part)}
    if not chosen:
        raise ConfigError(f"{_FIELD}, and no linear map has {SMALLEST} inputs and outputs: set it to auto")
    # the rows of the last layer are as many as there are targets: no multiple of anything
    recipe = Float8LinearConfig.from_recipe_name("rowwise")
    recipe = dataclasses.replace(recipe, emulate=emulate, pad_inner_dim=True)
    convert_to_float8_training(layers, module_filter_fn=lambda _, name: name in chosen, config=recipe)


def _is_large(linear: nn.Linear) -> bool:
    sizes = linear.in_features, linear.out_features
    return min(sizes) >= SMALLEST and not any(size % _MULTIPLE for size in sizes)

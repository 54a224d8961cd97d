"""AdamW and its schedule: linear warm-up, linear decay to 0 (InfoXLM, appendix)."""

from collections.abc import Iterable

import torch
from torch import nn

from infoxlm_core.config import OptimizationConfig


def learning_rate(config: OptimizationConfig, updates: int) -> float:
    """Rate of the next update after `updates` completed ones; the first update runs with 0 if there is a warm-up."""
    if updates < config.warmup_steps:
        return config.learning_rate * updates / config.warmup_steps
    return config.learning_rate * max(0, config.steps - updates) / (config.steps - config.warmup_steps)


def make_adamw(parameters: Iterable[nn.Parameter], config: OptimizationConfig) -> torch.optim.AdamW:
    """Decoupled weight decay on every parameter, LayerNorm and bias included as the released code has it."""
    return torch.optim.AdamW(
        parameters,
        lr=config.learning_rate,
        betas=config.betas,
        eps=config.epsilon,
        weight_decay=config.weight_decay,
        fused=True,
    )

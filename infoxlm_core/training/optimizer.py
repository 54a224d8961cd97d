"""AdamW with two schedules: warm-up, then linear decay to 0 (InfoXLM, appendix) or inverse square root (XLM)."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import increment_version

from infoxlm_core.config import OptimizationConfig

XLM_FIRST_RATE = 1e-7  # learning rate at the start of XLM's warm-up


def learning_rate(config: OptimizationConfig, updates: int) -> float:
    """Return the learning rate for the next update, given the number of previous updates."""
    peak = config.learning_rate
    warmup = config.warmup_steps
    if config.schedule == "inverse_sqrt":
        if updates < warmup:
            return XLM_FIRST_RATE + (peak - XLM_FIRST_RATE) * updates / warmup
        return peak * (max(1, warmup) / max(1, updates)) ** 0.5  # without warm-up, update 0 has the peak rate
    if updates < warmup:
        return peak * updates / warmup
    return peak * max(0, config.steps - updates) / (config.steps - warmup)


def make_adamw(parameters: Iterable[nn.Parameter], config: OptimizationConfig) -> torch.optim.AdamW:
    """Create AdamW with decoupled weight decay on every parameter, as in InfoXLM's released code.

    With `no_bias_norm`, vectors (biases and LayerNorm weights) have no weight decay. Moments are created at once, so
    that a checkpoint can be loaded into them.
    """
    parameters = list(parameters)
    groups: list[dict[str, Any]] = [{"params": parameters}]
    if config.decay == "no_bias_norm":
        matrices = [p for p in parameters if p.dim() > 1]
        vectors = [p for p in parameters if p.dim() <= 1]
        groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(
        [group for group in groups if group["params"]],  # a model may have no vectors
        lr=config.learning_rate,
        betas=config.betas,
        eps=config.epsilon,
        weight_decay=config.weight_decay,
        fused=True,
    )
    # The fused step does not increment the weights' version counters. Increment them, because layers renew their bf16
    # copies of the weights only if the counters change.
    optimizer.register_step_post_hook(lambda *_: increment_version(parameters))
    for parameter in parameters:
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return optimizer

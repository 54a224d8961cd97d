"""AdamW and its schedules: warm-up, then linear decay to 0 (InfoXLM, appendix) or the inverse square root (XLM)."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import increment_version

from infoxlm_core.config import OptimizationConfig

FIRST_RATE = 1e-7  # where XLM's warm-up begins


def learning_rate(config: OptimizationConfig, updates: int) -> float:
    """Rate of the next update after `updates` completed ones; a linear warm-up begins with 0, XLM's with 1e-7."""
    peak, warmup = config.learning_rate, config.warmup_steps
    if config.schedule == "inverse_sqrt":
        if updates < warmup:
            return FIRST_RATE + (peak - FIRST_RATE) * updates / warmup
        return peak * (max(1, warmup) / max(1, updates)) ** 0.5
    if updates < warmup:
        return peak * updates / warmup
    return peak * max(0, config.steps - updates) / (config.steps - warmup)


def make_adamw(parameters: Iterable[nn.Parameter], config: OptimizationConfig) -> torch.optim.AdamW:
    """Decoupled weight decay on every parameter, LayerNorm and bias included as the released code has it.

    `no_bias_norm` spares all vectors, which is what biases and LayerNorm weights are. The moments are there from the
    start, as the first step would make them, so that a checkpoint can be restored into them.
    """
    groups: list[dict[str, Any]] = [{"params": list(parameters)}]
    if config.decay == "no_bias_norm":
        matrices = [p for p in groups[0]["params"] if p.dim() > 1]
        vectors = [p for p in groups[0]["params"] if p.dim() <= 1]
        groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    adam = torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=config.betas,
        eps=config.epsilon,
        weight_decay=config.weight_decay,
        fused=True,
    )
    parameters = [parameter for group in adam.param_groups for parameter in group["params"]]
    # the fused step leaves the versions of weights as they were, by which their copies in bf16 know that they are old
    adam.register_step_post_hook(lambda *_: increment_version(parameters))
    for parameter in parameters:
        adam.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return adam

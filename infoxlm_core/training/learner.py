"""The interface between training loop and models, and what all learners share: seeded dropout, precision."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from infoxlm_core.config import ModelConfig
from infoxlm_core.data.sampling import digest_key
from infoxlm_core.model import devices
from infoxlm_core.model.attention import activate_flash_attention
from infoxlm_core.model.encoder import Encoder, choose_compiler

logger = logging.getLogger(__name__)


class MicroBatch(Protocol):
    """The input of one forward pass. Only the learner that creates it uses its other fields."""

    @property
    def counts(self) -> Mapping[str, float]:
        """Targets of each objective, `tokens`, and the necessary `flops` if known."""


@dataclass(frozen=True)
class LossWeights:
    """The enabled objectives and their weights: L = sum of weight * summed loss / divisor."""

    by_name: Mapping[str, float]
    divide: Literal["mean", "count"] = "mean"
    """Divisor of a loss. mean: the targets of its objective; count: the targets of all objectives."""

    def divisors(self, counts: Mapping[str, float]) -> dict[str, float]:
        """Return the divisor of each objective's summed loss, from the targets in the whole global batch."""
        if self.divide == "count":
            return dict.fromkeys(self.by_name, max(1.0, sum(counts[name] for name in self.by_name)))
        return {name: max(1.0, counts[name]) for name in self.by_name}


class Learner:
    """A model with its data and losses, as the training loop sees it."""

    module: nn.Module  # the network whose parameters are trained
    weights: LossWeights

    def batches(self, step: int, skipped: int = 0) -> Sequence[MicroBatch]:
        """Return this worker's micro-batches of a step: a pure function, called ahead in another thread.

        Samples are drawn by `step + skipped`, since the guard may skip data; everything else depends on `step`.
        """
        raise NotImplementedError

    def counts(self, batch: Any) -> Mapping[str, float]:
        """Return the targets of each objective in a micro-batch, `tokens`, and `flops` if known."""
        return batch.counts

    def kind_of(self, step: int, skipped: int = 0) -> str:  # noqa: ARG002
        """Return the kind of a step: the guard compares the losses of steps of one kind."""
        return ""

    def losses(self, batch: Any, scales: Mapping[str, float]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss to differentiate, and sums without gradient.

        The loss is the sum over objectives of summed loss times scale. The sums are the summed loss of each objective
        by its name, and other scalars or vectors for `statistics`. They stay on the device.
        """
        raise NotImplementedError

    def statistics(self, sums: Mapping[str, Any], counts: Mapping[str, float]) -> dict[str, float]:  # noqa: ARG002
        """Return further metrics of a step, computed from the sums and counts of all workers."""
        return {}

    def after_step(self, step: int, good: bool = True) -> None:
        """Update the state that is not a parameter, such as a key encoder.

        Args:
            step: steps taken so far; 0 when a run starts, and not called when it resumes.
            good: whether the last step changed the weights.
        """

    def state(self) -> dict[str, Tensor]:
        """Return the live tensors, besides weights and optimizer, that the next step depends on."""
        return {}


def seed_dropout(*key: object) -> None:
    """Seed dropout by a key such as (seed, step, worker, micro-batch), independently of earlier draws."""
    seed = int.from_bytes(digest_key(*key)[:8], "little")
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would record a stack for each kind of device
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)


def half_precision(device: torch.device, precision: str = "auto") -> torch.dtype | None:
    """Return the type of matrix products: bf16 on GPUs, None (fp32) on CPUs, unless `model.precision` names another."""
    return torch.bfloat16 if device.type == "cuda" or precision != "auto" else None


def autocast(device: torch.device, precision: str = "auto") -> torch.autocast:
    """Return the autocast context of `half_precision`, disabled for fp32."""
    dtype = half_precision(device, precision)
    return torch.autocast(device.type, dtype or torch.bfloat16, enabled=dtype is not None)


def prepare_encoder(encoder: Encoder, config: ModelConfig, device: torch.device) -> str:
    """Choose the attention kernels, the compiler and the recomputation of an encoder. Return the compiler, or "".

    Logs a warning if `model.precision` is bf16 on a CPU without instructions for it.
    """
    activate_flash_attention(device)
    encoder.recompute = config.recompute
    if config.compiled:
        encoder.compiler = choose_compiler(device, config.dropout)
    if config.precision == "bf16" and device.type == "cpu" and not devices.cpu_multiplies_bf16():
        logger.warning(
            "model.precision is bf16, for which this CPU has no instructions (AVX512-BF16, AMX): "
            "steps take longer than with auto"
        )
    return encoder.compiler

"""The interface between training loop and models, and code shared by all learners: seeded dropout, precision."""

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
    """The input of one forward pass. The training loop uses only `counts`."""

    @property
    def counts(self) -> Mapping[str, float]:
        """Number of targets of each objective, number of `tokens`, and necessary `flops` if known."""


@dataclass(frozen=True)
class LossWeights:
    """The enabled objectives and their weights: L = sum of weight * summed loss / divisor."""

    by_name: Mapping[str, float]
    divide: Literal["mean", "count"] = "mean"
    """Divisor of a summed loss. mean: targets of the same objective; count: targets of all objectives."""

    def divisors(self, counts: Mapping[str, float]) -> dict[str, float]:
        """Return the divisor of each objective's summed loss, given the target counts of the global batch.

        A divisor is at least 1, because a global batch may have no targets of an objective.
        """
        if self.divide == "count":
            return dict.fromkeys(self.by_name, max(1.0, sum(counts[name] for name in self.by_name)))
        return {name: max(1.0, counts[name]) for name in self.by_name}


class Learner:
    """The base class of learners: a model with its data and losses, as the training loop uses it."""

    module: nn.Module  # network with the trained parameters
    weights: LossWeights

    def batches(self, step: int, skipped: int = 0) -> Sequence[MicroBatch]:
        """Return this worker's micro-batches of a step. This is a pure function, called in advance in another thread.

        The samples are those of step `step + skipped`, because the guard may skip data. Everything else depends on
        `step`.
        """
        raise NotImplementedError

    def counts(self, batch: Any) -> Mapping[str, float]:
        """Count a micro-batch's targets by objective, its `tokens`, and its `flops` if known."""
        return batch.counts

    def kind_of(self, step: int, skipped: int = 0) -> str:  # noqa: ARG002
        """Return the kind of a step. The guard compares only steps of the same kind."""
        return ""

    def losses(self, batch: Any, scales: Mapping[str, float]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss to differentiate, and sums without gradient on the device.

        The loss is the sum of the objectives' summed losses times their scales. The sums contain each objective's
        summed loss by name, and further scalars or vectors for `statistics`.
        """
        raise NotImplementedError

    def statistics(self, sums: Mapping[str, Any], counts: Mapping[str, float]) -> dict[str, float]:  # noqa: ARG002
        """Compute further metrics of a step from the sums and counts of all workers."""
        return {}

    def after_step(self, step: int, good: bool = True) -> None:
        """Update state other than parameters, such as a key encoder. Also called with step 0 when a new run starts.

        Args:
            step: number of steps taken so far.
            good: whether the last step changed the weights.
        """

    def state(self) -> dict[str, Tensor]:
        """Return the live tensors, other than weights and optimizer state, on which the next step depends."""
        return {}


def seed_dropout(*key: object) -> None:
    """Seed dropout with a key such as (seed, step, virtual shard, micro-batch), independently of earlier draws."""
    seed = int.from_bytes(digest_key(*key)[:8], "little")
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would record a stack trace per device type
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)


def half_precision(device: torch.device, precision: str = "auto") -> torch.dtype | None:
    """Return the data type of matrix products: bf16, or None for fp32 (on CPUs with precision `auto`)."""
    return torch.bfloat16 if device.type == "cuda" or precision != "auto" else None


def autocast(device: torch.device, precision: str = "auto") -> torch.autocast:
    """Return an autocast context for `half_precision`, disabled for fp32."""
    dtype = half_precision(device, precision)
    return torch.autocast(device.type, dtype or torch.bfloat16, enabled=dtype is not None)


def prepare_encoder(encoder: Encoder, config: ModelConfig, device: torch.device) -> str:
    """Set an encoder's attention kernels, compiler and recomputation. Return the compiler's name, or "".

    Logs a warning if `model.precision` is bf16 on a CPU without bf16 instructions.
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

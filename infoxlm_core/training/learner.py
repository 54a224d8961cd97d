"""What the training loop needs of whatever it trains: eight members, of which most learners need four.

And what learners need so that a step is a pure function: dropout by key, precision by device.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from infoxlm_core.config import ModelConfig
from infoxlm_core.data.sampling import digest_key
from infoxlm_core.model import devices, fp8
from infoxlm_core.model.encoder import Encoder

logger = logging.getLogger(__name__)


class MicroBatch(Protocol):
    """What one forward pass sees; only its learner looks inside."""

    @property
    def counts(self) -> Mapping[str, float]:
        """Targets of each objective, `tokens`, and the `flops` that they must cost if known."""


@dataclass(frozen=True)
class LossWeights:
    """The objectives that are on, and how their summed losses become one: L = sum of weight * sum / divisor."""

    by_name: Mapping[str, float]
    divide: Literal["mean", "count"] = "mean"  # mean: by its own targets · count: by those of all

    def divisors(self, counts: Mapping[str, float]) -> dict[str, float]:
        """What each objective's summed loss is divided by, from the targets in the whole global batch."""
        if self.divide == "count":
            return dict.fromkeys(self.by_name, max(1.0, sum(counts[name] for name in self.by_name)))
        return {name: max(1.0, counts[name]) for name in self.by_name}


class Learner:
    """What is trained: the loop asks it for micro-batches and losses and tells it when a step is done."""

    module: nn.Module  # the network whose parameters are trained
    weights: LossWeights

    def batches(self, step: int, skipped: int = 0) -> Sequence[MicroBatch]:
        """This worker's micro-batches of a step: a pure function, called ahead in another thread. Of the data so many
        steps' worth is left out: samples are drawn by `step + skipped`, all else goes by the step."""
        raise NotImplementedError

    def kind_of(self, step: int, skipped: int = 0) -> str:  # noqa: ARG002
        """Steps whose losses can be compared, for the guard: those of the same kind."""
        return ""

    def losses(self, batch: Any, scales: Mapping[str, float]) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss to differentiate, each objective's sum times its scale; and sums without gradient.

        The sums are each objective's summed loss under its name, and others, numbers or vectors, for `statistics`.
        They stay on the device: the loop reads those of all micro-batches at once.
        """
        raise NotImplementedError

    def statistics(self, sums: Mapping[str, Any], counts: Mapping[str, float]) -> dict[str, float]:  # noqa: ARG002
        """Named values for the curves from what all workers summed and counted."""
        return {}

    def after_step(self, step: int, good: bool = True) -> None:
        """`step` steps are done, 0 when a run begins, never on resume; `good`: the last one has moved the weights."""

    def state(self) -> dict[str, Tensor]:
        """Tensors besides weights and optimizer that the next step depends on: saved from here, restored into them."""
        return {}


def seed_dropout(*key: object) -> None:
    """Draw dropout from a key such as (seed, step, worker, micro-batch), not from what was drawn before."""
    seed = int.from_bytes(digest_key(*key)[:8], "little")
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would write down the stack for each kind of device
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)


def half_precision(device: torch.device, precision: str = "auto") -> torch.dtype | None:
    """What products are made in: bf16 on GPUs; none on CPUs, where bf16 is slower without special instructions, unless
    `model.precision` names another."""
    return torch.bfloat16 if device.type == "cuda" or precision != "auto" else None


def autocast(device: torch.device, precision: str = "auto") -> torch.autocast:
    """Mixed precision where there is a half."""
    kind = half_precision(device, precision)
    return torch.autocast(device.type, kind or torch.bfloat16, enabled=kind is not None)


def set_precision(encoder: Encoder, config: ModelConfig, device: torch.device) -> None:
    """Make an encoder, whose compiler is chosen, ready for `model.precision`; ConfigError if it cannot be had here."""
    if config.precision == "fp8":
        fp8.check(device, encoder.compiler)
        fp8.convert(encoder.layers)
    elif config.precision == "bf16" and device.type == "cpu" and not devices.cpu_multiplies_bf16():
        logger.warning(
            "model.precision is bf16, for which this CPU has no instructions (AVX512-BF16, AMX): "
            "steps take longer than with auto"
        )

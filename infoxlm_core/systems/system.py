"""The interface of a system: its network, its training data and losses, its export."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from infoxlm_core.config import PretrainingConfig
from infoxlm_core.data.shards import Shards
from infoxlm_core.errors import InputError
from infoxlm_core.systems.infoxlm.plan import Plan
from infoxlm_core.training.learner import Learner

Observe = Callable[[int], dict[str, float]]  # returns the evaluations due after a step; see `loop.train`


class System:
    """A way to pre-train an encoder. A new one is a file or folder here, a line of `SYSTEMS`, a name in the config."""

    def build(self, config: PretrainingConfig, shards: Shards) -> nn.Module:
        """Return the network before its first step on this worker's device: random by the seed, or from a start."""
        raise NotImplementedError

    def learner(self, config: PretrainingConfig, model: Any, shards: Shards) -> Learner:
        """Return what the training loop trains: the network with the shards' text."""
        raise NotImplementedError

    def export(self, model: Any, config: PretrainingConfig, shards: Shards, directory: Path) -> None:
        """Write a network as a directory that Hugging Face's own class loads."""
        raise NotImplementedError

    def observer(self, config: PretrainingConfig, learner: Any, shards: Shards) -> Observe | None:  # noqa: ARG002
        """Return what evaluates the network during training, if anything."""
        return None

    def plan(self, config: PretrainingConfig, vocabulary: int, gpus: int = 8, gpu: str = "h200") -> Plan:  # noqa: ARG002
        """Plan a run on so many GPUs of a kind; InputError if the GPU is unknown or the system has no plan."""
        raise InputError(f"pretraining.system {config.system} cannot be planned: only infoxlm (MLM, TLM, XLCO) can")

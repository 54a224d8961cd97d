"""What `pretraining.system` names: a network, what it is trained on, how it travels."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from infoxlm_core.config import PretrainingConfig
from infoxlm_core.data.shards import Shards
from infoxlm_core.errors import InputError
from infoxlm_core.systems.infoxlm.plan import Plan
from infoxlm_core.training.learner import Learner

Observe = Callable[[int], dict[str, float]]  # what is looked at after so many steps; see `loop.train`


class System:
    """A way to pre-train an encoder. A new one is a file or folder here, a line of `SYSTEMS`, and its name in the
    config."""

    def build(self, config: PretrainingConfig, shards: Shards) -> nn.Module:
        """The network before its first step, on this worker's device: random weights by the seed, or a start."""
        raise NotImplementedError

    def learner(self, config: PretrainingConfig, model: Any, shards: Shards) -> Learner:
        """What the training loop trains: the network on the shards' text."""
        raise NotImplementedError

    def export(self, model: Any, config: PretrainingConfig, shards: Shards, directory: Path) -> None:
        """Write a network as a directory that Hugging Face's own class loads."""
        raise NotImplementedError

    def observer(self, config: PretrainingConfig, learner: Any, shards: Shards) -> Observe | None:  # noqa: ARG002
        """What is looked at now and then while it learns."""
        return None

    def plan(self, config: PretrainingConfig, vocabulary: int, gpus: int = 8, gpu: str = "h200") -> Plan:  # noqa: ARG002
        """What a run would take on so many GPUs of a kind; InputError if the GPU is not known, or nobody has written
        down what this system costs."""
        raise InputError(f"pretraining.system {config.system} cannot be planned: only infoxlm (MLM, TLM, XLCO) can")

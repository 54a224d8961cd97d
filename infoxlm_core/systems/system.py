"""The interface of a system: its network, its training data and losses, its export."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from infoxlm_core.config import PretrainingConfig
from infoxlm_core.data.shards import Shards
from infoxlm_core.training.learner import Learner

Observe = Callable[[int], dict[str, float]]  # returns the evaluations due after a step; see `loop.train`


class System:
    """A way to pre-train an encoder.

    A new system is a file or folder beside this one, an entry of `SYSTEMS` in `table`, and a name in the config.
    """

    def build(self, config: PretrainingConfig, shards: Shards) -> nn.Module:
        """Return the network before its first step on this worker's device, random by the seed or from a start."""
        raise NotImplementedError

    def learner(self, config: PretrainingConfig, model: Any, shards: Shards) -> Learner:
        """Return the learner that the training loop calls: the network with its data and losses."""
        raise NotImplementedError

    def count_tokens(self, config: PretrainingConfig, shards: Shards, steps: range) -> int:
        """Return the number of tokens that all workers together compute in these steps."""
        raise NotImplementedError

    def export(self, model: Any, config: PretrainingConfig, shards: Shards, directory: Path) -> None:
        """Write the network to a directory that a class of Hugging Face loads."""
        raise NotImplementedError

    def observer(self, config: PretrainingConfig, learner: Any, shards: Shards) -> Observe | None:  # noqa: ARG002
        """Return the function that evaluates the network during training, if the system has one."""
        return None

    def check_start_files(self, config: PretrainingConfig, directory: Path) -> None:
        """Check the model `model.start` by its config.json. The directory may lack its weights.

        Raises:
            InputError: the model is of another class.
            ConfigError: the model is too small for the config.
        """
        raise NotImplementedError

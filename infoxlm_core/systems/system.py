"""The interface of a system: its network, its training data and losses, its export."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from infoxlm_core.config import PretrainingConfig
from infoxlm_core.data.shards import Shards
from infoxlm_core.training.learner import Learner

Observe = Callable[[int], dict[str, float]]  # returns the evaluations that are due after a step; see `loop.train`


class System:
    """A way to pre-train an encoder.

    To add a system, write a file or folder beside this one, and add it to `SYSTEMS` in `table` and to the config.
    """

    def build(self, config: PretrainingConfig, shards: Shards) -> nn.Module:
        """Return the network on this worker's device: with random weights by the seed, or with those of a start."""
        raise NotImplementedError

    def create_learner(self, config: PretrainingConfig, model: Any, shards: Shards) -> Learner:
        """Return what the training loop trains: the network with its data and losses."""
        raise NotImplementedError

    def count_tokens(self, config: PretrainingConfig, shards: Shards, steps: range) -> int:
        """Return the number of tokens that all workers together process in these steps."""
        raise NotImplementedError

    def export(self, model: Any, config: PretrainingConfig, shards: Shards, directory: Path) -> None:
        """Write the network and its tokenizer to a directory that Hugging Face Transformers loads."""
        raise NotImplementedError

    def create_observer(self, config: PretrainingConfig, learner: Any, shards: Shards) -> Observe | None:  # noqa: ARG002
        """Return the function that evaluates the network during training, if the system has one."""
        return None

    def check_start_files(self, config: PretrainingConfig, directory: Path) -> None:
        """Check the start model by its config.json, so that its weights need not be downloaded first.

        Raises:
            InputError: the model is of another architecture.
            ConfigError: the model is too small for the config.
        """
        raise NotImplementedError

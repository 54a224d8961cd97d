"""The interface of a pre-training system: network, training data, losses and export."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from infoxlm_core import manifests
from infoxlm_core.config import PretrainingConfig
from infoxlm_core.data.shards import Shards
from infoxlm_core.errors import TokenizerMismatch
from infoxlm_core.model.huggingface import tokenizers
from infoxlm_core.training.learner import Learner

Observe = Callable[[int], dict[str, float]]  # runs the evaluations due after a step; see `loop.train`


class System:
    """A way to pre-train an encoder.

    To add a system, implement this class in a new file or directory of this package, then register the class in
    `table.SYSTEMS` and in the config.
    """

    def build(self, config: PretrainingConfig, shards: Shards) -> nn.Module:
        """Return the network on this worker's device, with weights drawn from the seed or loaded from `model.start`."""
        raise NotImplementedError

    def create_learner(self, config: PretrainingConfig, model: Any, shards: Shards) -> Learner:
        """Return the learner, which holds the network, its data and its losses."""
        raise NotImplementedError

    def count_tokens(self, config: PretrainingConfig, shards: Shards, steps: range) -> int:
        """Count the tokens that all workers process in these steps."""
        raise NotImplementedError

    def export(self, model: Any, config: PretrainingConfig, shards: Shards, directory: Path) -> None:
        """Write the network and its tokenizer to a directory that Hugging Face Transformers can load."""
        raise NotImplementedError

    def create_observer(self, config: PretrainingConfig, learner: Any, shards: Shards) -> Observe | None:  # noqa: ARG002
        """Return a function that evaluates the network during training, or None."""
        return None

    def check_start_files(self, config: PretrainingConfig, directory: Path) -> None:
        """Check a start model's config.json, before its weights are downloaded.

        Raises:
            InputError: the model's architecture does not match the system.
            ConfigError: the model is too small for the config.
        """
        raise NotImplementedError


def name_tokenizer_file(shards: Shards) -> str:
    """Return the name of the file that identifies the tokenizer of shards."""
    return str(shards.manifest["facts"].get("tokenizer_file", tokenizers.MODEL))


def check_tokenizer_file(start: Path, shards: Shards) -> None:
    """Raise TokenizerMismatch if a start model's tokenizer file, if any, differs from that of the shards."""
    path = start / name_tokenizer_file(shards)
    if not path.is_file():
        return
    start_digest = f"sha256:{manifests.file_sha256(path)}"
    shards_digest = shards.manifest["facts"]["tokenizer"]
    if start_digest != shards_digest:
        raise TokenizerMismatch(
            f"{start} has tokenizer {start_digest[:15]}…, but {shards.directory} has {shards_digest[:15]}…: "
            f"tokenize with the model's own (tokenization.model: {path})"
        )

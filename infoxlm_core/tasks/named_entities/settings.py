"""Settings of named entities: which files hold the tagged words, and how an encoder is fine-tuned on them."""

from typing import Literal

from infoxlm_core.config.base import Language, Share, Source
from infoxlm_core.config.tasks import Paths, RecipeConfig


class NamedEntitiesConfig(RecipeConfig):
    """Encoder + sentences with tagged words -> a tagger of entities (WikiANN, XTREME's panx)."""

    task: Literal["named_entities"] = "named_entities"
    """The kind of task."""

    data: Source | Paths
    """Files, or folders in the layout of XTREME's panx or of WikiANN: one word and its tag (`O`, `B-PER`, `I-PER`, …)
    per line, divided by a tab, and blank lines between sentences."""

    train_languages: tuple[Language, ...] = ("en",)
    """Languages to train on; every language is tested."""

    head_dropout: Share = 0.1
    """Dropout probability before the output layer; its random numbers depend on how a batch is split."""

"""Settings of named entities: which files hold the tagged words, and how an encoder is fine-tuned on them."""

from typing import Literal

from infoxlm_core.config.base import Language, Share, Source
from infoxlm_core.config.tasks import Paths, RecipeConfig


class NamedEntitiesConfig(RecipeConfig):
    """Fine-tune an encoder to find named entities in sentences with tagged words (WikiANN, XTREME's panx)."""

    task: Literal["named_entities"] = "named_entities"
    """The kind of task."""

    data: Source | Paths
    """Files, or folders in the layout of XTREME's panx or of WikiANN. Each line has a word, a tab and the tag of the
    word (`O`, `B-PER`, `I-PER`, …). Blank lines separate sentences."""

    train_languages: tuple[Language, ...] = ("en",)
    """Languages to train on. All languages are tested."""

    head_dropout: Share = 0.1
    """Dropout probability before the output layer. Above 0, the result depends on how a batch is split."""

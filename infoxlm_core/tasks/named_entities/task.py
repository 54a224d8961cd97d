"""Task: tag the named entities of a sentence (WikiANN, XTREME's panx, any BIO tags)."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from infoxlm_core.config.base import Language, Share, Source
from infoxlm_core.config.tasks import Paths, RecipeConfig
from infoxlm_core.model.task_head import Head
from infoxlm_core.tasks.task import Preset, Task

if TYPE_CHECKING:
    from torch import Tensor


NO_TARGET = -100  # target of all tokens except each word's first token


class NamedEntitiesConfig(RecipeConfig):
    """Fine-tune an encoder to find named entities in sentences with tagged words (WikiANN, XTREME's panx)."""

    task: Literal["named_entities"] = "named_entities"
    """The kind of task."""

    data: Source | Paths
    """Files, or directories in the layout of XTREME's panx or of WikiANN. Each line has a word, a tab and the word's
    tag (`O`, `B-PER`, `I-PER`, …). Blank lines separate sentences."""

    train_languages: tuple[Language, ...] = ("en",)
    """Languages to train on. All languages are tested."""

    head_dropout: Share = 0.1
    """Dropout probability before the output layer. Above 0, the result depends on how a batch is split."""


def loss(logits: "Tensor", targets: "Tensor", lengths: Sequence[int]) -> tuple["Tensor", "Tensor"]:
    """Return the summed cross-entropy at each word's first token, and a mask (T,) of correctly labelled tokens.

    Args:
        logits: logits (T, labels) of the tokens in N packed sentences.
        targets: label ids (N, longest sentence) at each word's first token, and NO_TARGET elsewhere.
        lengths: number of tokens in each sentence.
    """
    import torch
    import torch.nn.functional as F

    from infoxlm_core.model.objectives import full_precision

    unpadded_targets = [sentence[:length] for sentence, length in zip(targets, lengths, strict=True)]
    packed_targets = torch.cat(unpadded_targets)  # (T,)
    total = F.cross_entropy(full_precision(logits), packed_targets, ignore_index=NO_TARGET, reduction="sum")
    return total, logits.argmax(dim=1) == packed_targets


HEAD = Head(
    name="named_entities",
    architecture="TokenClassification",
    is_per_token=True,
    name_rules=((r"^output\.", "classifier."),),
    bert_name_rules=((r"^output\.", "classifier."),),
    loss=loss,
    count_losses=lambda targets: int((targets != NO_TARGET).sum()),
)


class NamedEntities(Task[NamedEntitiesConfig]):
    """Tag the words of a sentence. An entity counts only if its type and all its words are correct."""

    name: ClassVar[str] = "named_entities"
    settings = NamedEntitiesConfig
    metrics: ClassVar[tuple[str, ...]] = ("f1",)
    unit: ClassVar[str] = "sentences"
    order: ClassVar[Sequence[str]] = (
        "en", "af", "ar", "bg", "bn", "de", "el", "es", "et", "eu", "fa", "fi", "fr", "he", "hi", "hu", "id", "it",
        "ja", "jv", "ka", "kk", "ko", "ml", "mr", "ms", "my", "nl", "pt", "ru", "sw", "ta", "te", "th", "tl", "tr",
        "ur", "vi", "yo", "zh",
    )  # fmt: skip
    presets: ClassVar[Mapping[str, Preset]] = {"panx": Preset(), "named-entities": Preset()}
    head = HEAD

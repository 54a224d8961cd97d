"""Task: find the translation pairs in two lists of sentences, of which most have no translation."""

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from infoxlm_core.config.base import Language, PositiveInt, Source, StageConfig, Whole
from infoxlm_core.tasks.task import Preset, Task


class MiningConfig(StageConfig):
    """Measure how well an encoder finds the translation pairs in two lists of sentences (BUCC 2018)."""

    task: Literal["mining"] = "mining"
    """The kind of task."""

    data: Source
    """Directory of sets in the layout of BUCC 2018. Each line of NAME.de and NAME.en has an id, a tab and a sentence.
    Each line of NAME.gold has the ids of two sentences that translate each other. The directory may contain a set for
    each language."""

    pivot: Language = "en"
    """Language that all sets contain."""

    name: str = ""
    """Read only sets whose NAME contains this text, such as training."""

    prefix: str | None = None
    """Text to add before every sentence. null: the prefix that the model was trained with."""

    batch_size: PositiveInt = 64
    """Number of sentences per forward pass. Affects memory and speed, but not the result."""

    max_tokens: Annotated[Whole, Field(gt=2, le=2**20)] = 256
    """Maximum number of tokens per sentence, including special tokens. Longer sentences are truncated."""


class Mining(Task[MiningConfig]):
    """Recognise translation pairs by the ratio margin, with a threshold chosen on one half of the set."""

    name: ClassVar[str] = "mining"
    settings = MiningConfig
    metrics: ClassVar[tuple[str, ...]] = ("f1", "precision", "recall")
    unit: ClassVar[str] = "pairs"
    order: ClassVar[Sequence[str]] = ("de", "fr", "ru", "zh")
    presets: ClassVar[Mapping[str, Preset]] = {"mining": Preset()}

"""Settings of mining: in which files translations are searched."""

from typing import Annotated, Literal

from pydantic import Field

from infoxlm_core.config.base import Language, PositiveInt, Source, StageConfig, Whole


class MiningConfig(StageConfig):
    """Encoder + two lists of sentences -> how well their translation pairs are recognised (BUCC 2018)."""

    task: Literal["mining"] = "mining"
    """The kind of task."""

    data: Source
    """Folder of sets in the layout of BUCC 2018: NAME.de and NAME.en with a number, a tab and a sentence in each line,
    and NAME.gold with the numbers of two sentences that translate each other in each line. Several sets may be in the
    folder, one for each language."""

    pivot: Language = "en"
    """The language that all sets contain."""

    name: str = ""
    """Read only the sets whose NAME contains this text, such as training."""

    prefix: str | None = None
    """Text added before every sentence; null: the prefix that the model was trained with."""

    batch_size: PositiveInt = 64
    """Sentences per forward pass; changes memory and speed, not the result."""

    max_tokens: Annotated[Whole, Field(gt=2, le=2**20)] = 256
    """Largest number of tokens of a sentence, special tokens included; longer sentences are truncated."""

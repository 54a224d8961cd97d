"""Settings of retrieval: which aligned sentences are searched, and with which vectors."""

from typing import Annotated, Any, Literal

from pydantic import Field

from infoxlm_core.config.base import Flag, PositiveInt, Whole
from infoxlm_core.config.tasks import AlignedSetConfig

Vector = Annotated[str, Field(pattern=r"^(served|(mean|mean_no_special|cls|contrast)@([0-9]+|last|contrast|best))$")]

FEWEST_UNSHARED = 50
"""A language with fewer pairs that share no token has no score of them: in the mean over languages, a few pairs would
weigh as much as the hundreds of another language."""


class RetrievalConfig(AlignedSetConfig):
    """Encoder + aligned sentences -> how often the translation is the nearest (Tatoeba, NTREX, FLORES, your own)."""

    task: Literal["retrieval"] = "retrieval"
    """The kind of task."""

    vectors: Annotated[tuple[Vector, ...], Field(min_length=1)] = ("mean@best", "cls@last", "served")
    """POOLING@LAYER, or served: the vector that users get by default. Pooling: mean (of all tokens), mean_no_special,
    cls, contrast (projected, as in pre-training). Layer: a number as in Hugging Face's hidden_states, last, contrast
    (that of pre-training) or best (chosen on this very set by the mean of both directions). The first one gives the
    main scores."""

    prefix: str | None = None
    """Text added before every sentence, such as `query: `; empty: none; null: the prefix that the model was trained
    with."""

    margin: Flag = False
    """Compare by ratio margin over 4 neighbours (Artetxe & Schwenk 2019) instead of cosine."""

    batch_size: PositiveInt = 64
    """Sentences per forward pass; changes memory and speed, not the result."""

    max_tokens: Annotated[Whole, Field(gt=2, le=2**20)] = 512
    """Largest number of tokens of a sentence, special tokens included; longer sentences are truncated."""

    def result_fields(self) -> dict[str, Any]:
        fields = super().result_fields()
        # Earlier versions wrote "" for the prefix of the training, and their trials must be found again.
        if self.prefix is None:
            fields["prefix"] = ""
        elif not self.prefix:
            fields["prefix"] = None
        return fields

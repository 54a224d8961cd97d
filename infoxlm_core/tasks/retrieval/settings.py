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
    """Measure how often an encoder finds the translation of a sentence (Tatoeba, NTREX, FLORES, your own pairs)."""

    task: Literal["retrieval"] = "retrieval"
    """The kind of task."""

    vectors: Annotated[tuple[Vector, ...], Field(min_length=1)] = ("mean@best", "cls@last", "served")
    """Sentence vectors to test, each as POOLING@LAYER or served. The first one gives the main scores. served is the
    vector that users get by default. POOLING is mean (of all tokens), mean_no_special, cls, or contrast (projected, as
    in pre-training). LAYER is a number as in Hugging Face's hidden_states, last, contrast (the layer of pre-training),
    or best (the layer with the best mean of both directions on this test set)."""

    prefix: str | None = None
    """Text that is added before every sentence, such as `query: `. Empty: no text. null: the prefix with which the
    model was trained."""

    margin: Flag = False
    """Whether to compare sentences by the ratio margin over 4 neighbours (Artetxe & Schwenk 2019) instead of the
    cosine."""

    batch_size: PositiveInt = 64
    """Number of sentences per forward pass. It changes memory and speed, but not the result."""

    max_tokens: Annotated[Whole, Field(gt=2, le=2**20)] = 512
    """Largest number of tokens of a sentence, including special tokens. Longer sentences are truncated."""

    def result_fields(self) -> dict[str, Any]:
        fields = super().result_fields()
        # Earlier versions wrote "" for the prefix of the training, and their trials must be found again.
        if self.prefix is None:
            fields["prefix"] = ""
        elif not self.prefix:
            fields["prefix"] = None
        return fields

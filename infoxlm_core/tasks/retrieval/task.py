"""Task: find the translation of each sentence among all sentences of the other language."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from infoxlm_core import languages
from infoxlm_core.config.base import Flag, PositiveInt, Whole
from infoxlm_core.config.tasks import AlignedSetConfig
from infoxlm_core.tasks.scores import Scores, select_finite
from infoxlm_core.tasks.task import Preset, Task

if TYPE_CHECKING:
    from infoxlm_core.config import EvaluationConfig
    from infoxlm_core.tasks.questions import Questions

Vector = Annotated[str, Field(pattern=r"^(served|(mean|mean_no_special|cls|contrast)@([0-9]+|last|contrast|best))$")]

BOTH_DIRECTIONS = "mean"  # name of the metric that is the mean of the accuracies of both directions
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


class Retrieval(Task[RetrievalConfig]):
    """Find the translation of each sentence as its nearest neighbour in the other language, in both directions."""

    name: ClassVar[str] = "retrieval"
    settings = RetrievalConfig
    metrics: ClassVar[tuple[str, ...]] = (BOTH_DIRECTIONS, "to_pivot", "from_pivot")
    unit: ClassVar[str] = "pairs"
    order: ClassVar[Sequence[str]] = languages.GROUPS["36"]
    tables: ClassVar[tuple[str, ...]] = ("tatoeba",)
    presets: ClassVar[Mapping[str, Preset]] = {"tatoeba": Preset("tatoeba"), "pairs": Preset()}

    def measure_held_out(self, questions: "Questions", model: Path, config: "EvaluationConfig") -> Scores:
        from infoxlm_core.tasks.retrieval import held_out

        return held_out.measure(questions, model, config)

    def describe(self, settings: RetrievalConfig, table: str) -> dict[str, str]:
        if table != "tatoeba":
            return {}
        description = ", ".join(settings.vectors)
        if settings.prefix is not None:
            description += f", prefix {settings.prefix!r}"
        return {"vectors": description}

    def name_metrics(self, scores: Scores, settings: Any, prefix: str) -> dict[str, float]:
        """Return the metrics `PREFIX/xx_en`, `PREFIX/en_xx` and `PREFIX/de`, and the layer of the vectors.

        In an evaluation the mean is `PREFIX/served`. `PREFIX/best` is that of the best layer and pooling, and
        `PREFIX/centred` that of the served vectors minus the mean vector of their language.

        In a suite the mean is `PREFIX/mean`, and metrics of all vectors but the first also have the vector's name:
        `PREFIX/cls-last/mean`.
        """
        direction_names = {"to_pivot": f"xx_{settings.pivot}", "from_pivot": f"{settings.pivot}_xx"}
        values: dict[str, Any] = {}
        for language, language_scores in scores.languages.items():
            values[language] = language_scores[BOTH_DIRECTIONS]
        if "vectors" in scores.details:
            values |= _name_suite_metrics(scores.details["vectors"], direction_names)
        else:
            values |= _name_evaluation_metrics(scores, direction_names)
        metrics = self._name_shared_metrics(scores, prefix)
        for name, value in values.items():
            metrics[f"{prefix}/{name}"] = value
        return select_finite(metrics)


def _name_evaluation_metrics(scores: Scores, direction_names: Mapping[str, str]) -> dict[str, Any]:
    """Return the means of an evaluation by metric name. `direction_names` maps a direction to its metric."""
    details = scores.details
    served_means = scores.mean  # over languages, of the vector that users get
    values: dict[str, Any] = {name: served_means[direction] for direction, name in direction_names.items()}
    values["served"] = served_means[BOTH_DIRECTIONS]
    values["no_overlap"] = served_means["no_overlap"]
    values["best"] = details["best"][BOTH_DIRECTIONS]
    values["best_layer"] = details["best"]["layer"]
    values["chance"] = details["chance"]
    if "centred" in details:
        values["centred"] = details["centred"][BOTH_DIRECTIONS]
    return values


def _name_suite_metrics(
    details_by_vector: Mapping[str, Mapping[str, Any]], direction_names: Mapping[str, str]
) -> dict[str, Any]:
    """Return the means of every vector of a suite by metric name. The names of the first vector have no prefix."""
    values: dict[str, Any] = {}
    for vector_index, (vector, details) in enumerate(details_by_vector.items()):
        prefix = "" if vector_index == 0 else f"{vector.replace('@', '-')}/"
        means = details["mean"]  # over languages
        for direction, name in direction_names.items():
            values[f"{prefix}{name}"] = means[direction]
        values[f"{prefix}mean"] = means[BOTH_DIRECTIONS]
        layer_name = "best_layer" if vector.endswith("@best") else "layer"
        values[f"{prefix}{layer_name}"] = details["layer"]
    return values

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

BOTH_DIRECTIONS = "mean"  # name of the metric: the mean accuracy of both directions
FEWEST_UNSHARED = 50
"""Minimum number of pairs without a common token for the score `no_overlap`. With fewer pairs, the score of a language
is too uncertain for the mean over languages."""


class RetrievalConfig(AlignedSetConfig):
    """Measure how often an encoder finds a sentence's translation (Tatoeba, NTREX, FLORES, your own pairs)."""

    task: Literal["retrieval"] = "retrieval"
    """The kind of task."""

    vectors: Annotated[tuple[Vector, ...], Field(min_length=1)] = ("mean@best", "cls@last", "served")
    """Sentence vectors to test, each as POOLING@LAYER or served. The first vector gives the main scores. served is the
    vector that users get by default. POOLING is mean (of all tokens), mean_no_special, cls, or contrast (projected, as
    in pre-training). LAYER is an index into Hugging Face's hidden_states, last, contrast (the layer of the contrastive
    loss), or best (the layer with the best mean of both directions on this test set)."""

    prefix: str | None = None
    """Text to add before every sentence, such as `query: `. Empty: no text. null: the prefix that the model was trained
    with."""

    margin: Flag = False
    """Whether to compare sentences by the ratio margin over 4 neighbours (Artetxe & Schwenk 2019) instead of the
    cosine."""

    batch_size: PositiveInt = 64
    """Number of sentences per forward pass. Affects memory and speed, but not the result."""

    max_tokens: Annotated[Whole, Field(gt=2, le=2**20)] = 512
    """Maximum number of tokens per sentence, including special tokens. Longer sentences are truncated."""

    def result_fields(self) -> dict[str, Any]:
        fields = super().result_fields()
        # Earlier versions wrote "" for the prefix from training. Keep this value, so that their trials are still found.
        if self.prefix is None:
            fields["prefix"] = ""
        elif not self.prefix:
            fields["prefix"] = None
        return fields


class Retrieval(Task[RetrievalConfig]):
    """Retrieve each sentence's translation as its nearest neighbour in the other language, in both directions."""

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
        if settings.margin:
            description += ", compared by ratio margin"
        return {"vectors": description}

    def name_metrics(self, scores: Scores, settings: Any, prefix: str) -> dict[str, float]:
        """Return the accuracy of each language, the means of both directions, and the layer of the vectors.

        Names are `PREFIX/de`, `PREFIX/xx_en` (queries in any language, answers in the pivot) and `PREFIX/en_xx`.

        The stage `evaluate` adds the mean accuracies of three kinds of vectors: `PREFIX/served`, `PREFIX/best` (the
        best layer and pooling), and `PREFIX/centred` (the served vector minus the mean vector of its language).

        A suite adds `PREFIX/mean` for the first configured vector. Names of other vectors' metrics contain the vector,
        such as `PREFIX/cls-last/mean`.
        """
        metric_of_direction = {"to_pivot": f"xx_{settings.pivot}", "from_pivot": f"{settings.pivot}_xx"}
        values: dict[str, Any] = {}
        for language, language_scores in scores.languages.items():
            values[language] = language_scores[BOTH_DIRECTIONS]
        if "vectors" in scores.details:
            values |= _name_suite_metrics(scores.details["vectors"], metric_of_direction)
        else:
            values |= _name_evaluation_metrics(scores, metric_of_direction)
        metrics = self._name_shared_metrics(scores, prefix)
        for name, value in values.items():
            metrics[f"{prefix}/{name}"] = value
        return select_finite(metrics)


def _name_evaluation_metrics(scores: Scores, metric_of_direction: Mapping[str, str]) -> dict[str, Any]:
    """Return an evaluation's metrics by name: the mean accuracy with each kind of vector in `name_metrics`."""
    details = scores.details
    metrics: dict[str, Any] = {metric: scores.mean[direction] for direction, metric in metric_of_direction.items()}
    metrics["served"] = scores.mean[BOTH_DIRECTIONS]
    metrics["no_overlap"] = scores.mean["no_overlap"]  # on pairs without a common token
    metrics["best"] = details["best"][BOTH_DIRECTIONS]
    metrics["best_layer"] = details["best"]["layer"]
    metrics["chance"] = details["chance"]  # the accuracy of random answers
    if "centred" in details:
        metrics["centred"] = details["centred"][BOTH_DIRECTIONS]
    return metrics


def _name_suite_metrics(
    details_by_vector: Mapping[str, Mapping[str, Any]], metric_of_direction: Mapping[str, str]
) -> dict[str, Any]:
    """Return a suite's metrics by name: each vector's mean accuracies over languages, and its layer.

    A suite compares models on test sets. The first configured vector's metrics have no prefix. Metrics of
    other vectors have the vector as prefix.
    """
    metrics: dict[str, Any] = {}
    for vector_index, (vector, details) in enumerate(details_by_vector.items()):
        # MLflow does not accept @ in a metric name.
        prefix = "" if vector_index == 0 else f"{vector.replace('@', '-')}/"
        mean_scores = details["mean"]
        for direction, metric in metric_of_direction.items():
            metrics[f"{prefix}{metric}"] = mean_scores[direction]
        metrics[f"{prefix}mean"] = mean_scores[BOTH_DIRECTIONS]
        layer_metric = "best_layer" if vector.endswith("@best") else "layer"
        metrics[f"{prefix}{layer_metric}"] = details["layer"]
    return metrics

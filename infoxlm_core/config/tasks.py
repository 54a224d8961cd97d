"""The settings that all fine-tuning tasks share, and the configs of `evaluate` and `register`."""

import re
from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from infoxlm_core.config.base import (
    Flag,
    Language,
    Name,
    NonNegativeInt,
    Number,
    PositiveFloat,
    PositiveInt,
    Share,
    Source,
    StageConfig,
    Weight,
    Whole,
)
from infoxlm_core.config.training import Beta, CheckpointsConfig, OptimizationConfig

_LANGUAGE_CODE = "[a-z]{2,3}([-_][A-Za-z0-9]{2,4}){0,2}"
_RETRIEVAL_METRIC = re.compile(rf"retrieval/(served|best|no_overlap|xx_[a-z]{{2,3}}|[a-z]{{2,3}}_xx|{_LANGUAGE_CODE})")
_MEAN_METRIC = re.compile(rf"(classification|guard|translation)/(mean|{_LANGUAGE_CODE})")


def _check_metric(name: str) -> str:
    """Return the name of a metric unchanged. Raise ValueError if no outcome of each question is recorded for it."""
    if not (_RETRIEVAL_METRIC.fullmatch(name) or _MEAN_METRIC.fullmatch(name)):
        raise ValueError(
            f"{name!r:.100} is not a metric that is recorded by question: give retrieval/served (the vectors that "
            "users get), retrieval/best, retrieval/no_overlap, retrieval/xx_en, retrieval/en_xx, retrieval/LANGUAGE, "
            "guard/mean, guard/LANGUAGE, classification/mean or classification/LANGUAGE, or of a translator "
            "translation/mean"
        )
    return name


Metric = Annotated[str, AfterValidator(_check_metric)]
"""Name of an accuracy that is recorded per question: retrieval/served, classification/mean, classification/de."""
Paths = Annotated[tuple[str, ...], Field(min_length=1)]


class SelectionConfig(StageConfig):
    """How the weights that a fine-tuning run exports are selected."""

    rule: Literal["last", "source", "joint", "each"] = "last"
    """Which weights are exported. last: those after the last step · source: those with the best score on the
    development set of the first training language (strictly zero-shot; as XTREME) · joint: those with the best mean
    score on the development sets of all languages (#M=1; as InfoXLM) · each: for every language, those with the best
    score on its own development set (#M=N; as XLM and mBERT)."""

    every: PositiveInt = 5_000
    """Number of optimizer steps between two evaluations on the development sets; the last step is always evaluated."""


class TuningConfig(OptimizationConfig):
    """AdamW with the defaults of fine-tuning: no weight decay, BERT's betas and epsilon."""

    steps: PositiveInt = 10_000
    """Number of optimizer steps, warm-up included; ignored if `epochs` is set."""

    learning_rate: PositiveFloat = 7e-6
    """Peak learning rate, reached after `warmup_steps` steps."""

    warmup_steps: NonNegativeInt = 1_000
    """Optimizer steps of the linear warm-up; ignored if `epochs` is set."""

    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """Decay rates of Adam's first and second moment."""

    epsilon: PositiveFloat = 1e-8
    """Term that Adam adds to its denominator."""

    weight_decay: Weight = 0.0
    """Decoupled weight decay per step, as a multiple of the learning rate. At 0, embeddings of tokens that do not occur
    in the training text stay unchanged."""


class RecipeConfig(StageConfig):
    """The settings that fine-tuning on any task needs."""

    max_tokens: Annotated[Whole, Field(gt=2, le=2**20)] = 256
    """Largest number of tokens of a sequence, special tokens included."""

    batch_size: Annotated[Whole, Field(gt=0, le=2**20)] = 32
    """Sequences per optimizer step, over all workers."""

    micro_batch_size: Annotated[Whole, Field(gt=0, le=2**20)] = 32
    """Sequences per forward pass of a worker. It changes memory and speed, but not the result unless there is
    dropout."""

    dropout: Share = 0.1
    """Dropout probability in the encoder. Above 0, attention on GPUs uses PyTorch's memory-efficient kernel instead of
    FlashAttention, and the result depends on how a batch is split, that is, on `micro_batch_size` and the number of
    workers."""

    epochs: PositiveInt | None = None
    """Number of passes over the training text. If set, `optimization.steps` follows from it, and the warm-up from
    `warmup_share`."""

    warmup_share: Share = 0.1
    """Share of all optimizer steps that are warm-up, if `epochs` is set."""

    optimization: TuningConfig = TuningConfig()
    selection: SelectionConfig = SelectionConfig()
    checkpoints: CheckpointsConfig = CheckpointsConfig(every=1_000)
    log_every: PositiveInt = 10
    """Number of optimizer steps between two points of the logged curves."""

    seed: NonNegativeInt = 1
    """Seed of the head's initial weights, the order of examples and dropout."""


class CrossLingualConfig(RecipeConfig):
    """The settings of tasks whose test sets may mix two languages, or may be machine-translated."""

    added_later: ClassVar[tuple[str, ...]] = ("translated_test",)

    mixed: Flag = False
    """Also test pairs of texts in two languages: premise and hypothesis, or paragraph and question."""

    translated_test: tuple[str, ...] = ()
    """Files or folders of test sets that were machine-translated into the first training language (translate-test).
    They name the language of their originals, and replace the test sets of all other languages than the first training
    language. Only a suite and `evaluate` read them."""

    @model_validator(mode="after")
    def _translations_have_one_language(self) -> Self:
        if self.mixed and self.translated_test:
            raise ValueError("mixed has no effect with translated_test, whose texts have one language: set one of them")
        return self


class AlignedSetConfig(StageConfig):
    """Names a set of aligned sentences: the translations of the sentences of one language."""

    data: Source
    """Folder of aligned files: LASER's `tatoeba.deu-eng.deu` and `.eng`, or NAME.en-de.en and NAME.en-de.de, or one
    file a language, line by line translations of each other, or en-de.tsv; or a prepared corpus, for its held-out
    pairs."""

    pivot: Language = "en"
    """The language that all others are aligned with."""

    languages: Literal["all", "14", "22", "36"] | Annotated[tuple[Language, ...], Field(min_length=1)] = "all"
    """all: every language of the set · 14, 22, 36: those of the paper's Table 2, Table 3, and both · or a list."""


class EvaluationConfig(StageConfig):
    """Evaluates models on test sets and writes scores, tables and figures."""

    added_later: ClassVar[tuple[str, ...]] = ("guard", "merge")

    retrieval_pairs: PositiveInt = 1000
    """Number of held-out pairs per language, drawn once with `seed`."""

    perplexity_sentences: PositiveInt = 500
    """Number of held-out sentences per language, each masked once with `seed`."""

    batch_size: Annotated[Whole, Field(gt=0, le=2**20)] = 64
    """Sentences per forward pass."""

    max_tokens: Annotated[Whole, Field(gt=2, le=2**20)] = 256
    """Largest number of tokens of a sentence, special tokens included; longer sentences are truncated."""

    seed: NonNegativeInt = 1
    """Seed of the drawn pairs, sentences and masks, which are equal for all models that are compared."""

    guard: AlignedSetConfig | None = None
    """A general test set, such as Tatoeba, that shows what a model forgets when it is trained further on special text.
    Every model retrieves its sentences with the vectors that users get: metrics `guard/mean` and `guard/LANGUAGE`."""

    merge: tuple[Annotated[Number, Field(gt=0, le=1)], ...] = ()
    """Weights for merging the trained encoder with its start: 0.25 is a quarter of the way from the start to the
    encoder. The largest weight is taken of which `guard` shows a loss of less than half a point (the lower end of the
    paired interval), else the smallest one. If empty, the encoder stays as it was trained."""

    @model_validator(mode="after")
    def _guard_chooses_weight(self) -> Self:
        if self.merge and self.guard is None:
            raise ValueError("merge needs a guard, which chooses among its weights: set evaluation.guard")
        return self


class RegistrationConfig(StageConfig):
    """Registers a model as a new version in the registry."""

    name: Name = "infoxlm"
    """Name of the registered model."""

    metric: Metric = "retrieval/served"
    """Score on which candidate and champion are compared, question by question; higher is better. retrieval/served is
    that of the vectors that users get: contrast layer and pooling, or the mean of the last layer without contrast."""

    gate: dict[Metric, Annotated[Number, Field(gt=-1, lt=1)]] = Field(default_factory=dict)
    """Smallest gain that each metric needs: the lower end of the gain's confidence interval must lie above it. A
    negative value, such as guard/mean: -0.005, tolerates a loss. `metric` needs a gain above 0 unless it is listed
    here."""

    against: Literal["champion", "start"] = "champion"
    """With which model a candidate is compared before it becomes champion. champion: with the current champion; the
    first version is champion without a comparison. start: first with the model that its training started from, on the
    same questions and with the same limits, even if it is the first version; then with the current champion."""

    @property
    def gates(self) -> dict[str, float]:
        """Return all metrics of the gate, with the smallest gain that each needs."""
        return {self.metric: 0.0, **self.gate}

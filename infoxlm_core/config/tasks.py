"""Settings that all fine-tuning tasks share, and the configs of `evaluate` and `register`."""

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

_LANGUAGE_CODE = "[a-z]{2,3}([-_][A-Za-z0-9]{2,4}){0,2}"  # such as de, zh-Hant or pt_BR
_RETRIEVAL_METRIC = re.compile(rf"retrieval/(served|best|no_overlap|xx_[a-z]{{2,3}}|[a-z]{{2,3}}_xx|{_LANGUAGE_CODE})")
_MEAN_METRIC = re.compile(rf"(classification|guard|translation)/(mean|{_LANGUAGE_CODE})")


def _check_metric(name: str) -> str:
    """Return the metric name. Raise ValueError if evaluations do not record the metric for each question.

    Promotion compares models question by question, so a mean over all questions does not suffice.
    """
    if _RETRIEVAL_METRIC.fullmatch(name) or _MEAN_METRIC.fullmatch(name):
        return name
    raise ValueError(
        f"{name!r:.100} is not a metric that evaluations record for each question: give retrieval/served (the vectors "
        "that users get), retrieval/best, retrieval/no_overlap, retrieval/xx_en, retrieval/en_xx, retrieval/LANGUAGE, "
        "guard/mean, guard/LANGUAGE, classification/mean or classification/LANGUAGE; for a translator: "
        "translation/mean"
    )


Metric = Annotated[str, AfterValidator(_check_metric)]
"""Metric that is recorded for each question, such as retrieval/served, classification/mean or classification/de."""
Paths = Annotated[tuple[str, ...], Field(min_length=1)]


class SelectionConfig(StageConfig):
    """Selection of the weights that a fine-tuning run exports."""

    rule: Literal["last", "source", "joint", "each"] = "last"
    """Weights to export. last: the weights after the last step · source: the weights with the best score on the
    development set of the first training language, which is strictly zero-shot (as in XTREME) · joint: the weights with
    the best mean score on the development sets of all languages (#M=1, as in InfoXLM) · each: for every language, the
    weights with the best score on its own development set (#M=N, as in XLM and mBERT)."""

    every: PositiveInt = 5_000
    """Number of optimizer steps between evaluations on the development sets. The last step is always evaluated."""


class TuningConfig(OptimizationConfig):
    """AdamW with defaults for fine-tuning: no weight decay, and BERT's betas and epsilon."""

    steps: PositiveInt = 10_000
    """Number of optimizer steps, including the warm-up. It is ignored if `epochs` is set."""

    learning_rate: PositiveFloat = 7e-6

    warmup_steps: NonNegativeInt = 1_000
    """Number of optimizer steps of the linear warm-up. It is ignored if `epochs` is set."""

    betas: tuple[Beta, Beta] = (0.9, 0.999)
    epsilon: PositiveFloat = 1e-8

    weight_decay: Weight = 0.0
    """Decoupled weight decay per step, as a multiple of the learning rate. With 0, the embeddings of tokens outside the
    training text stay unchanged."""


class TuningCheckpointsConfig(CheckpointsConfig):
    """Checkpoints with a shorter interval, because fine-tuning takes fewer steps than pre-training."""

    every: PositiveInt = 1_000


class RecipeConfig(StageConfig):
    """Settings of fine-tuning on any task."""

    max_tokens: Annotated[Whole, Field(gt=2, le=2**20)] = 256
    """Largest sequence length, in tokens including special tokens."""

    batch_size: Annotated[Whole, Field(gt=0, le=2**20)] = 32
    """Number of sequences per optimizer step, over all workers."""

    micro_batch_size: Annotated[Whole, Field(gt=0, le=2**20)] = 32
    """Number of sequences per forward pass of a worker. It changes memory and speed, and with dropout also the
    result."""

    dropout: Share = 0.1
    """Dropout probability in the encoder. Above 0, the result depends on `micro_batch_size` and the number of workers,
    and attention on GPUs uses PyTorch's memory-efficient kernel instead of FlashAttention."""

    epochs: PositiveInt | None = None
    """Number of passes over the training text. If set, it determines `optimization.steps`, and `warmup_share`
    determines the warm-up."""

    warmup_share: Share = 0.1
    """Share of all optimizer steps that are warm-up, if `epochs` is set."""

    optimization: TuningConfig = TuningConfig()
    selection: SelectionConfig = SelectionConfig()
    checkpoints: TuningCheckpointsConfig = TuningCheckpointsConfig()
    log_every: PositiveInt = 10
    """Number of optimizer steps between points of the logged curves."""

    seed: NonNegativeInt = 1
    """Seed of the head's initial weights, the example order and dropout."""


class CrossLingualConfig(RecipeConfig):
    """Settings of tasks with test sets that may mix two languages or be machine-translated."""

    added_later: ClassVar[tuple[str, ...]] = ("translated_test",)

    mixed: Flag = False
    """Whether to test also on pairs of texts in two different languages, such as a premise and a hypothesis, or a
    paragraph and a question."""

    translated_test: tuple[str, ...] = ()
    """Files or directories of test sets that were machine-translated into the first training language (translate-test).
    Each name contains the original's language. Translated test sets replace those of all other languages. Only suites
    and `evaluate` read this field."""

    @model_validator(mode="after")
    def _check_translated_test(self) -> Self:
        if self.mixed and self.translated_test:
            raise ValueError("mixed has no effect with translated_test, whose texts have one language: set one of them")
        return self


class AlignedSetConfig(StageConfig):
    """A set of aligned sentences: translations of the same sentences in several languages."""

    data: Source
    """Directory of aligned sentences, or a prepared corpus with held-out pairs. Files in the directory are named like
    LASER's `tatoeba.deu-eng.deu` and `tatoeba.deu-eng.eng`, like NAME.en-de.en and NAME.en-de.de, or like en-de.tsv.
    The directory may also contain one file per language, with translations in lines of the same number."""

    pivot: Language = "en"
    """Language with which all other languages are aligned."""

    languages: Literal["all", "14", "22", "36"] | Annotated[tuple[Language, ...], Field(min_length=1)] = "all"
    """Languages to test. all: every language of the test set · 14: the languages of the paper's Table 2 · 22: those of
    its Table 3 · 36: those of both tables · or a list of codes."""


class EvaluationConfig(StageConfig):
    """Evaluates models on test sets and writes scores, tables and figures."""

    added_later: ClassVar[tuple[str, ...]] = ("guard", "merge")

    retrieval_pairs: PositiveInt = 1000
    """Number of held-out pairs per language. `seed` determines the choice."""

    perplexity_sentences: PositiveInt = 500
    """Number of held-out sentences per language. `seed` determines their masks."""

    batch_size: Annotated[Whole, Field(gt=0, le=2**20)] = 64
    """Number of sentences per forward pass."""

    max_tokens: Annotated[Whole, Field(gt=2, le=2**20)] = 256
    """Largest sentence length, in tokens including special tokens. Longer sentences are truncated."""

    seed: NonNegativeInt = 1
    """Seed of the pairs, sentences and masks, which are the same for all compared models."""

    guard: AlignedSetConfig | None = None
    """A general test set, such as Tatoeba. It shows whether training on special text makes a model worse on general
    text. The metrics `guard/mean` and `guard/LANGUAGE` are the retrieval scores of the vectors that users get."""

    merge: tuple[Annotated[Number, Field(gt=0, le=1)], ...] = ()
    """Weights for merging the trained encoder with its start. A weight of 0.25 is a quarter of the way from the start
    to the trained encoder. The step `merge` chooses the largest weight whose loss on `guard` is below half a point
    (lower end of the paired interval), or else the smallest weight. If empty, the trained encoder is not merged."""

    @model_validator(mode="after")
    def _check_merge(self) -> Self:
        if self.merge and self.guard is None:
            raise ValueError("merge needs a guard to choose among its weights: set evaluation.guard")
        return self


class RegistrationConfig(StageConfig):
    """Registers a model as a new version in the registry."""

    name: Name = "infoxlm"
    """Name of the registered model."""

    metric: Metric = "retrieval/served"
    """Metric for comparing candidate and champion, question by question. Higher is better. retrieval/served is the
    score of the vectors that users get: those of the contrast layer, or of the last layer without contrast. A run with
    the section `translation` uses translation/mean, the only metric of translators."""

    gate: dict[Metric, Annotated[Number, Field(gt=-1, lt=1)]] = Field(default_factory=dict)
    """Lower limit for the gain in each metric. The lower end of the gain's confidence interval must exceed the limit. A
    negative limit, such as guard/mean: -0.005, allows a loss. The limit for `metric` is 0 unless it is listed here."""

    against: Literal["champion", "start"] = "champion"
    """Model with which a candidate is compared before it becomes champion. champion: the current champion; the first
    version becomes champion without a comparison. start: first the model from which training started, also for the
    first version; then the current champion. Both comparisons use the same questions and limits."""

    @property
    def gates(self) -> dict[str, float]:
        """Mapping from each metric of the gate to the lower limit for its gain."""
        return {self.metric: 0.0, **self.gate}

"""Settings of what all fine-tuning tasks share, of `evaluate` and of `register`."""

from typing import Annotated, Literal

from pydantic import Field

from infoxlm_core.config.base import (
    Name,
    NonNegativeInt,
    Number,
    PositiveFloat,
    PositiveInt,
    Share,
    StageConfig,
    Weight,
    Whole,
)
from infoxlm_core.config.training import Beta, CheckpointsConfig, OptimizationConfig

_SCORE = r"(mean|best|contrast|no_overlap|xx_[a-z]{2,3}|[a-z]{2,3}_xx|[a-z]{2,3}([-_][A-Za-z0-9]{2,4}){0,2})"
Metric = Annotated[str, Field(pattern=rf"^(retrieval|classification)/{_SCORE}$")]
"""A share of right answers, question by question: retrieval/best, classification/mean, classification/de."""
Paths = Annotated[tuple[str, ...], Field(min_length=1)]


class SelectionConfig(StageConfig):
    """Which weights of a fine-tuning are exported, by their scores on development sets."""

    rule: Literal["last", "source", "joint", "each"] = "last"
    """last: the weights after the last step · source: the best on the development set of the first training language
    (strictly zero-shot; XTREME) · joint: the best mean over the development sets of all languages (#M=1; InfoXLM) ·
    each: for every language the best on its own (#M=N; XLM, mBERT)."""

    every: PositiveInt = 5_000
    """Optimizer steps between two evaluations on the development sets; the last step is always evaluated."""


class TuningConfig(OptimizationConfig):
    """AdamW as fine-tuning uses it: no weight decay, BERT's betas and epsilon."""

    steps: PositiveInt = 10_000
    """Optimizer steps, warm-up included; not read if `epochs` is set."""

    learning_rate: PositiveFloat = 7e-6
    """Peak, reached after `warmup_steps` updates."""

    warmup_steps: NonNegativeInt = 1_000
    """Updates of the linear warm-up; not read if `epochs` is set."""

    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """Adam's decay rates of the two moments."""

    epsilon: PositiveFloat = 1e-8
    """Adam's term in the denominator."""

    weight_decay: Weight = 0.0
    """Decoupled, times the learning rate. At 0 only word embeddings of tokens that occur are trained."""


class RecipeConfig(StageConfig):
    """What fine-tuning on any task needs."""

    max_tokens: Annotated[Whole, Field(gt=2, le=2**20)] = 256
    """Of one sequence, special tokens included."""

    batch_size: Annotated[Whole, Field(gt=0, le=2**20)] = 32
    """Sequences of one optimizer step, over all workers."""

    micro_batch_size: Annotated[Whole, Field(gt=0, le=2**20)] = 32
    """Sequences of one forward pass; changes memory and speed and, without dropout, never the result."""

    dropout: Share = 0.0
    """In the encoder; the paper's group used 0.1. Above 0 attention on a GPU takes PyTorch's memory-efficient kernel,
    packed as well, and what is dropped depends on how a batch is split: on `micro_batch_size` and the number of
    workers."""

    epochs: PositiveInt | None = None
    """Passes over the training text; then they decide `optimization.steps`, and `warmup_share` the warm-up."""

    warmup_share: Share = 0.1
    """Part of all steps, if `epochs` is given."""

    optimization: TuningConfig = TuningConfig()
    selection: SelectionConfig = SelectionConfig()
    checkpoints: CheckpointsConfig = CheckpointsConfig(every=1_000)
    log_every: PositiveInt = 10
    """Optimizer steps between two points of the curves."""

    seed: NonNegativeInt = 1
    """Decides the head's initial weights, the order of examples and dropout."""


class EvaluationConfig(StageConfig):
    """Models + test sets -> scores, tables, figures."""

    retrieval_pairs: PositiveInt = 1000
    """Held-out pairs a language, drawn once by `seed`."""

    perplexity_sentences: PositiveInt = 500
    """Held-out sentences a language, each masked once by `seed`."""

    batch_size: Annotated[Whole, Field(gt=0, le=2**20)] = 64
    """Sentences of one forward pass."""

    max_tokens: Annotated[Whole, Field(gt=2, le=2**20)] = 256
    """Of one sentence, special tokens included; longer ones are cut."""

    seed: NonNegativeInt = 1
    """Draws pairs, sentences and masks; equal for all models that are compared."""


class RegistrationConfig(StageConfig):
    """A model -> a version in the registry."""

    name: Name = "infoxlm"
    """Name of the registered model."""

    metric: Metric = "retrieval/best"
    """The score on which candidate and champion are compared, question by question; higher is better."""

    gate: dict[Metric, Annotated[Number, Field(gt=-1, lt=1)]] = Field(default_factory=dict)
    """Metric -> its least gain over the champion: the lower end of its confidence interval must lie above it. A
    value below 0, such as classification/mean: -0.005, tolerates a loss. `metric` must gain (0) if it is not named."""

    @property
    def gates(self) -> dict[str, float]:
        """All metrics of the gate, with the least gain of each."""
        return {self.metric: 0.0, **self.gate}

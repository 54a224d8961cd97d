"""The configs of every training run: optimizer, schedule, guard and checkpoints."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from infoxlm_core.config.base import NonNegativeInt, Number, PositiveFloat, PositiveInt, StageConfig, Weight, Whole

Beta = Annotated[Number, Field(ge=0, lt=1)]
RunName = Annotated[str, Field(pattern=r"^([A-Za-z0-9][\w.-]*)?$")]


class OptimizationConfig(StageConfig):
    """AdamW with a linear warm-up, then a decay of the learning rate."""

    steps: PositiveInt = 150_000
    """Number of optimizer steps of the whole run, warm-up included."""

    learning_rate: PositiveFloat = 2e-4
    """Peak learning rate, reached after `warmup_steps` steps."""

    warmup_steps: NonNegativeInt = 10_000
    """Number of optimizer steps of the linear warm-up. It must be below `steps`."""

    schedule: Literal["linear", "inverse_sqrt"] = "linear"
    """How the learning rate decays after the warm-up. linear: linearly to 0 at the last step · inverse_sqrt:
    learning_rate * sqrt(warmup_steps / step), with a warm-up that starts at 1e-7 (as XLM)."""

    betas: tuple[Beta, Beta] = (0.9, 0.98)
    """Decay rates of Adam's first and second moment."""

    epsilon: PositiveFloat = 1e-6
    """Term that Adam adds to its denominator."""

    weight_decay: Weight = 0.01
    """Decoupled weight decay (AdamW) per step, as a multiple of the learning rate; `decay` selects the parameters."""

    decay: Literal["all", "no_bias_norm"] = "all"
    """Which parameters decay. all: every parameter (as in the released code) · no_bias_norm: all except biases and
    LayerNorm weights."""

    clip_norm: PositiveFloat = 1.0
    """Largest global L2 norm of the gradients, after the division by the number of targets. Larger gradients are scaled
    down to this norm."""

    max_bad_steps: PositiveInt = 3
    """Number of bad steps in a row after which the run rewinds to a checkpoint (see `guard`) or stops. Here, a step
    counts as bad if its loss or gradient is not finite, or its loss is more than twice the limit of a spike. Bad steps
    are skipped."""

    @model_validator(mode="after")
    def _check_warmup(self) -> Self:
        if self.warmup_steps >= self.steps:
            raise ValueError(f"warmup_steps ({self.warmup_steps}) must be below steps ({self.steps})")
        return self


class GuardConfig(StageConfig):
    """Protection against steps that would make the training diverge."""

    added_later: ClassVar[tuple[str, ...]] = ("deviations", "rewinds")

    deviations: Weight = 6.0
    """Limit of a spike, in standard deviations above the mean of the last 128 steps. From step 65 on, a step is skipped
    if its loss or gradient norm is above this limit. A lasting rise is accepted after some steps. 0: only steps that
    are not finite are skipped."""

    rewinds: Annotated[Whole, Field(ge=0, le=2)] = 2
    """Number of times that a run may rewind before it stops. A run that rewinds returns to a checkpoint that is at
    least 100 steps old, and skips the data that it has used since then. See `optimization.max_bad_steps`."""


class CheckpointsConfig(StageConfig):
    """How often a run saves, how many checkpoints stay, and which run it resumes."""

    every: PositiveInt = 5_000
    """Number of optimizer steps from one checkpoint to the next."""

    keep: PositiveInt = 3
    """Number of newest checkpoints that stay on disk."""

    resume: RunName = ""
    """Name of a pre-training run in the directory `runs` of the store, such as `pretrained-3f2a…`. The run resumes from
    the newest checkpoint of this run, even if data, tokenizer or settings have changed. Each difference is logged. If
    empty, a run whose inputs have changed does not resume."""

"""Configs that every training run shares: optimizer, schedule, guard and checkpoints."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from infoxlm_core.config.base import NonNegativeInt, Number, PositiveFloat, PositiveInt, StageConfig, Weight, Whole

Beta = Annotated[Number, Field(ge=0, lt=1)]


class OptimizationConfig(StageConfig):
    """AdamW with a linear warm-up and a subsequent decay of the learning rate."""

    steps: PositiveInt = 150_000
    """Number of optimizer steps of the whole run, warm-up included."""

    learning_rate: PositiveFloat = 2e-4
    """Peak learning rate, reached after `warmup_steps` steps."""

    warmup_steps: NonNegativeInt = 10_000
    """Number of optimizer steps of the linear warm-up. It must be below `steps`."""

    schedule: Literal["linear", "inverse_sqrt"] = "linear"
    """How the learning rate decays after the warm-up. linear: linearly to 0 at the last step · inverse_sqrt:
    learning_rate * sqrt(warmup_steps / step), with a warm-up that starts at 1e-7 (as in XLM)."""

    betas: tuple[Beta, Beta] = (0.9, 0.98)
    """Decay rates of Adam's first and second moment."""

    epsilon: PositiveFloat = 1e-6
    """Small constant in the denominator of Adam's update."""

    weight_decay: Weight = 0.01
    """Decoupled weight decay (AdamW) per step, as a multiple of the learning rate; `decay` selects the parameters."""

    decay: Literal["all", "no_bias_norm"] = "all"
    """Parameters with weight decay. all: every parameter (as in the released code) · no_bias_norm: all except biases
    and LayerNorm weights."""

    clip_norm: PositiveFloat = 1.0
    """Largest global L2 norm of the gradients, after their division by the number of targets. Larger gradients are
    scaled down to this norm."""

    max_bad_steps: PositiveInt = 3
    """Number of consecutive bad steps after which the run rewinds to a checkpoint (see `guard`) or stops. A step is bad
    if its loss or gradient is not finite, or its loss is more than twice the spike limit. Bad steps are skipped."""

    @model_validator(mode="after")
    def _check_warmup(self) -> Self:
        if self.warmup_steps >= self.steps:
            raise ValueError(f"warmup_steps ({self.warmup_steps}) must be below steps ({self.steps})")
        return self


class GuardConfig(StageConfig):
    """Protection against training steps that would make the run diverge."""

    added_later: ClassVar[tuple[str, ...]] = ("deviations", "rewinds")

    deviations: Weight = 6.0
    """Spike limit in standard deviations above the mean of the last 128 steps. From step 65 on, a step is skipped if
    its loss or gradient norm exceeds this limit. A lasting rise is accepted after some steps. 0: skip only steps whose
    loss or gradient is not finite."""

    rewinds: Annotated[Whole, Field(ge=0, le=2)] = 2
    """Number of times that a run may rewind before it stops. A rewind restores a checkpoint that is at least 100 steps
    old. The run then skips the data that it has used since this checkpoint. See `optimization.max_bad_steps`."""


class CheckpointsConfig(StageConfig):
    """Interval between checkpoints, and number of checkpoints to keep."""

    every: PositiveInt = 5_000
    """Number of optimizer steps between checkpoints."""

    keep: PositiveInt = 3
    """Number of newest checkpoints to keep on disk."""

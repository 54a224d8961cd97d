"""What every training needs: optimizer, schedule, checkpoints."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from infoxlm_core.config.base import NonNegativeInt, Number, PositiveFloat, PositiveInt, StageConfig, Weight, Whole

Beta = Annotated[Number, Field(ge=0, lt=1)]
RunName = Annotated[str, Field(pattern=r"^([A-Za-z0-9][\w.-]*)?$")]


class OptimizationConfig(StageConfig):
    """AdamW; linear warm-up, then decay."""

    steps: PositiveInt = 150_000
    """Optimizer steps of the whole run, warm-up included."""

    learning_rate: PositiveFloat = 2e-4
    """Peak, reached after `warmup_steps` updates."""

    warmup_steps: NonNegativeInt = 10_000
    """Updates of the linear warm-up; below `steps`."""

    schedule: Literal["linear", "inverse_sqrt"] = "linear"
    """After the warm-up. linear: to 0 at the last step · inverse_sqrt: peak * sqrt(warmup_steps / updates), warmed up
    from 1e-7 (as XLM)."""

    betas: tuple[Beta, Beta] = (0.9, 0.98)
    """Adam's decay rates of the two moments."""

    epsilon: PositiveFloat = 1e-6
    """Adam's term in the denominator."""

    weight_decay: Weight = 0.01
    """Decoupled from the gradient (AdamW), times the learning rate; of the parameters that `decay` names."""

    decay: Literal["all", "no_bias_norm"] = "all"
    """What decays, decoupled: every parameter (as the released code), or matrices and embeddings only."""

    clip_norm: PositiveFloat = 1.0
    """Of the gradients after division by the target count."""

    max_bad_steps: PositiveInt = 3
    """Bad steps in a row, before the run goes back to a checkpoint (see `guard`) or stops. Bad is a step whose loss or
    gradient is not finite, or a spike: it changes nothing but its number."""

    @model_validator(mode="after")
    def _warmup_ends(self) -> Self:
        if self.warmup_steps >= self.steps:
            raise ValueError(f"warmup_steps ({self.warmup_steps}) must be below steps ({self.steps})")
        return self


class GuardConfig(StageConfig):
    """What is done about steps that would spoil a training."""

    deviations: Weight = 6.0
    """A step is bad, too, if its loss or gradient norm is so many standard deviations above the mean of the last 128
    good steps; from the 64th on. 0: only if it is not finite, and only steps in a row count."""

    rewinds: Annotated[Whole, Field(ge=0, le=2)] = 2
    """After `optimization.max_bad_steps` bad steps in a row, or more than 10 in 1,000, the run goes back to a
    checkpoint at least 100 steps before and leaves out the data since: at most so often, then it stops."""


class CheckpointsConfig(StageConfig):
    """How often a run saves, how much of it stays, and what it goes on from."""

    every: PositiveInt = 5_000
    """Optimizer steps between two checkpoints."""

    keep: PositiveInt = 3
    """Newest checkpoints that stay on disk."""

    resume: RunName = ""
    """Name of a pre-training's run, such as `pretrained-3f2a…` in the store's `runs`: go on from its newest checkpoint
    although data, tokenizer or settings are no longer those it began with; each difference is logged. Without it that
    is refused."""

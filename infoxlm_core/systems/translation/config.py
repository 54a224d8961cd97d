"""Config of unsupervised machine translation, XLM's: denoising and online back-translation."""

from typing import Any, Literal, Self

from pydantic import model_validator

from infoxlm_core.config.base import Language, NonNegativeInt, PositiveInt, Share, Source, StageConfig, Weight
from infoxlm_core.config.pretraining import ModelConfig
from infoxlm_core.config.training import CheckpointsConfig, OptimizationConfig


class StartConfig(StageConfig):
    """Where the weights of one half of the translator come from."""

    model: Source | None = None
    """An exported model of system xlm, trained with CLM or MLM. None: random weights."""

    take: Literal["all", "embeddings"] = "all"
    """embeddings: its word embeddings alone."""


class NoiseConfig(StageConfig):
    """Noise that denoising removes."""

    shuffle: Weight = 3.0
    """No token moves further than this."""

    drop: Share = 0.1
    """Probability of each token to be left out; one always stays."""

    blank: Share = 0.1
    """Probability of each token to become `<mask>`."""


class TranslationConfig(StageConfig):
    """Monolingual text of two languages, and models pre-trained on it -> a translator of both directions."""

    languages: tuple[Language, Language]
    """The two languages that are translated into each other."""

    model: ModelConfig = ModelConfig(layers=6, hidden=1024, ffn=4096, heads=8, dropout=0.1)
    """Of encoder and decoder alike; a start decides the sizes instead."""

    encoder: StartConfig = StartConfig()
    decoder: StartConfig = StartConfig()
    """May be the encoder's; attention to the source is random in any case."""

    noise: NoiseConfig = NoiseConfig()
    denoising: tuple[tuple[NonNegativeInt, Weight], ...] = ((0, 1.0), (100_000, 0.1), (300_000, 0.0))
    """Weight of denoising at steps, linear between them; back-translation weighs 1."""

    side_tokens: PositiveInt = 100
    """Longest sentence, without special tokens; longer ones are left out."""

    batch_tokens: PositiveInt = 2000
    """Tokens of a denoising batch, in each virtual shard."""

    back_translation_sentences: PositiveInt = 32
    """Sentences of a back-translation batch, in each virtual shard."""

    virtual_shards: PositiveInt = 1
    """Fixed slices of the global batch: each worker takes some, and there are no more workers than slices."""

    optimization: OptimizationConfig = OptimizationConfig(
        steps=500_000, schedule="inverse_sqrt", learning_rate=1e-4, warmup_steps=4_000, weight_decay=0.0, clip_norm=5.0
    )
    validate_every: PositiveInt = 6_250
    """Optimizer steps between two translations of the held-out text: 200,000 sentences in batches of 32."""

    validation_pairs: PositiveInt = 1_000
    """Held-out pairs that are translated both ways."""

    patience: PositiveInt = 10
    """Validations in a row without a better BLEU, before the run ends."""

    checkpoints: CheckpointsConfig = CheckpointsConfig()
    log_every: PositiveInt = 10
    """Optimizer steps between two points of the curves."""

    seed: NonNegativeInt = 1
    """Decides new weights, samples, noise and dropout."""

    def result_fields(self) -> dict[str, Any]:
        values = super().result_fields()
        for name in ("recompute", "compiled", "precision"):
            del values["model"][name]  # `sharded` stays, which means nothing here: runs from before have it
        return values

    @model_validator(mode="after")
    def _two_languages_that_fit(self) -> Self:
        if self.languages[0] == self.languages[1]:
            raise ValueError(f"languages must be two, not {self.languages[0]} twice")
        if self.optimization.schedule != "inverse_sqrt":
            raise ValueError("optimization.schedule must be inverse_sqrt: nobody knows the last step beforehand")
        if self.model.start is not None:
            raise ValueError("model.start is not used here: set encoder.model and decoder.model")
        if self.model.precision != "auto":
            raise ValueError("model.precision is auto here: bf16 on GPUs, fp32 on CPUs")
        most = generated_tokens(self.side_tokens + 2, 1.5, 10)
        if most > self.model.max_tokens:
            raise ValueError(
                f"translations of {most} tokens (1.5 side_tokens and 13) exceed model.max_tokens "
                f"({self.model.max_tokens})"
            )
        steps = [step for step, _ in self.denoising]
        if not steps or steps != sorted(set(steps)):
            raise ValueError(f"denoising must name rising steps, not {steps}")
        return self


def generated_tokens(source: int, factor: float, more: int) -> int:
    """Return the limit on the tokens of a translation of `source` tokens, special tokens included."""
    return int(factor * source + more)

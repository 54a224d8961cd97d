"""The config of XLM's unsupervised machine translation: denoising and online back-translation."""

from typing import Any, Literal, Self

from pydantic import model_validator

from infoxlm_core.config.base import Language, NonNegativeInt, PositiveInt, Share, Source, StageConfig, Weight
from infoxlm_core.config.pretraining import ModelConfig
from infoxlm_core.config.training import CheckpointsConfig, OptimizationConfig


class StartConfig(StageConfig):
    """Where the initial weights of the encoder or decoder come from."""

    model: Source | None = None
    """An exported model of system xlm that was trained with CLM or MLM. null: random weights."""

    take: Literal["all", "embeddings"] = "all"
    """Which weights to copy from the model. all: all that both have · embeddings: only its word embeddings."""


class NoiseConfig(StageConfig):
    """The noise that denoising learns to remove."""

    shuffle: Weight = 3.0
    """Largest distance, in tokens, by which a token moves."""

    drop: Share = 0.1
    """Probability that a token is dropped; at least one token of a sentence stays."""

    blank: Share = 0.1
    """Probability that a token is replaced by `<mask>`."""


class TranslationConfig(StageConfig):
    """Trains a translator of both directions on monolingual text of two languages, from models pre-trained on it."""

    languages: tuple[Language, Language]
    """The two languages that are translated into each other."""

    model: ModelConfig = ModelConfig(layers=6, hidden=1024, ffn=4096, heads=8, dropout=0.1)
    """Sizes of both the encoder and the decoder; those of a pre-trained model replace them."""

    encoder: StartConfig = StartConfig()
    decoder: StartConfig = StartConfig()
    """Start of the decoder, which may be the encoder's model; its attention to the source always starts random."""

    noise: NoiseConfig = NoiseConfig()
    denoising: tuple[tuple[NonNegativeInt, Weight], ...] = ((0, 1.0), (400_000, 0.1), (1_200_000, 0.0))
    """Pairs of an optimizer step and the weight of denoising at that step, interpolated linearly. Back-translation has
    weight 1. The default is XLM's, which counts rounds of four optimizer steps: 0.1 after 100,000 rounds, 0 after
    300,000."""

    side_tokens: PositiveInt = 100
    """Largest number of tokens of a sentence, without special tokens; longer sentences are not used."""

    batch_tokens: PositiveInt = 2000
    """Tokens of a denoising batch of each virtual shard."""

    back_translation_sentences: PositiveInt = 32
    """Sentences of a back-translation batch of each virtual shard."""

    virtual_shards: PositiveInt = 1
    """Number of fixed slices of the global batch, which the workers share; also the largest number of workers."""

    optimization: OptimizationConfig = OptimizationConfig(
        steps=500_000, schedule="inverse_sqrt", learning_rate=1e-4, warmup_steps=4_000, weight_decay=0.0, clip_norm=5.0
    )
    validate_every: PositiveInt = 6_250
    """Optimizer steps from one validation to the next; the default is 200,000 sentences in batches of 32."""

    validation_pairs: PositiveInt = 1_000
    """Number of held-out pairs that a validation translates in both directions."""

    patience: PositiveInt = 10
    """Number of validations in a row without a better BLEU after which the run ends."""

    checkpoints: CheckpointsConfig = CheckpointsConfig()
    log_every: PositiveInt = 10
    """Optimizer steps from one point of the logged curves to the next."""

    seed: NonNegativeInt = 1
    """Seed of the initial weights, samples, noise and dropout."""

    def result_fields(self) -> dict[str, Any]:
        values = super().result_fields()
        for name in ("recompute", "compiled", "precision", "frozen"):
            del values["model"][name]  # `sharded` has no effect here, but the records of earlier runs contain it
        return values

    @model_validator(mode="after")
    def _check_fields(self) -> Self:
        if self.languages[0] == self.languages[1]:
            raise ValueError(f"languages must be two different languages, not {self.languages[0]} twice")
        if self.optimization.schedule != "inverse_sqrt":
            raise ValueError(
                "optimization.schedule must be inverse_sqrt, because the last step is not known in advance"
            )
        if self.model.start is not None:
            raise ValueError("model.start is not used here: set encoder.model and decoder.model")
        if self.model.frozen != "none":
            raise ValueError(f"model.frozen ({self.model.frozen}) is not used here: remove it")
        if self.model.precision != "auto":
            raise ValueError("model.precision must be auto here (bf16 on GPUs, fp32 on CPUs)")
        longest = generated_tokens(self.side_tokens + 2, 1.5, 10)
        if longest > self.model.max_tokens:
            raise ValueError(
                f"translations of {longest} tokens (1.5 * side_tokens + 13) exceed model.max_tokens "
                f"({self.model.max_tokens}): lower side_tokens"
            )
        steps = [step for step, _ in self.denoising]
        if not steps or steps != sorted(set(steps)):
            raise ValueError(f"the steps of denoising must increase, but are {steps}")
        return self


def generated_tokens(source: int, factor: float, extra: int) -> int:
    """Return the largest number of tokens of a translation of `source` tokens, special tokens included."""
    return int(factor * source + extra)

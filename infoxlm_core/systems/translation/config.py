"""The config of XLM's machine translation: denoising, online back-translation, and translation pairs."""

from typing import Literal, Self

from pydantic import model_validator

from infoxlm_core.config.base import (
    Flag,
    Language,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Share,
    StageConfig,
    Weight,
)
from infoxlm_core.config.training import CheckpointsConfig, OptimizationConfig

Initialisation = Literal["random", "embeddings", "pretrained"]
TRANSLATION_METRIC = "translation/mean"
"""Mean chrF of all sentences in both directions, from 0 to 1. BLEU has no scores of single sentences for the gate."""


class NoiseConfig(StageConfig):
    """The noise that denoising learns to remove."""

    shuffle: Weight = 3.0
    """Largest distance, in tokens, by which a token moves."""

    drop: Share = 0.1
    """Probability that a token is dropped. At least one token of a sentence stays."""

    blank: Share = 0.1
    """Probability that a token is replaced by `<mask>`."""


class TranslatorOptimizationConfig(OptimizationConfig):
    """AdamW with the defaults of XLM's translators: a decay with the inverse square root, and no weight decay."""

    steps: PositiveInt = 500_000
    learning_rate: PositiveFloat = 1e-4
    warmup_steps: NonNegativeInt = 4_000
    schedule: Literal["linear", "inverse_sqrt"] = "inverse_sqrt"
    weight_decay: Weight = 0.0
    clip_norm: PositiveFloat = 5.0


class TranslationConfig(StageConfig):
    """Trains a translator of two languages in both directions, from the model of section `pretraining`.

    Denoising, back-translation and translation pairs take turns, with one language in each optimizer step.
    """

    languages: tuple[Language, Language]
    """The two languages that are translated into each other."""

    encoder: Initialisation = "pretrained"
    """Initial weights of the encoder. random: random weights · embeddings: the word embeddings of the pre-trained
    model, other weights are random · pretrained: all weights of the pre-trained model."""

    decoder: Initialisation = "pretrained"
    """Initial weights of the decoder, with the same values as for the encoder. The attention to the source always
    starts with random weights."""

    dropout: Share = 0.1
    """Dropout probability in the encoder and the decoder."""

    noise: NoiseConfig = NoiseConfig()
    denoising: tuple[tuple[NonNegativeInt, Weight], ...] = ((0, 1.0), (400_000, 0.1), (1_200_000, 0.0))
    """Pairs of an optimizer step and the weight of denoising at that step. Between two steps, the weight is
    interpolated linearly. []: no denoising. The default is that of XLM: a weight of 0.1 after 400,000 steps and of 0
    after 1,200,000 steps."""

    back_translation: Flag = True
    """Whether the translator learns to restore sentences from its own translations of them."""

    parallel_share: Share = 0.0
    """Share of the training pairs from which the translator learns. 0: unsupervised training · 1: all pairs. A hash of
    the English side selects the pairs."""

    side_tokens: PositiveInt = 100
    """Largest number of tokens of a sentence, without special tokens. The training skips longer sentences, and `infoxlm
    translate` truncates them."""

    batch_tokens: PositiveInt = 2000
    """Number of target tokens in a batch of denoising or translation pairs, for each virtual shard."""

    back_translation_sentences: PositiveInt = 32
    """Number of sentences in a batch of back-translation, for each virtual shard."""

    virtual_shards: PositiveInt = 1
    """Number of fixed slices of the global batch, which are divided among the workers. It is also the largest possible
    number of workers."""

    optimization: TranslatorOptimizationConfig = TranslatorOptimizationConfig()
    validate_every: PositiveInt = 6_250
    """Number of optimizer steps between two validations. The weights with the best mean BLEU of both directions are
    exported. The default corresponds to 200,000 sentences in batches of 32."""

    validation_pairs: PositiveInt = 1_000
    """Number of held-out pairs on which a validation computes BLEU. The validation uses the first pairs, and the
    evaluation uses the others."""

    checkpoints: CheckpointsConfig = CheckpointsConfig()
    log_every: PositiveInt = 10
    """Number of optimizer steps between two points of the logged curves."""

    seed: NonNegativeInt = 1
    """Seed of the random initial weights, samples, noise and dropout."""

    @model_validator(mode="after")
    def _check_fields(self) -> Self:
        """Check that the languages differ, and that at least one objective is enabled in every step."""
        if self.languages[0] == self.languages[1]:
            raise ValueError(f"languages must be two different languages, not {self.languages[0]} twice")
        steps = [step for step, _ in self.denoising]
        if steps != sorted(set(steps)):
            raise ValueError(f"the steps of denoising must increase, but are {steps}")
        if not (self.denoising or self.back_translation or self.parallel_share):
            raise ValueError("nothing to train: set denoising, back_translation or parallel_share")
        ends_early = any(weight == 0 and step < self.optimization.steps for step, weight in self.denoising)
        if ends_early and not (self.back_translation or self.parallel_share):
            raise ValueError(
                "denoising is the only objective, but its weight reaches 0 before the last step: "
                "raise the weight, or set back_translation or parallel_share"
            )
        return self

"""The config of XLM's machine translation: denoising, online back-translation, and translation pairs."""

from typing import Literal, Self

from pydantic import model_validator

from infoxlm_core.config.base import Flag, Language, NonNegativeInt, PositiveInt, Share, StageConfig, Weight
from infoxlm_core.config.training import CheckpointsConfig, OptimizationConfig

Initialisation = Literal["random", "embeddings", "pretrained"]


class NoiseConfig(StageConfig):
    """The noise that denoising learns to remove."""

    shuffle: Weight = 3.0
    """Largest distance, in tokens, by which a token moves."""

    drop: Share = 0.1
    """Probability that a token is dropped; at least one token of a sentence stays."""

    blank: Share = 0.1
    """Probability that a token is replaced by `<mask>`."""


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
    """Initial weights of the decoder, as for the encoder; its attention to the source always starts random."""

    dropout: Share = 0.1
    """Dropout probability in the encoder and the decoder."""

    noise: NoiseConfig = NoiseConfig()
    denoising: tuple[tuple[NonNegativeInt, Weight], ...] = ((0, 1.0), (400_000, 0.1), (1_200_000, 0.0))
    """Pairs of an optimizer step and the weight of denoising at that step, interpolated linearly; []: no denoising. The
    default is XLM's, which counts rounds of four optimizer steps: 0.1 after 100,000 rounds, 0 after 300,000."""

    back_translation: Flag = True
    """Whether the translator learns to restore sentences from its own translations of them."""

    parallel_share: Share = 0.0
    """Share of the training pairs whose translations are learned. 0: unsupervised · 1: all pairs. A pair is selected by
    a hash of its English side."""

    side_tokens: PositiveInt = 100
    """Largest number of tokens of a sentence, without special tokens. Training leaves out longer sentences, and
    translation truncates them."""

    batch_tokens: PositiveInt = 2000
    """Target tokens of a batch of denoising or of translation pairs, for each virtual shard."""

    back_translation_sentences: PositiveInt = 32
    """Sentences of a back-translation batch of each virtual shard."""

    virtual_shards: PositiveInt = 1
    """Number of fixed slices of the global batch, which the workers share; also the largest number of workers."""

    optimization: OptimizationConfig = OptimizationConfig(
        steps=500_000, schedule="inverse_sqrt", learning_rate=1e-4, warmup_steps=4_000, weight_decay=0.0, clip_norm=5.0
    )
    validate_every: PositiveInt = 6_250
    """Optimizer steps from one validation to the next; the weights with the best mean BLEU of both directions are
    exported. The default is 200,000 sentences in batches of 32."""

    validation_pairs: PositiveInt = 1_000
    """Number of held-out pairs, the first ones, on which a validation computes BLEU; the evaluation uses the others."""

    checkpoints: CheckpointsConfig = CheckpointsConfig()
    log_every: PositiveInt = 10
    """Optimizer steps from one point of the logged curves to the next."""

    seed: NonNegativeInt = 1
    """Seed of the random initial weights, samples, noise and dropout."""

    @model_validator(mode="after")
    def _check_fields(self) -> Self:
        if self.languages[0] == self.languages[1]:
            raise ValueError(f"languages must be two different languages, not {self.languages[0]} twice")
        steps = [step for step, _ in self.denoising]
        if steps != sorted(set(steps)):
            raise ValueError(f"the steps of denoising must increase, but are {steps}")
        if not (self.denoising or self.back_translation or self.parallel_share):
            raise ValueError("nothing to train: set denoising, back_translation or parallel_share")
        is_over = any(weight == 0 and step < self.optimization.steps for step, weight in self.denoising)
        if is_over and not (self.back_translation or self.parallel_share):
            raise ValueError(
                "denoising is the only objective, but its weight reaches 0 before the last step: "
                "raise the weight, or set back_translation or parallel_share"
            )
        return self


def generated_tokens(source: int, factor: float, extra: int) -> int:
    """Return the largest number of tokens of a translation of `source` tokens, special tokens included."""
    return int(factor * source + extra)

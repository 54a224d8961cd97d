"""Configs of `finetune`, `evaluate` and `register`."""

from pydantic import NonNegativeInt, PositiveInt

from infoxlm_core.config.base import Language, Name, Share, StageConfig
from infoxlm_core.config.training import CheckpointsConfig, OptimizationConfig


class FinetuningConfig(StageConfig):
    """Encoder + labelled text -> classifier of sentences or sentence pairs."""

    data: str | None = None
    """A CSV, TSV or Parquet file; none: the labelled set of the prepared corpus."""

    text: str = "text"
    """Column of the sentence."""

    text_pair: str | None = None
    """Column of the second sentence of a pair, if there is one."""

    label: str = "label"
    language: str = "language"
    split: str = "split"
    """Column that says train or test; a file without it is all training text."""

    train_languages: tuple[Language, ...] = ("en",)
    """Languages to train on; every language is tested."""

    max_tokens: PositiveInt = 256
    batch_size: PositiveInt = 32
    micro_batch_size: PositiveInt = 32
    head_dropout: Share = 0.1
    optimization: OptimizationConfig = OptimizationConfig(
        steps=10_000, learning_rate=7e-6, warmup_steps=1_000, betas=(0.9, 0.999), epsilon=1e-8, weight_decay=0.0
    )
    checkpoints: CheckpointsConfig = CheckpointsConfig(every=1_000)
    log_every: PositiveInt = 10
    seed: NonNegativeInt = 1


class EvaluationConfig(StageConfig):
    """Models + test sets -> scores, tables, figures."""

    retrieval_pairs: PositiveInt = 1000
    """Held-out pairs a language, drawn once by `seed`."""

    perplexity_sentences: PositiveInt = 500
    """Held-out sentences a language, each masked once by `seed`."""

    batch_size: PositiveInt = 64
    max_tokens: PositiveInt = 256
    seed: NonNegativeInt = 1


class RegistrationConfig(StageConfig):
    """A model -> a version in the registry."""

    name: Name = "infoxlm"
    """Name of the registered model."""

    metric: str = "retrieval/best"
    """The score on which candidate and champion are compared; higher is better."""

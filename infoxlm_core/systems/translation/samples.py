"""Samples of unsupervised machine translation: clean sentences of one language a step, and noisy versions of them.

Encoder and decoder read `</s> x </s>`. Source: Lample and Conneau 2019, section 5.3.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from infoxlm_core.data.layouts import Sequences, gather
from infoxlm_core.data.sampling import TableSampler, generator
from infoxlm_core.data.shards import Shards, end_to_end
from infoxlm_core.errors import CorpusTooSmall
from infoxlm_core.model import devices
from infoxlm_core.systems.text_batches import languages_of, positions_from_zero, wrap
from infoxlm_core.systems.translation.config import NoiseConfig, TranslationConfig


@dataclass(frozen=True)
class Side:
    """Sentences `</s> x </s>` of one language, packed: ids, positions, types (T,) and the length of each."""

    ids: Tensor
    positions: Tensor
    types: Tensor
    lengths: tuple[int, ...]

    def to(self, device: torch.device) -> "Side":
        ids, positions, types = (devices.send(part, device) for part in (self.ids, self.positions, self.types))
        return Side(ids, positions, types, self.lengths)


def side(sentences: list[np.ndarray], language: int) -> Side:
    """Pack sentences without special tokens; `language` is the number of their language."""
    wrapped = wrap(Sequences(end_to_end(sentences), np.array([len(words) for words in sentences], np.int64)))
    return Side(
        torch.from_numpy(wrapped.flat),
        torch.from_numpy(positions_from_zero(wrapped.lengths)),
        torch.full((len(wrapped.flat),), language),
        tuple(wrapped.lengths.tolist()),
    )


def add_noise(words: np.ndarray, config: NoiseConfig, mask: int, rng: np.random.Generator) -> np.ndarray:
    """Shuffle, drop and blank the tokens (T,) of one sentence without `</s>`, in this order."""
    words = words[np.argsort(np.arange(len(words)) + rng.uniform(0, config.shuffle, len(words)), kind="stable")]
    remaining = rng.random(len(words)) >= config.drop
    if len(words) and not remaining.any():
        remaining[rng.integers(len(words))] = True
    words = words[remaining]
    return np.where(rng.random(len(words)) < config.blank, mask, words)


def denoising_weight(config: TranslationConfig, step: int) -> float:
    """Return the weight of denoising at a step, by linear interpolation."""
    steps, weights = zip(*config.denoising, strict=True)
    return float(np.interp(step, steps, weights))


@dataclass(frozen=True)
class TranslationBatch:
    """One micro-batch: a clean target, and its noisy source; back-translation generates its source."""

    objective: str
    target: Side
    source: Side | None
    rng_key: tuple[int, int, int]  # step, virtual shard, number of the micro-batch: seed of dropout

    @property
    def counts(self) -> dict[str, int]:
        """Target tokens, `</s>` included, and all tokens; a generated source counts as many as its target."""
        source = self.source or self.target
        return {
            self.objective: len(self.target.ids) - len(self.target.lengths),
            "tokens": len(self.target.ids) + len(source.ids),
        }


class TranslationSampler:
    """Draws sentences uniformly within a language, while objectives and languages alternate from step to step.

    Raises CorpusTooSmall if a language has no sentence that is short enough.
    """

    def __init__(self, shards: Shards, config: TranslationConfig) -> None:
        self.config, self.mask = config, shards.vocabulary_size - 1
        names = languages_of(shards)
        self.numbers = {name: names.index(name) for name in config.languages if name in names}
        self.tables = {name: shards.mono.get(name, []) for name in config.languages}
        limit = config.side_tokens + 1  # sentences contain their </s>
        self.rows = {
            name: [np.flatnonzero(np.diff(table.offsets) <= limit) for table in tables]
            for name, tables in self.tables.items()
        }
        for name, rows in self.rows.items():
            if not sum(map(len, rows)):
                raise CorpusTooSmall(
                    f"{name} has no sentence of at most {config.side_tokens} tokens: have=0 need=1; add text to {name}"
                )

    def turns(self, step: int) -> list[tuple[str, str]]:
        """Return the objectives and languages that alternate around a step."""
        names = ("dae", "bt") if denoising_weight(self.config, step) else ("bt",)
        return [(name, language) for name in names for language in self.config.languages]

    def draw(self, step: int, shard: int) -> TranslationBatch:
        """Return the micro-batch of a virtual shard at a step."""
        turns = self.turns(step)
        objective, language = turns[step % len(turns)]
        rng, number = generator(self.config.seed, step, shard, objective), self.numbers[language]
        if objective == "bt":
            words = self._sentences(language, self.config.back_translation_sentences, rng)
            return TranslationBatch("bt", side(words, number), None, (step, shard, 0))
        words = self._sentences(language, max(1, self.config.batch_tokens // 3), rng)
        tokens = np.cumsum([len(sentence) + 2 for sentence in words])
        words = words[: max(1, int(np.searchsorted(tokens, self.config.batch_tokens, side="right")))]
        noisy = [add_noise(sentence, self.config.noise, self.mask, rng) for sentence in words]
        return TranslationBatch("dae", side(words, number), side(noisy, number), (step, shard, 0))

    def _sentences(self, language: str, count: int, rng: np.random.Generator) -> list[np.ndarray]:
        """Return sentences of a language, without their `</s>`."""
        which, drawn = TableSampler([[len(rows) for rows in self.rows[language]]], 1.0).draw(count, rng)
        rows = np.array([self.rows[language][table][row] for table, row in zip(which, drawn, strict=True)])
        sentences = gather(self.tables[language], which, rows, self.config.side_tokens + 1)
        return [words[:-1] for words in sentences.rows]

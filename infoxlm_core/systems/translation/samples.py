"""Samples of unsupervised machine translation: clean sentences of one language per step, and noisy versions of them.

Encoder and decoder read `</s> x </s>`. Source: Lample and Conneau 2019, section 5.3.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from infoxlm_core.data.layouts import Sequences, gather, number_positions
from infoxlm_core.data.sampling import TableSampler, generator
from infoxlm_core.data.shards import Shards, Table, end_to_end
from infoxlm_core.errors import CorpusTooSmall
from infoxlm_core.model import devices
from infoxlm_core.systems.text_batches import languages_of, wrap
from infoxlm_core.systems.translation.config import NoiseConfig, TranslationConfig


@dataclass(frozen=True)
class PackedSentences:
    """Sentences `</s> x </s>` of one language, end to end."""

    ids: Tensor  # (T,)
    positions: Tensor  # (T,)
    types: Tensor  # (T,) number of the language
    lengths: tuple[int, ...]  # tokens of each sentence

    def to(self, device: torch.device) -> "PackedSentences":
        ids = devices.send(self.ids, device)
        positions = devices.send(self.positions, device)
        types = devices.send(self.types, device)
        return PackedSentences(ids, positions, types, self.lengths)


def pack_sentences(sentences: list[np.ndarray], language: int) -> PackedSentences:
    """Pack sentences without special tokens; `language` is the number of their language."""
    lengths = np.array([len(sentence) for sentence in sentences], np.int64)
    wrapped = wrap(Sequences(end_to_end(sentences), lengths))
    return PackedSentences(
        ids=torch.from_numpy(wrapped.flat),
        positions=torch.from_numpy(number_positions(wrapped.lengths)),
        types=torch.full((len(wrapped.flat),), language),
        lengths=tuple(wrapped.lengths.tolist()),
    )


def add_noise(tokens: np.ndarray, config: NoiseConfig, mask_id: int, rng: np.random.Generator) -> np.ndarray:
    """Shuffle, drop and mask the tokens (T,) of one sentence without `</s>`, in this order."""
    # Sorting by position plus a random number below `shuffle` moves no token by more than `shuffle`.
    sort_keys = np.arange(len(tokens)) + rng.uniform(0, config.shuffle, len(tokens))
    tokens = tokens[np.argsort(sort_keys, kind="stable")]
    remains = rng.random(len(tokens)) >= config.drop
    if len(tokens) and not remains.any():  # at least one token of a sentence stays
        remains[rng.integers(len(tokens))] = True
    tokens = tokens[remains]
    is_masked = rng.random(len(tokens)) < config.blank
    return np.where(is_masked, mask_id, tokens)


def denoising_weight(config: TranslationConfig, step: int) -> float:
    """Return the weight of denoising at a step, by linear interpolation."""
    steps = [scheduled_step for scheduled_step, _ in config.denoising]
    weights = [weight for _, weight in config.denoising]
    return float(np.interp(step, steps, weights))


@dataclass(frozen=True)
class TranslationBatch:
    """One micro-batch of denoising or back-translation."""

    objective: str  # dae or bt
    target: PackedSentences  # clean sentences
    source: PackedSentences | None  # noisy versions of them; None: back-translation generates the source
    rng_key: tuple[int, int, int]  # step, virtual shard, number of the micro-batch: seed of dropout

    @property
    def counts(self) -> dict[str, int]:
        """Target tokens, `</s>` included, and all tokens; a generated source counts as many as its target."""
        source = self.source or self.target
        target_tokens = len(self.target.ids) - len(self.target.lengths)  # all but the first `</s>` of each sentence
        return {self.objective: target_tokens, "tokens": len(self.target.ids) + len(source.ids)}


class TranslationSampler:
    """Draws sentences uniformly within a language, while objectives and languages alternate from step to step.

    Raises CorpusTooSmall if a language has no sentence that is short enough.
    """

    def __init__(self, shards: Shards, config: TranslationConfig) -> None:
        self.config = config
        self.mask_id = shards.vocabulary.mask
        self.tables: dict[str, list[Table]] = {}
        self.short_rows: dict[str, list[np.ndarray]] = {}  # language -> numbers of short sentences in each table
        max_row_tokens = config.side_tokens + 1  # stored sentences end with </s>
        for language in config.languages:
            tables = shards.mono.get(language, [])
            short_rows = [np.flatnonzero(np.diff(table.offsets) <= max_row_tokens) for table in tables]
            if not any(len(rows) for rows in short_rows):
                raise CorpusTooSmall(
                    f"{language} has no sentence of at most {config.side_tokens} tokens: add text in {language}"
                )
            self.tables[language] = tables
            self.short_rows[language] = short_rows
        all_languages = languages_of(shards)
        self.language_numbers = {language: all_languages.index(language) for language in config.languages}

    def turns(self, step: int) -> list[tuple[str, str]]:
        """Return the pairs of objective and language that take turns around a step."""
        objectives = ("dae", "bt") if denoising_weight(self.config, step) else ("bt",)
        return [(objective, language) for objective in objectives for language in self.config.languages]

    def draw(self, step: int, shard: int) -> TranslationBatch:
        """Return the micro-batch of a virtual shard at a step."""
        turns = self.turns(step)
        objective, language = turns[step % len(turns)]
        rng = generator(self.config.seed, step, shard, objective)
        language_number = self.language_numbers[language]
        rng_key = (step, shard, 0)
        if objective == "bt":
            sentences = self._draw_sentences(language, self.config.back_translation_sentences, rng)
            return TranslationBatch("bt", pack_sentences(sentences, language_number), None, rng_key)
        sentences = self._draw_sentences_by_tokens(language, self.config.batch_tokens, rng)
        noisy_sentences = [add_noise(sentence, self.config.noise, self.mask_id, rng) for sentence in sentences]
        target = pack_sentences(sentences, language_number)
        source = pack_sentences(noisy_sentences, language_number)
        return TranslationBatch("dae", target, source, rng_key)

    def _draw_sentences_by_tokens(self, language: str, max_tokens: int, rng: np.random.Generator) -> list[np.ndarray]:
        """Return sentences of a language with at most `max_tokens` tokens, special tokens included; at least one."""
        shortest_sequence = 3  # `</s> x </s>`
        sentences = self._draw_sentences(language, max(1, max_tokens // shortest_sequence), rng)
        total_tokens = np.cumsum([len(sentence) + 2 for sentence in sentences])
        count = int(np.searchsorted(total_tokens, max_tokens, side="right"))
        return sentences[: max(1, count)]

    def _draw_sentences(self, language: str, count: int, rng: np.random.Generator) -> list[np.ndarray]:
        """Return sentences of a language, without their `</s>`."""
        short_rows = self.short_rows[language]
        sampler = TableSampler([[len(rows) for rows in short_rows]], alpha=1.0)
        drawn_tables, drawn_indices = sampler.draw(count, rng)
        drawn_rows = []
        for table, index in zip(drawn_tables, drawn_indices, strict=True):
            drawn_rows.append(short_rows[table][index])
        rows = np.array(drawn_rows)
        sentences = gather(self.tables[language], drawn_tables, rows, self.config.side_tokens + 1)
        return [sentence[:-1] for sentence in sentences.rows]

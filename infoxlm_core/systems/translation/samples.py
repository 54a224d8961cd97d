"""Samples of machine translation: clean sentences of one language per step, and their sources.

The source of a sentence is a noisy version of it, or its translation by people or by the model itself.

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
    """Return the weight of denoising at a step, by linear interpolation; 0 without denoising."""
    if not config.denoising:
        return 0.0
    steps = [scheduled_step for scheduled_step, _ in config.denoising]
    weights = [weight for _, weight in config.denoising]
    return float(np.interp(step, steps, weights))


@dataclass(frozen=True)
class TranslationBatch:
    """One micro-batch of an objective."""

    objective: str  # dae: denoising, bt: back-translation, mt: translation pairs
    target: PackedSentences  # clean sentences
    source: PackedSentences | None  # what they are restored from; None: back-translation generates the source
    rng_key: tuple[int, int, int]  # step, virtual shard, number of the micro-batch: seed of dropout

    @property
    def counts(self) -> dict[str, int]:
        """Target tokens, `</s>` included, and all tokens; a generated source counts as many as its target."""
        source = self.source or self.target
        target_tokens = len(self.target.ids) - len(self.target.lengths)  # all but the first `</s>` of each sentence
        return {self.objective: target_tokens, "tokens": len(self.target.ids) + len(source.ids)}


@dataclass(frozen=True)
class Corpus:
    """The sentences of one corpus in the target language, and in a parallel corpus their translations."""

    target: Table
    source: Table | None
    rows: np.ndarray  # numbers of the rows to draw from


class TranslationSampler:
    """Draws sentences uniformly within a language, while objectives and languages alternate from step to step.

    Raises CorpusTooSmall if an objective has no sentence that is short enough.
    """

    def __init__(self, shards: Shards, config: TranslationConfig) -> None:
        self.config = config
        self.mask_id = shards.vocabulary.mask
        all_languages = languages_of(shards)
        self.language_numbers = {language: all_languages.index(language) for language in config.languages}
        self.mono: dict[str, list[Corpus]] = {}
        self.pairs: dict[str, list[Corpus]] = {}
        for language in config.languages:
            if config.denoising or config.back_translation:
                self.mono[language] = _check_text(_select_sentences(shards, language, config), language, config)
            if config.parallel_share:
                pairs = _select_pairs(shards, language, config)
                self.pairs[language] = _check_text(pairs, f"pairs with {language}", config)

    def list_turns(self, step: int) -> list[tuple[str, str]]:
        """Return the pairs (objective, target language) among which the steps around this one alternate."""
        objectives = []
        if denoising_weight(self.config, step):
            objectives.append("dae")
        if self.config.back_translation:
            objectives.append("bt")
        if self.config.parallel_share:
            objectives.append("mt")
        return [(objective, language) for objective in objectives for language in self.config.languages]

    def draw(self, step: int, shard: int) -> TranslationBatch:
        """Return the micro-batch of a virtual shard at a step."""
        turns = self.list_turns(step)
        objective, language = turns[step % len(turns)]
        rng = generator(self.config.seed, step, shard, objective)
        language_number = self.language_numbers[language]
        rng_key = (step, shard, 0)
        if objective == "bt":
            sentences, _ = self._draw(self.mono[language], self.config.back_translation_sentences, rng)
            return TranslationBatch("bt", pack_sentences(sentences, language_number), None, rng_key)
        corpora = self.pairs[language] if objective == "mt" else self.mono[language]
        sentences, translations = self._draw_full_batch(corpora, rng)
        if objective == "mt":
            source = pack_sentences(translations, self.other_number(language_number))
        else:
            noisy_sentences = [add_noise(sentence, self.config.noise, self.mask_id, rng) for sentence in sentences]
            source = pack_sentences(noisy_sentences, language_number)
        return TranslationBatch(objective, pack_sentences(sentences, language_number), source, rng_key)

    def other_number(self, language_number: int) -> int:
        """Return the number of the other language."""
        first_language, second_language = self.language_numbers.values()
        return second_language if language_number == first_language else first_language

    def _draw_full_batch(
        self, corpora: list[Corpus], rng: np.random.Generator
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Draw as many sentences as fit into `batch_tokens`, but at least one. See `_draw`."""
        shortest_sequence = 3  # `</s> x </s>`
        most_sentences = max(1, self.config.batch_tokens // shortest_sequence)
        sentences, translations = self._draw(corpora, most_sentences, rng)
        total_tokens = np.cumsum([len(sentence) + 2 for sentence in sentences])
        count = max(1, int(np.searchsorted(total_tokens, self.config.batch_tokens, side="right")))
        return sentences[:count], translations[:count]

    def _draw(
        self, corpora: list[Corpus], count: int, rng: np.random.Generator
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Draw sentences. Return them without `</s>`, and in a parallel corpus their translations."""
        sampler = TableSampler([[len(corpus.rows) for corpus in corpora]], alpha=1.0)
        drawn_corpora, drawn_indices = sampler.draw(count, rng)  # (count,) each
        drawn_rows = []
        for corpus_number, index in zip(drawn_corpora, drawn_indices, strict=True):
            drawn_rows.append(corpora[corpus_number].rows[index])
        rows = np.array(drawn_rows)
        max_row_tokens = self.config.side_tokens + 1
        targets = gather([corpus.target for corpus in corpora], drawn_corpora, rows, max_row_tokens).rows
        sources = [corpus.source for corpus in corpora if corpus.source]
        if not sources:
            return [sentence[:-1] for sentence in targets], []  # monolingual rows end with </s>
        return targets, gather(sources, drawn_corpora, rows, max_row_tokens).rows


def _short_rows(table: Table, max_tokens: int) -> np.ndarray:
    """Return the numbers of the rows with at most `max_tokens` tokens."""
    return np.flatnonzero(np.diff(table.offsets) <= max_tokens)


def _select_sentences(shards: Shards, language: str, config: TranslationConfig) -> list[Corpus]:
    """Return the sentences of a language that have at most `side_tokens` tokens."""
    max_tokens = config.side_tokens + 1  # stored sentences end with </s>
    tables = [table.read_text() for table in shards.mono.get(language, [])]
    return [Corpus(table, None, _short_rows(table, max_tokens)) for table in tables]


def _select_pairs(shards: Shards, target_language: str, config: TranslationConfig) -> list[Corpus]:
    """Return the share `parallel_share` of the training pairs, with `target_language` on the target side."""
    corpora = []
    for name, tables in shards.pairs.items():
        if sorted(name.split("-")) != sorted(config.languages):
            continue
        for table in tables:
            pairs = table.read_pairs()
            source = pairs.source
            target = pairs.target
            if not name.endswith(f"-{target_language}"):
                source, target = target, source
            is_selected = (pairs.sentence_ids.astype(np.uint64) % 10_000) < 10_000 * config.parallel_share  # (pairs,)
            short_sources = _short_rows(source, config.side_tokens)
            short_targets = _short_rows(target, config.side_tokens)
            short_rows = np.intersect1d(short_sources, short_targets)
            corpora.append(Corpus(target, source, short_rows[is_selected[short_rows]]))
    return corpora


def _check_text(corpora: list[Corpus], text: str, config: TranslationConfig) -> list[Corpus]:
    """Return the corpora. Raise CorpusTooSmall if they have no row to draw from; `text` is their name."""
    if not any(len(corpus.rows) for corpus in corpora):
        raise CorpusTooSmall(
            f"{text} has no sentence of at most {config.side_tokens} tokens: add text, or raise side_tokens or "
            "parallel_share"
        )
    return corpora

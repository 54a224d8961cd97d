"""Training samples for machine translation: clean target sentences in one language per step, and their sources.

The source of a target sentence is a noisy copy, a human translation or the model's own translation. Encoder and decoder
read `</s> x </s>`. Reference: Lample and Conneau 2019, section 5.3.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from infoxlm_core.data.layouts import number_positions
from infoxlm_core.data.sampling import make_rng
from infoxlm_core.data.shards import Shards
from infoxlm_core.errors import CorpusTooSmall
from infoxlm_core.model import devices
from infoxlm_core.systems.text_batches import ShortRows, draw_rows, list_languages, pack_segments, wrap
from infoxlm_core.systems.translation.config import NoiseConfig, TranslationConfig


@dataclass(frozen=True)
class PackedSentences:
    """Sentences `</s> x </s>` of one language, concatenated without padding."""

    ids: Tensor  # (T,)
    positions: Tensor  # (T,)
    types: Tensor  # (T,) language number
    lengths: tuple[int, ...]  # tokens of each sentence

    def to(self, device: torch.device) -> "PackedSentences":
        """Return a copy of the sentences on a device."""
        ids, positions, types = (devices.send(tensor, device) for tensor in (self.ids, self.positions, self.types))
        return PackedSentences(ids, positions, types, self.lengths)


def pack_sentences(sentences: list[np.ndarray], language_number: int) -> PackedSentences:
    """Add `</s>` before and after each sentence of a language, and concatenate the sentences."""
    wrapped = wrap(pack_segments(sentences))
    return PackedSentences(
        ids=torch.from_numpy(wrapped.flat),
        positions=torch.from_numpy(number_positions(wrapped.lengths)),
        types=torch.full((len(wrapped.flat),), language_number),
        lengths=tuple(wrapped.lengths.tolist()),
    )


def add_noise(tokens: np.ndarray, config: NoiseConfig, mask_id: int, rng: np.random.Generator) -> np.ndarray:
    """Shuffle, drop and then mask tokens of a sentence without `</s>` (T,)."""
    # Sorting by position plus random offsets below `shuffle` moves no token by more than `shuffle` positions.
    sort_keys = np.arange(len(tokens)) + rng.uniform(0, config.shuffle, len(tokens))
    tokens = tokens[np.argsort(sort_keys, kind="stable")]
    is_kept = rng.random(len(tokens)) >= config.drop
    if len(tokens) and not is_kept.any():  # keep at least one token
        is_kept[rng.integers(len(tokens))] = True
    tokens = tokens[is_kept]
    is_masked = rng.random(len(tokens)) < config.blank
    return np.where(is_masked, mask_id, tokens)


def denoising_weight(config: TranslationConfig, step: int) -> float:
    """Return the denoising weight at a step, interpolated linearly between the configured steps."""
    if not config.denoising:
        return 0.0
    steps = [scheduled_step for scheduled_step, _ in config.denoising]
    weights = [weight for _, weight in config.denoising]
    return float(np.interp(step, steps, weights))


@dataclass(frozen=True)
class TranslationBatch:
    """A micro-batch of one objective."""

    objective: str  # dae: denoising, bt: back-translation, mt: translation pairs
    target: PackedSentences  # clean sentences
    source: PackedSentences | None  # sentences to translate or restore; None: back-translation generates them
    rng_key: tuple[int, int, int]  # dropout seed: step, virtual shard, micro-batch number

    @property
    def counts(self) -> dict[str, int]:
        """Return the number of predicted tokens and the number of all tokens.

        A source that has not been generated yet counts as many tokens as its target.
        """
        source = self.source or self.target
        target_tokens = len(self.target.ids) - len(self.target.lengths)  # the first `</s>` of a sentence is no target
        return {self.objective: target_tokens, "tokens": len(self.target.ids) + len(source.ids)}


class TranslationSampler:
    """Draws sentences of one language per step, uniformly at random. Objectives and languages alternate.

    Raises CorpusTooSmall if the shards have no text in one of the languages, or if an objective has no sentence of at
    most `side_tokens` tokens.
    """

    def __init__(self, shards: Shards, config: TranslationConfig) -> None:
        self.config = config
        self.mask_id = shards.vocabulary.mask
        all_languages = list_languages(shards)
        for language in config.languages:
            if language not in all_languages:  # for example, all of its text is held out
                raise CorpusTooSmall(
                    f"the shards have no training text in {language}: add text, or choose other translation.languages"
                )
        self.language_numbers = {language: all_languages.index(language) for language in config.languages}
        self.texts: dict[str, list[ShortRows]] = {}  # language -> corpora
        self.pairs: dict[str, list[ShortRows]] = {}  # target language -> corpora with the target as first side
        for language in config.languages:
            if config.denoising or config.back_translation:
                self.texts[language] = _select_sentences(shards, language, config)
                _check_amount_of_text(self.texts[language], language, config)
            if config.parallel_share:
                self.pairs[language] = _select_pairs(shards, language, config)
                _check_amount_of_text(self.pairs[language], f"pairs with {language}", config)

    def _choose_step(self, step: int) -> tuple[str, str]:
        """Choose a step's objective and target language. Steps cycle through all combinations."""
        objectives = []
        if denoising_weight(self.config, step):
            objectives.append("dae")
        if self.config.back_translation:
            objectives.append("bt")
        if self.config.parallel_share:
            objectives.append("mt")
        choices = [(objective, language) for objective in objectives for language in self.config.languages]
        return choices[step % len(choices)]

    def draw(self, step: int, shard: int) -> TranslationBatch:
        """Draw a virtual shard's micro-batch for a step."""
        objective, language = self._choose_step(step)
        rng = make_rng(self.config.seed, step, shard, objective)
        language_number = self.language_numbers[language]
        source = None
        if objective == "bt":  # the learner generates the source
            sentences = self._draw_sentences(language, self.config.back_translation_sentences, rng)
        elif objective == "mt":
            sentences, translations = self._draw_pairs(language, rng)
            source = pack_sentences(translations, self.other_language_number(language_number))
        else:
            sentences = self._take_fitting(self._draw_sentences(language, self._max_sentences, rng))
            noisy_sentences = [add_noise(sentence, self.config.noise, self.mask_id, rng) for sentence in sentences]
            source = pack_sentences(noisy_sentences, language_number)
        target = pack_sentences(sentences, language_number)
        return TranslationBatch(objective, target, source, rng_key=(step, shard, 0))

    def other_language_number(self, language_number: int) -> int:
        """Return the number of the pair's other language."""
        first_language, second_language = self.language_numbers.values()
        return second_language if language_number == first_language else first_language

    @property
    def _max_sentences(self) -> int:
        """Return the number of one-token sentences that fit into a batch."""
        shortest_sequence_tokens = 3  # `</s> x </s>`
        return max(1, self.config.batch_tokens // shortest_sequence_tokens)

    def _draw_sentences(self, language: str, count: int, rng: np.random.Generator) -> list[np.ndarray]:
        """Draw sentences of a language, as tokens without `</s>`."""
        [sentences] = draw_rows(self.texts[language], count, self.config.side_tokens + 1, rng)
        return [sentence[:-1] for sentence in sentences.rows]  # stored sentences end with `</s>`

    def _draw_pairs(self, language: str, rng: np.random.Generator) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Draw a batch of translation pairs. Return the sentences in the given language, and their translations."""
        sentences, translations = draw_rows(self.pairs[language], self._max_sentences, self.config.side_tokens, rng)
        batch_sentences = self._take_fitting(sentences.rows)
        return batch_sentences, translations.rows[: len(batch_sentences)]

    def _take_fitting(self, sentences: list[np.ndarray]) -> list[np.ndarray]:
        """Return the first sentences that together fit into `batch_tokens`, but at least one sentence."""
        cumulative_tokens = np.cumsum([len(sentence) + 2 for sentence in sentences])  # with two `</s>` per sentence
        fitting_count = int(np.searchsorted(cumulative_tokens, self.config.batch_tokens, side="right"))
        return sentences[: max(1, fitting_count)]


def _select_sentences(shards: Shards, language: str, config: TranslationConfig) -> list[ShortRows]:
    """Select a language's sentences of at most `side_tokens` tokens."""
    max_tokens = config.side_tokens + 1  # stored sentences end with </s>
    return [ShortRows.select((table.read_text(),), max_tokens) for table in shards.mono.get(language, [])]


def _select_pairs(shards: Shards, target_language: str, config: TranslationConfig) -> list[ShortRows]:
    """Select a random share `parallel_share` of the short pairs. Their first side is the target language."""
    corpora = []
    for language_pair, tables in shards.pairs.items():
        if set(language_pair.split("-")) != set(config.languages):
            continue
        is_target_second = language_pair.endswith(f"-{target_language}")
        for table in tables:
            pairs = table.read_pairs()
            sides = (pairs.source, pairs.target)
            if is_target_second:
                sides = (pairs.target, pairs.source)
            short_pairs = ShortRows.select(sides, config.side_tokens)
            # Sentence ids are hashes, so selecting by remainder draws pairs at random, in steps of 0.01 %.
            is_selected = (pairs.sentence_ids.astype(np.uint64) % 10_000) < 10_000 * config.parallel_share  # (pairs,)
            selected_rows = short_pairs.row_numbers[is_selected[short_pairs.row_numbers]]
            corpora.append(ShortRows(sides, selected_rows))
    return corpora


def _check_amount_of_text(corpora: list[ShortRows], text_name: str, config: TranslationConfig) -> None:
    """Raise CorpusTooSmall if the corpora have no rows to draw."""
    if not any(len(corpus) for corpus in corpora):
        raise CorpusTooSmall(
            f"{text_name} has no sentence of at most {config.side_tokens} tokens: add text, or raise side_tokens or "
            "parallel_share"
        )

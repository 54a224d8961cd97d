"""Draw, lay out and mask the samples of a step: a pure function of (seed, step, virtual shard)."""

import logging
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from infoxlm_core.config import ObjectivesConfig, PretrainingConfig
from infoxlm_core.data import masking
from infoxlm_core.data.layouts import NOTHING, Sequences, choose, gather, join, lay_out, mix
from infoxlm_core.data.sampling import TableSampler, generator
from infoxlm_core.data.shards import Blocks, Pairs, Shards, end_to_end, make_blocks
from infoxlm_core.data.vocabulary import BOS
from infoxlm_core.errors import CorpusTooSmall

logger = logging.getLogger(__name__)
BEGIN = np.array([BOS], np.uint32)
MAX_DRAWS = 100  # a warning is logged if one pair is drawn more often in a training


@dataclass(frozen=True)
class Masked:
    """Sequences, their masked ids (T,), the rows to predict (N,), and the group of each sequence."""

    sequences: Sequences
    seen: np.ndarray
    rows: np.ndarray
    groups: np.ndarray

    def __getitem__(self, part: slice) -> "Masked":
        ends = np.concatenate([[0], self.sequences.lengths.cumsum()])
        start, stop, _ = part.indices(len(self.sequences.lengths))
        inside = slice(*np.searchsorted(self.rows, (ends[start], ends[stop])))
        return Masked(
            self.sequences[part],
            self.seen[ends[start] : ends[stop]],
            self.rows[inside] - ends[start],
            self.groups[part],
        )


class Views(NamedTuple):
    """Contrast items: query and key views, the ids of the sentences joined in each item (B, 2), and groups (B,)."""

    queries: Sequences
    keys: Sequences
    sentence_ids: np.ndarray
    groups: np.ndarray


@dataclass(frozen=True)
class Draw:
    """The samples of some virtual shards at one step, laid out and masked, in the order of the global batch.

    A group is an index into `Sampler.groups`: the objective and language (pair) of a sample, for metrics.
    """

    mlm: Masked
    tlm: Masked
    queries: Sequences
    keys: Sequences
    sentence_ids: np.ndarray
    groups: np.ndarray


class StepSampler:
    """Base of the samplers of all systems: the size of a virtual shard, and masking."""

    def __init__(self, shards: Shards, config: PretrainingConfig) -> None:
        self.config, self.vocabulary_size, self.starts_word = config, shards.vocabulary_size, None
        self.per_shard = config.batches.global_batch_size // config.batches.virtual_shards
        if config.objectives.whole_words:
            self.starts_word = masking.word_starts(shards.directory / "tokenizer", shards.vocabulary_size)

    def mask(
        self, sequences: Sequences, rng: np.random.Generator, config: ObjectivesConfig | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the masked ids (T,) and the rows (N,) to predict; `config` replaces the objectives of the run."""
        flat, lengths, config = sequences.flat, sequences.lengths, config or self.config.objectives
        return masking.mask(flat, lengths, self.vocabulary_size, config, rng, self.starts_word)


class Sampler(StepSampler):
    """Draws the samples of every step from shards; raises CorpusTooSmall if an objective has no text."""

    def __init__(self, shards: Shards, config: PretrainingConfig) -> None:
        super().__init__(shards, config)
        languages, language_pairs = sorted(shards.mono), sorted(shards.pairs)
        self.blocks: list[Blocks] = []
        block_counts: list[list[int]] = []  # of each language, of each corpus
        for language in languages:
            # The token limit includes <s>, which is added to a block by the layout.
            blocks = [make_blocks(table, config.batches.block_tokens - 1) for table in shards.mono[language]]
            self.blocks += blocks
            block_counts.append([len(block) for block in blocks])
        self.pairs: list[Pairs] = []
        self.pair_names: list[str] = []
        pair_counts: list[list[int]] = []  # of each language pair, of each corpus
        for name in language_pairs:
            self.pairs += shards.pairs[name]
            self.pair_names += [f"{name}/{pairs.corpus}" for pairs in shards.pairs[name]]
            pair_counts.append([len(pairs) for pairs in shards.pairs[name]])
        self.corpora = [pairs.corpus for pairs in self.pairs]
        self._check_amount_of_text()
        self.block_sampler = TableSampler(block_counts, config.batches.alpha)
        self.pair_sampler = TableSampler(pair_counts, config.batches.alpha)
        self.groups = [f"mlm/{name}" for name in languages]
        self.groups += [f"tlm/{name}" for name in language_pairs]
        self.groups += [f"xlco/{name}" for name in language_pairs]
        self.block_groups = _group_of_tables(block_counts)
        self.pair_groups = _group_of_tables(pair_counts) + len(languages)

    def _check_amount_of_text(self) -> None:
        """Raise CorpusTooSmall if an enabled objective has no text."""
        objectives = self.config.objectives
        if objectives.mlm and not self.blocks:
            raise CorpusTooSmall(
                "MLM has no monolingual text: have=0 need=1 block; set objectives.mlm to 0 or add text"
            )
        pair_count = sum(map(len, self.pairs))
        needed = 2 if objectives.xlco and self.config.contrast.mixup else 1
        if (objectives.tlm or objectives.xlco) and pair_count < needed:
            raise CorpusTooSmall(
                f"TLM and XLCO need translation pairs: have={pair_count} need={needed}; add pairs or set both to 0"
            )

    def draw(self, step: int | str, virtual_shards: range, only: str = "") -> Draw:
        """Draw the samples of some virtual shards at a step.

        Args:
            step: the optimizer step, or `prefill…` for the separate stream that fills the queue.
            virtual_shards: slices of the global batch.
            only: "lm" skips contrast; "xlco" skips everything else.
        """
        objectives = self.config.objectives
        mlm: list[Masked] = []
        tlm: list[Masked] = []
        xlco: list[Views] = []
        for shard in virtual_shards:
            key = (self.config.seed, step, shard)
            if objectives.mlm and only != "xlco":
                blocks, groups = self._draw_mlm(generator(*key, "mlm"))
                mlm.append(self._mask_samples(blocks, groups, generator(*key, "mlm mask")))
            if objectives.tlm and only != "xlco":
                pairs, groups = self._draw_tlm(generator(*key, "tlm"))
                tlm.append(self._mask_samples(pairs, groups, generator(*key, "tlm mask")))
            if objectives.xlco and only != "lm":
                views = self._draw_xlco(generator(*key, "xlco"))
                if self.config.contrast.corruption:
                    views = self._corrupt(views, generator(*key, "corruption"))
                xlco.append(views)
        return Draw(_merge(mlm), _merge(tlm), *_merge_views(xlco))

    def draws_of_a_pair(self, steps: int) -> dict[str, float]:
        """Return how often a pair of each corpus (`en-de/wiki`) is drawn in `steps` steps, on average.

        Draws for TLM, for contrast and as partners in mixup are added.
        """
        objectives, contrast, sampler = self.config.objectives, self.config.contrast, self.pair_sampler
        tlm_steps = steps if objectives.tlm else 0
        xlco_steps = max(0, steps - contrast.start_step) if objectives.xlco else 0
        chances = sampler.chances()
        partner_chances = chances if contrast.partner == "next" else sampler.chances_elsewhere(self.corpora)
        draws_per_batch_row = chances * (tlm_steps + xlco_steps) + partner_chances * contrast.mixup * xlco_steps
        draws = draws_per_batch_row * self.config.batches.global_batch_size / np.maximum(sampler.sizes, 1)
        return dict(zip(self.pair_names, draws.tolist(), strict=True))

    def log_draws(self, steps: int) -> None:
        """Log which pairs are drawn most and least often; warn about corpora whose pairs are drawn too often."""
        draws = {name: count for name, count in self.draws_of_a_pair(steps).items() if count}
        if not draws:
            return
        most, least = max(draws, key=draws.__getitem__), min(draws, key=draws.__getitem__)
        logger.info(
            "in %d steps a pair of %s is drawn %.3g times, one of %s %.3g times",
            steps, most, draws[most], least, draws[least],
        )  # fmt: skip
        often = [f"{name} ({count:.0f})" for name, count in draws.items() if count > MAX_DRAWS]
        if often:
            logger.warning(
                "each pair of these corpora is drawn more than %d times: %s: add text, lower batches.alpha or "
                "contrast.mixup, or train for fewer steps", MAX_DRAWS, ", ".join(often[:20]),
            )  # fmt: skip

    def _mask_samples(self, sequences: Sequences, groups: np.ndarray, rng: np.random.Generator) -> Masked:
        seen, rows = self.mask(sequences, rng)
        return Masked(sequences, seen, rows, groups)

    def _corrupt(self, views: Views, rng: np.random.Generator) -> Views:
        """Return both views masked independently; their masked tokens are not predicted."""
        config = self.config.objectives.model_copy(update={"mask_ratio": self.config.contrast.corruption})
        query_ids, _ = self.mask(views.queries, rng, config)
        key_ids, _ = self.mask(views.keys, rng, config)
        queries = Sequences(query_ids, views.queries.lengths)
        return views._replace(queries=queries, keys=Sequences(key_ids, views.keys.lengths))

    def _draw_mlm(self, rng: np.random.Generator) -> tuple[Sequences, np.ndarray]:
        """Draw blocks of text of one language; return them with `<s>` in front, and their groups."""
        tables, rows = self.block_sampler.draw(self.per_shard, rng)
        parts = []
        lengths = np.empty(self.per_shard, np.int64)
        for sample, (table, row) in enumerate(zip(tables.tolist(), rows.tolist(), strict=True)):
            blocks = self.blocks[table]
            start, length = blocks.starts.item(row), blocks.lengths.item(row)
            parts += [BEGIN, blocks.table.tokens[start : start + length]]  # the sentences already end with </s>
            lengths[sample] = length + 1
        return Sequences(end_to_end(parts), lengths), self.block_groups[tables]

    def _read_sides(self, tables: np.ndarray, rows: np.ndarray) -> tuple[Sequences, Sequences]:
        """Return the source and target sides of pairs, truncated to `side_tokens`."""
        limit = self.config.batches.side_tokens
        source = gather([pairs.source for pairs in self.pairs], tables, rows, limit)
        return source, gather([pairs.target for pairs in self.pairs], tables, rows, limit)

    def _draw_tlm(self, rng: np.random.Generator) -> tuple[Sequences, np.ndarray]:
        """Draw pairs; return each as one sequence, with the sides in random order, and their groups."""
        tables, rows = self.pair_sampler.draw(self.per_shard, rng)
        source, target = self._read_sides(tables, rows)
        is_swapped = rng.random(self.per_shard) < 0.5
        first, second = choose(is_swapped, target, source), choose(is_swapped, source, target)
        return lay_out(first, second), self.pair_groups[tables]

    def _draw_xlco(self, rng: np.random.Generator) -> Views:
        """Draw pairs and their mixup partners; return them as contrast items."""
        contrast, count = self.config.contrast, self.per_shard
        tables, rows = self.pair_sampler.draw(count, rng)
        own_ids = self._sentence_ids(tables, rows)
        other_tables, other_rows, partner_ids = self._draw_partners(tables, rows, own_ids, rng)
        mode = rng.integers(0, 8, count)
        uniform = rng.random((2, count))
        is_joined = uniform[0] < contrast.mixup
        is_crossed = uniform[1] < contrast.cross
        pairs, partners = self._read_sides(tables, rows), self._read_sides(other_tables, other_rows)
        queries, keys = mix(pairs, partners, mode, is_crossed, is_joined)
        sentence_ids = np.stack([own_ids, np.where(is_joined, partner_ids, own_ids)], axis=1)
        tlm_group_count = len(self.pair_sampler.totals)  # XLCO's groups follow TLM's, one of each language pair
        return Views(queries, keys, sentence_ids, self.pair_groups[tables] + tlm_group_count)

    def _draw_partners(
        self, tables: np.ndarray, rows: np.ndarray, sentence_ids: np.ndarray, rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the tables, rows and sentence ids of mixup partners, (count,) each.

        A partner comes from another corpus if there is one, and is never a translation of the same sentence.
        """
        if self.config.contrast.partner == "next":
            following = (rows + 1) % np.array([len(pairs) for pairs in self.pairs])[tables]
            return tables, following, self._sentence_ids(tables, following)
        other_tables, other_rows = self.pair_sampler.draw_elsewhere(tables, self.corpora, rng)
        for _ in range(100):
            partner_ids = self._sentence_ids(other_tables, other_rows)
            is_same = sentence_ids == partner_ids
            if not is_same.any() or not self.config.contrast.mixup:
                return other_tables, other_rows, partner_ids
            redrawn_tables, redrawn_rows = self.pair_sampler.draw_elsewhere(tables[is_same], self.corpora, rng)
            other_tables[is_same] = redrawn_tables
            other_rows[is_same] = redrawn_rows
        raise CorpusTooSmall("mixup finds no second sentence in the pairs: have=1 need=2; set contrast.mixup to 0")

    def _sentence_ids(self, tables: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Return the sentence ids of pairs, (count,)."""
        drawn = zip(tables.tolist(), rows.tolist(), strict=True)
        return np.array([self.pairs[table].sentence_ids.item(row) for table, row in drawn], np.int64)


def _group_of_tables(counts: list[list[int]]) -> np.ndarray:
    """Return the index of the language (pair) of each table, in the order of the tables."""
    return np.repeat(np.arange(len(counts)), [len(tables) for tables in counts])


def _merge(parts: list[Masked]) -> Masked:
    """Concatenate masked sequences; the rows to predict are then those of the concatenation."""
    if not parts:
        return Masked(NOTHING, NOTHING.flat, NOTHING.flat, NOTHING.flat)
    rows = []
    first_row = 0
    for part in parts:
        rows.append(part.rows + first_row)
        first_row += len(part.seen)
    return Masked(
        join([part.sequences for part in parts]),
        np.concatenate([part.seen for part in parts]),
        np.concatenate(rows),
        np.concatenate([part.groups for part in parts]),
    )


def _merge_views(parts: list[Views]) -> Views:
    """Concatenate contrast items."""
    if not parts:
        return Views(NOTHING, NOTHING, np.empty((0, 2), np.int64), NOTHING.flat)
    return Views(
        join([part.queries for part in parts]),
        join([part.keys for part in parts]),
        np.concatenate([part.sentence_ids for part in parts]),
        np.concatenate([part.groups for part in parts]),
    )

"""Draw, lay out and mask the samples of a step; they depend only on seed, step and virtual shard."""

import logging
from dataclasses import dataclass, replace

import numpy as np

from infoxlm_core.config import ObjectivesConfig, PretrainingConfig
from infoxlm_core.data import masking
from infoxlm_core.data.layouts import EMPTY, Sequences, choose, gather, join, lay_out
from infoxlm_core.data.mixup import mix
from infoxlm_core.data.sampling import TableSampler, make_rng
from infoxlm_core.data.shards import Blocks, Pairs, Shards, StoredTable, Table, concatenate_int64, make_blocks
from infoxlm_core.data.window import MovingWindow, Window
from infoxlm_core.errors import CorpusTooSmall

logger = logging.getLogger(__name__)
MAX_DRAWS = 100  # a warning is logged if a pair is drawn more often than this during training
MAX_PARTNER_DRAWS = 100  # after so many attempts all pairs are assumed to translate the same sentence


@dataclass(frozen=True)
class Masked:
    """N sequences of T tokens with some tokens masked."""

    sequences: Sequences  # with the original tokens
    masked_ids: np.ndarray  # (T,) the input of the model
    target_indices: np.ndarray  # (targets,) ascending indices of the tokens to predict
    groups: np.ndarray  # (N,) the group of each sequence

    def __getitem__(self, selected: slice) -> "Masked":
        """Return consecutive sequences, with target indices that count from the first of their tokens."""
        offsets = np.concatenate([[0], self.sequences.lengths.cumsum()])  # (N + 1,)
        start, stop, _ = selected.indices(len(self.sequences.lengths))
        first_target, end_target = np.searchsorted(self.target_indices, (offsets[start], offsets[stop]))
        return Masked(
            self.sequences[selected],
            self.masked_ids[offsets[start] : offsets[stop]],
            self.target_indices[first_target:end_target] - offsets[start],
            self.groups[selected],
        )


@dataclass(frozen=True)
class Views:
    """The query and key views of N contrast items."""

    queries: Sequences
    keys: Sequences
    sentence_ids: np.ndarray  # (N, 2) ids of the sentences that each view joins
    groups: np.ndarray  # (N,)

    def __getitem__(self, selected: slice) -> "Views":
        """Return the views of consecutive items."""
        return Views(self.queries[selected], self.keys[selected], self.sentence_ids[selected], self.groups[selected])

    def with_exchanged_copy(self) -> "Views":
        """Return each item twice: all items as they are, then all items with query and key view exchanged."""
        return Views(
            join([self.queries, self.keys]),
            join([self.keys, self.queries]),
            np.tile(self.sentence_ids, (2, 1)),
            np.tile(self.groups, 2),
        )


@dataclass(frozen=True)
class Draw:
    """The samples of some virtual shards at one step, laid out and masked, in the order of the global batch.

    A group is an index into `Sampler.groups`: the objective, language (pair) and corpus of a sample, for metrics.
    """

    mlm: Masked
    tlm: Masked
    xlco: Views


class StepSampler:
    """Base class of all samplers: the size of a virtual shard, and masking."""

    def __init__(self, shards: Shards, config: PretrainingConfig) -> None:
        self.config = config
        self.vocabulary = shards.vocabulary
        self.starts_word: np.ndarray | None = None  # (V,)
        self.samples_per_shard = config.batches.global_batch_size // config.batches.virtual_shards
        if config.objectives.whole_words:
            self.starts_word = masking.find_word_starts(shards.directory / "tokenizer", shards.vocabulary_size)

    def mask(
        self, sequences: Sequences, rng: np.random.Generator, config: ObjectivesConfig | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the masked ids (T,) and the indices of the tokens to predict. `config` replaces that of the run."""
        objectives = config or self.config.objectives
        return masking.mask(sequences.flat, sequences.lengths, self.vocabulary, objectives, rng, self.starts_word)


class Sampler(StepSampler):
    """Draws the samples of every step from shards."""

    def __init__(self, shards: Shards, config: PretrainingConfig) -> None:
        """Count the samples of each table. Raise CorpusTooSmall if an enabled objective has no text."""
        super().__init__(shards, config)
        self.has_block_index = shards.manifest["facts"]["block_tokens"] == config.batches.block_tokens
        self._warn_if_block_sizes_differ(shards)
        self.texts: list[StoredTable] = []  # one item for each corpus of each language
        blocks_in_parts: list[np.ndarray] = []  # of each text, (parts,)
        blocks_by_language: list[list[int]] = []  # of each language, of each corpus
        for language in sorted(shards.mono):
            tables = shards.mono[language]
            counts = [self._count_blocks(table) for table in tables]
            self.texts += tables
            blocks_in_parts += counts
            blocks_by_language.append([int(part_counts.sum()) for part_counts in counts])
        self.pairs: list[StoredTable] = []  # one item for each corpus of each language pair
        pairs_by_language_pair: list[list[int]] = []  # of each language pair, of each corpus
        for language_pair in sorted(shards.pairs):
            tables = shards.pairs[language_pair]
            self.pairs += tables
            pairs_by_language_pair.append([len(table) for table in tables])
        self.corpora = [table.corpus for table in self.pairs]
        self._check_amount_of_text()
        batches = config.batches
        self.block_sampler = TableSampler(blocks_by_language, batches.alpha)
        self.pair_sampler = TableSampler(pairs_by_language_pair, batches.alpha)
        block_draws = self.block_sampler.table_probabilities() * batches.global_batch_size
        self.block_window = MovingWindow(
            self.texts, blocks_in_parts, block_draws, batches.window, config.seed, self._open_blocks
        )
        pair_draws = self._count_pair_draws(int(config.objectives.tlm > 0), int(config.objectives.xlco > 0))
        pairs_in_parts = [table.row_counts for table in self.pairs]
        self.pair_window = MovingWindow(
            self.pairs, pairs_in_parts, pair_draws, batches.window, config.seed, Pairs.of_part
        )
        self.groups = [f"mlm/{table.label}" for table in self.texts]  # such as mlm/de/wiki
        self.groups += [f"tlm/{table.label}" for table in self.pairs]
        self.groups += [f"xlco/{table.label}" for table in self.pairs]

    def _warn_if_block_sizes_differ(self, shards: Shards) -> None:
        """Warn that large text is read before the first step, because the shards were indexed for other blocks."""
        if self.has_block_index or not self.config.objectives.mlm:
            return
        text_bytes = sum(table.byte_count for tables in shards.mono.values() for table in tables)
        if text_bytes > self.config.batches.window:
            logger.warning(
                "all monolingual text (%.1f GB) is read before the first step: to start at once, set "
                "tokenization.block_tokens to batches.block_tokens (%d)",
                text_bytes / 1e9,
                self.config.batches.block_tokens,
            )

    def _open_blocks(self, arrays: dict[str, np.ndarray]) -> Blocks:
        """Return the MLM samples of a part. Their token limit includes `<s>`, which is added by the layout."""
        max_tokens = self.config.batches.block_tokens - 1
        if self.has_block_index:
            return Blocks.of_part(arrays, max_tokens)
        return make_blocks(Table.join([arrays]), max_tokens)

    def _count_blocks(self, table: StoredTable) -> np.ndarray:
        """Return the number of MLM samples in each part of a table, (parts,). Without an index, read all parts."""
        if self.has_block_index or not self.config.objectives.mlm:
            return table.block_counts
        parts = (table.read_part(number) for number in range(table.part_count))
        return np.array([len(self._open_blocks(arrays)) for arrays in parts], np.int64)

    def _check_amount_of_text(self) -> None:
        """Raise CorpusTooSmall if an enabled objective has no text."""
        objectives = self.config.objectives
        if objectives.mlm and not self.texts:
            raise CorpusTooSmall("MLM has no monolingual text (have=0 need=1): add text, or set objectives.mlm to 0")
        pair_count = sum(len(pairs) for pairs in self.pairs)
        min_pairs = 2 if objectives.xlco and self.config.contrast.mixup else 1  # mixup joins two different pairs
        if (objectives.tlm or objectives.xlco) and pair_count < min_pairs:
            raise CorpusTooSmall(
                f"TLM and XLCO need translation pairs (have={pair_count} need={min_pairs}): add pairs, or set both to 0"
            )

    def draw(self, step: int | str, virtual_shards: range, only: str = "") -> Draw:
        """Draw the samples of some virtual shards at a step.

        Args:
            step: the optimizer step, or `prefill…` for the samples that fill the queue before the first step.
            virtual_shards: numbers of virtual shards, the slices of the global batch.
            only: "lm" draws no contrast items, and "xlco" draws nothing else.
        """
        objectives = self.config.objectives
        needs_mlm = objectives.mlm > 0 and only != "xlco"
        needs_tlm = objectives.tlm > 0 and only != "xlco"
        needs_xlco = objectives.xlco > 0 and only != "lm"
        # The queue is filled at the step at which contrast starts.
        window_step = self.config.contrast.start_step if isinstance(step, str) else step
        # Each objective adds its name to the key, so that its samples do not depend on the other objectives.
        rng_keys = [(self.config.seed, step, shard) for shard in virtual_shards]
        mlm: list[Masked] = []
        tlm: list[Masked] = []
        xlco: list[Views] = []
        if needs_mlm:
            text = self.block_window.move_to(window_step)
            mlm = [self._draw_mlm(text, rng_key) for rng_key in rng_keys]
        if needs_tlm or needs_xlco:
            pairs = self.pair_window.move_to(window_step)
            if needs_tlm:
                tlm = [self._draw_tlm(pairs, rng_key) for rng_key in rng_keys]
            if needs_xlco:
                xlco = [self._draw_xlco(pairs, rng_key) for rng_key in rng_keys]
        return Draw(_join_masked(mlm), _join_masked(tlm), _join_views(xlco))

    def draws_per_pair(self, steps: int) -> dict[str, float]:
        """Return how often a pair is drawn in `steps` steps on average, by corpus such as `en-de/wiki`.

        The result counts draws for TLM, for contrast, and as a partner in mixup.
        """
        tlm_steps = steps if self.config.objectives.tlm else 0
        xlco_steps = max(0, steps - self.config.contrast.start_step) if self.config.objectives.xlco else 0
        draws = self._count_pair_draws(tlm_steps, xlco_steps) / np.maximum(self.pair_sampler.sizes, 1)
        return dict(zip([table.label for table in self.pairs], draws.tolist(), strict=True))

    def _count_pair_draws(self, tlm_steps: int, xlco_steps: int) -> np.ndarray:
        """Return the expected number of pairs drawn from each table in these numbers of steps, (tables,)."""
        contrast = self.config.contrast
        probabilities = self.pair_sampler.table_probabilities()  # (tables,)
        partner_probabilities = probabilities
        if contrast.partner != "next":
            partner_probabilities = self.pair_sampler.partner_probabilities(self.corpora)
        sample_draws = probabilities * (tlm_steps + xlco_steps)
        partner_draws = partner_probabilities * contrast.mixup * xlco_steps
        return (sample_draws + partner_draws) * self.config.batches.global_batch_size

    def log_draws(self, steps: int) -> None:
        """Log which pairs are drawn most and least often. Warn about corpora whose pairs are drawn too often."""
        draws = {name: count for name, count in self.draws_per_pair(steps).items() if count}
        if not draws:
            return
        most_drawn = max(draws, key=draws.__getitem__)
        least_drawn = min(draws, key=draws.__getitem__)
        logger.info(
            "in %d steps a pair of %s is drawn %.3g times, a pair of %s %.3g times",
            steps, most_drawn, draws[most_drawn], least_drawn, draws[least_drawn],
        )  # fmt: skip
        drawn_too_often = [f"{name} ({count:.0f})" for name, count in draws.items() if count > MAX_DRAWS]
        if drawn_too_often:
            logger.warning(
                "each pair of these corpora is drawn more than %d times: %s: add text, lower batches.alpha or "
                "contrast.mixup, or train for fewer steps", MAX_DRAWS, ", ".join(drawn_too_often[:20]),
            )  # fmt: skip

    def _corrupt(self, views: Views, rng: np.random.Generator) -> Views:
        """Return views whose queries and keys are masked independently. The masked tokens are not predicted."""
        config = self.config.objectives.model_copy(update={"mask_ratio": self.config.contrast.corruption})
        query_ids, _ = self.mask(views.queries, rng, config)
        key_ids, _ = self.mask(views.keys, rng, config)
        return replace(
            views,
            queries=Sequences(query_ids, views.queries.lengths),
            keys=Sequences(key_ids, views.keys.lengths),
        )

    def _draw_mlm(self, window: Window[Blocks], rng_key: tuple[object, ...]) -> Masked:
        """Draw the MLM samples of a virtual shard."""
        rng = make_rng(*rng_key, "mlm")
        tables, rows = self.block_sampler.draw(self.samples_per_shard, rng, window.row_counts)
        parts, rows = window.locate(tables, rows)
        begin = np.array([self.vocabulary.begin], np.uint32)
        token_ids: list[np.ndarray] = []
        lengths = []
        for blocks, row in zip(parts, rows.tolist(), strict=True):
            start = blocks.starts.item(row)
            length = blocks.lengths.item(row)
            token_ids += [begin, blocks.table.tokens[start : start + length]]  # each sentence ends with </s> already
            lengths.append(length + 1)
        sequences = Sequences(concatenate_int64(token_ids), np.array(lengths, np.int64))
        return Masked(sequences, *self.mask(sequences, make_rng(*rng_key, "mlm mask")), tables)

    def _read_sides(self, window: Window[Pairs], tables: np.ndarray, rows: np.ndarray) -> tuple[Sequences, Sequences]:
        """Return the source and target sides of pairs, truncated to the configured length."""
        max_tokens = self.config.batches.side_tokens
        parts, rows = window.locate(tables, rows)
        part_indices = np.arange(len(parts))
        source = gather([pairs.source for pairs in parts], part_indices, rows, max_tokens)
        target = gather([pairs.target for pairs in parts], part_indices, rows, max_tokens)
        return source, target

    def _draw_tlm(self, window: Window[Pairs], rng_key: tuple[object, ...]) -> Masked:
        """Draw the TLM samples of a virtual shard, with the sides of each pair in random order."""
        rng = make_rng(*rng_key, "tlm")
        tables, rows = self.pair_sampler.draw(self.samples_per_shard, rng, window.row_counts)
        source, target = self._read_sides(window, tables, rows)
        is_swapped = rng.random(self.samples_per_shard) < 0.5
        first_side = choose(is_swapped, target, source)
        second_side = choose(is_swapped, source, target)
        sequences = lay_out([first_side, second_side], self.vocabulary)
        groups = tables + len(self.texts)  # the groups of TLM follow those of MLM
        return Masked(sequences, *self.mask(sequences, make_rng(*rng_key, "tlm mask")), groups)

    def _draw_xlco(self, window: Window[Pairs], rng_key: tuple[object, ...]) -> Views:
        """Draw the contrast items of a virtual shard: pairs, and the pairs that mixup joins with them."""
        contrast = self.config.contrast
        count = self.samples_per_shard
        rng = make_rng(*rng_key, "xlco")
        # The random numbers are drawn in this order, whether they are used or not; another order changes all samples.
        tables, rows = self.pair_sampler.draw(count, rng, window.row_counts)
        sentence_ids = _read_sentence_ids(window, tables, rows)
        partner_tables, partner_rows, partner_ids = self._draw_partners(window, tables, rows, sentence_ids, rng)
        modes = rng.integers(0, 8, count)
        is_joined = rng.random(count) < contrast.mixup
        is_crossed = rng.random(count) < contrast.cross
        pairs = self._read_sides(window, tables, rows)
        partners = self._read_sides(window, partner_tables, partner_rows)
        queries, keys = mix(pairs, partners, modes, is_crossed, is_joined, self.vocabulary)
        # A view of a single sentence repeats its id, which the comparison of sentence ids allows for.
        joined_ids = np.stack([sentence_ids, np.where(is_joined, partner_ids, sentence_ids)], axis=1)  # (count, 2)
        groups = tables + len(self.texts) + len(self.pairs)  # the groups of XLCO follow those of TLM
        views = Views(queries, keys, joined_ids, groups)
        return self._corrupt(views, make_rng(*rng_key, "corruption")) if contrast.corruption else views

    def _draw_partners(
        self,
        window: Window[Pairs],
        tables: np.ndarray,
        rows: np.ndarray,
        sentence_ids: np.ndarray,
        rng: np.random.Generator,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the tables, rows and sentence ids of mixup partners, (count,) each.

        Unless `contrast.partner` is `next`, a partner comes from another corpus if there is one. With mixup, it never
        has the sentence id of its pair.
        """
        if self.config.contrast.partner == "next":
            next_rows = (rows + 1) % window.row_counts[tables]
            return tables, next_rows, _read_sentence_ids(window, tables, next_rows)
        row_counts = window.row_counts
        partner_tables, partner_rows = self.pair_sampler.draw_partners(tables, self.corpora, rng, row_counts)
        for _ in range(MAX_PARTNER_DRAWS):
            partner_ids = _read_sentence_ids(window, partner_tables, partner_rows)
            has_same_sentence = sentence_ids == partner_ids
            if not has_same_sentence.any() or not self.config.contrast.mixup:
                return partner_tables, partner_rows, partner_ids
            new_tables, new_rows = self.pair_sampler.draw_partners(
                tables[has_same_sentence], self.corpora, rng, row_counts
            )
            partner_tables[has_same_sentence] = new_tables
            partner_rows[has_same_sentence] = new_rows
        raise CorpusTooSmall("mixup needs pairs of two different sentences (have=1 need=2): set contrast.mixup to 0")


def _read_sentence_ids(window: Window[Pairs], tables: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return the sentence id of each pair, (count,)."""
    parts, rows_in_parts = window.locate(tables, rows)
    part_rows = zip(parts, rows_in_parts.tolist(), strict=True)
    return np.array([pairs.sentence_ids.item(row) for pairs, row in part_rows], np.int64)


def _join_masked(batches: list[Masked]) -> Masked:
    """Concatenate masked sequences, and shift their target indices so that they index the concatenated tokens."""
    if not batches:
        return Masked(EMPTY, EMPTY.flat, EMPTY.flat, EMPTY.flat)
    target_indices = []
    first_token = 0
    for batch in batches:
        target_indices.append(batch.target_indices + first_token)
        first_token += len(batch.masked_ids)
    return Masked(
        join([batch.sequences for batch in batches]),
        np.concatenate([batch.masked_ids for batch in batches]),
        np.concatenate(target_indices),
        np.concatenate([batch.groups for batch in batches]),
    )


def _join_views(batches: list[Views]) -> Views:
    """Concatenate views."""
    if not batches:
        return Views(EMPTY, EMPTY, np.empty((0, 2), np.int64), EMPTY.flat)
    return Views(
        join([views.queries for views in batches]),
        join([views.keys for views in batches]),
        np.concatenate([views.sentence_ids for views in batches]),
        np.concatenate([views.groups for views in batches]),
    )

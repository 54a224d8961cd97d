"""Draw, lay out and mask a step's samples. They depend only on seed, step and virtual shard."""

import logging
from dataclasses import dataclass, replace

import numpy as np

from infoxlm_core.config import ObjectivesConfig, PretrainingConfig
from infoxlm_core.data import masking
from infoxlm_core.data.layouts import EMPTY, Sequences, choose_sequences, join, lay_out, read_rows
from infoxlm_core.data.mixup import mix
from infoxlm_core.data.sampling import TableSampler, make_rng
from infoxlm_core.data.shards import Blocks, Pairs, Shards, StoredTable, Table, concatenate_int64, make_blocks
from infoxlm_core.data.window import MovingWindow, Window
from infoxlm_core.errors import CorpusTooSmall

logger = logging.getLogger(__name__)
MAX_DRAWS = 100  # draws of a pair during training; more draws cause a warning
MAX_PARTNER_DRAWS = 100  # attempts after which all possible partners are assumed to translate the same sentence


@dataclass(frozen=True)
class MaskedSequences:
    """N sequences with T tokens in total, of which some are masked."""

    sequences: Sequences  # original tokens
    masked_ids: np.ndarray  # (T,) model input
    target_indices: np.ndarray  # (targets,) ascending indices of the tokens to predict
    group_ids: np.ndarray  # (N,) each sequence's index into `Sampler.group_names`

    def __getitem__(self, selected: slice) -> "MaskedSequences":
        """Return consecutive sequences, with target indices relative to their first token."""
        offsets = np.concatenate([[0], self.sequences.lengths.cumsum()])  # (N + 1,)
        start, stop, _ = selected.indices(len(self.sequences.lengths))
        first_target, end_target = np.searchsorted(self.target_indices, (offsets[start], offsets[stop]))
        return MaskedSequences(
            self.sequences[selected],
            self.masked_ids[offsets[start] : offsets[stop]],
            self.target_indices[first_target:end_target] - offsets[start],
            self.group_ids[selected],
        )


@dataclass(frozen=True)
class ContrastViews:
    """Query and key views of N contrast samples."""

    queries: Sequences
    keys: Sequences
    sentence_ids: np.ndarray  # (N, 2) ids of the sentences joined in each view
    group_ids: np.ndarray  # (N,) each sample's index into `Sampler.group_names`

    def __getitem__(self, selected: slice) -> "ContrastViews":
        """Return views of consecutive samples."""
        return ContrastViews(
            self.queries[selected], self.keys[selected], self.sentence_ids[selected], self.group_ids[selected]
        )

    def with_exchanged_copy(self) -> "ContrastViews":
        """Return all samples, followed by all samples with query and key views exchanged."""
        return ContrastViews(
            join([self.queries, self.keys]),
            join([self.keys, self.queries]),
            np.tile(self.sentence_ids, (2, 1)),
            np.tile(self.group_ids, 2),
        )


@dataclass(frozen=True)
class DrawnSamples:
    """Samples of some virtual shards at one step, laid out and masked, in the order of the global batch."""

    mlm: MaskedSequences
    tlm: MaskedSequences
    xlco: ContrastViews


@dataclass(frozen=True)
class _DrawnPairs:
    """Translation pairs that were drawn from a window."""

    table_ids: np.ndarray  # (count,) index into `Sampler.pairs`
    rows: np.ndarray  # (count,) index into the table's pairs in the window
    sentence_ids: np.ndarray  # (count,)


class StepSampler:
    """Base class of all samplers. Computes the size of a virtual shard, and masks tokens."""

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
        """Return the masked ids (T,) and the indices of the tokens to predict. `config` is by default the run's."""
        objectives = config or self.config.objectives
        return masking.mask(sequences.flat, sequences.lengths, self.vocabulary, objectives, rng, self.starts_word)


class Sampler(StepSampler):
    """Draws the samples of every step from shards."""

    def __init__(self, shards: Shards, config: PretrainingConfig) -> None:
        """Count each table's samples. Raise CorpusTooSmall if an enabled objective has too little text."""
        super().__init__(shards, config)
        self.has_block_index = shards.manifest["facts"]["block_tokens"] == config.batches.block_tokens
        self._warn_if_block_sizes_differ(shards)
        self.texts: list[StoredTable] = []  # one table per language and corpus
        blocks_in_parts: list[np.ndarray] = []  # block counts (parts,) of each text
        blocks_by_language: list[list[int]] = []  # block count by language and corpus
        for language in sorted(shards.mono):
            tables = shards.mono[language]
            counts = [self._count_blocks(table) for table in tables]
            self.texts += tables
            blocks_in_parts += counts
            blocks_by_language.append([int(part_counts.sum()) for part_counts in counts])
        self.pairs: list[StoredTable] = []  # one table per language pair and corpus
        pairs_by_language_pair: list[list[int]] = []  # pair count by language pair and corpus
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
        # Mean draws in one step, to which each enabled objective contributes.
        pair_draws = self._count_pair_draws(
            tlm_steps=int(config.objectives.tlm > 0), xlco_steps=int(config.objectives.xlco > 0)
        )
        pairs_in_parts = [table.row_counts for table in self.pairs]
        self.pair_window = MovingWindow(
            self.pairs, pairs_in_parts, pair_draws, batches.window, config.seed, Pairs.of_part
        )
        # Metrics count samples by group: objective, language (pair) and corpus, such as mlm/de/wiki.
        self.group_names = [f"mlm/{table.label}" for table in self.texts]
        self.group_names += [f"tlm/{table.label}" for table in self.pairs]
        self.group_names += [f"xlco/{table.label}" for table in self.pairs]

    def _warn_if_block_sizes_differ(self, shards: Shards) -> None:
        """Warn if the sampler must read all text before the first step, to compute blocks of the configured size.

        The block index of the shards lists the MLM samples (blocks) for only one size.
        """
        if self.has_block_index or not self.config.objectives.mlm:
            return
        text_bytes = sum(table.byte_count for tables in shards.mono.values() for table in tables)
        if text_bytes > self.config.batches.window:  # otherwise, the first window contains all text anyway
            logger.warning(
                "all monolingual text (%.1f GB) is read before the first step: to start at once, set "
                "tokenization.block_tokens to batches.block_tokens (%d)",
                text_bytes / 1e9,
                self.config.batches.block_tokens,
            )

    def _open_blocks(self, arrays: dict[str, np.ndarray]) -> Blocks:
        """Return a part's MLM samples, with room for `<s>` within the token limit."""
        max_tokens = self.config.batches.block_tokens - 1
        if self.has_block_index:
            return Blocks.of_part(arrays, max_tokens)
        return make_blocks(Table.join([arrays]), max_tokens)

    def _count_blocks(self, table: StoredTable) -> np.ndarray:
        """Count the MLM samples in each part of a table (parts,). Without a block index, read all parts."""
        if self.has_block_index or not self.config.objectives.mlm:
            return table.block_counts
        parts = (table.read_part(number) for number in range(table.part_count))
        return np.array([len(self._open_blocks(arrays)) for arrays in parts], np.int64)

    def _check_amount_of_text(self) -> None:
        """Raise CorpusTooSmall if an enabled objective has too little text."""
        objectives = self.config.objectives
        if objectives.mlm and not self.texts:
            raise CorpusTooSmall("MLM has no monolingual text: add text, or set objectives.mlm to 0")
        pair_count = sum(len(pairs) for pairs in self.pairs)
        min_pairs = 2 if objectives.xlco and self.config.contrast.mixup else 1  # mixup joins two different pairs
        if (objectives.tlm or objectives.xlco) and pair_count < min_pairs:
            raise CorpusTooSmall(
                f"TLM and XLCO need translation pairs (at least {min_pairs}, but the shards contain {pair_count}): add "
                "pairs, or set objectives.tlm and objectives.xlco to 0"
            )

    def draw(self, step: int, virtual_shards: range, has_contrast: bool = True) -> DrawnSamples:
        """Draw a step's samples for a range of virtual shards. Without `has_contrast`, omit XLCO samples."""
        objectives = self.config.objectives
        # Each objective adds its name to the key, so that its samples are independent of other objectives.
        rng_keys = [(self.config.seed, step, shard) for shard in virtual_shards]
        mlm: list[MaskedSequences] = []
        tlm: list[MaskedSequences] = []
        xlco: list[ContrastViews] = []
        if objectives.mlm:
            block_window = self.block_window.move_to(step)
            mlm = [self._draw_mlm(block_window, rng_key) for rng_key in rng_keys]
        if objectives.tlm:
            pair_window = self.pair_window.move_to(step)
            tlm = [self._draw_tlm(pair_window, rng_key) for rng_key in rng_keys]
        if objectives.xlco and has_contrast:
            pair_window = self.pair_window.move_to(step)
            xlco = [self._draw_xlco(pair_window, rng_key) for rng_key in rng_keys]
        return DrawnSamples(_join_masked(mlm), _join_masked(tlm), _join_views(xlco))

    def draw_for_queue(self, draw_number: int, virtual_shards: range) -> DrawnSamples:
        """Draw contrast samples for filling the queue before the first XLCO step."""
        pair_window = self.pair_window.move_to(self.config.contrast.start_step)
        # No step uses this key, so the first steps do not repeat the queue's samples.
        rng_keys = [(self.config.seed, f"prefill {draw_number}", shard) for shard in virtual_shards]
        xlco = [self._draw_xlco(pair_window, rng_key) for rng_key in rng_keys]
        return DrawnSamples(_join_masked([]), _join_masked([]), _join_views(xlco))

    def count_draws_per_pair(self, steps: int) -> dict[str, float]:
        """Return the mean number of draws per pair in `steps` steps, by corpus such as `en-de/wiki`.

        Draws for TLM, for contrast, and as mixup partners are counted.
        """
        tlm_steps = steps if self.config.objectives.tlm else 0
        xlco_steps = max(0, steps - self.config.contrast.start_step) if self.config.objectives.xlco else 0
        draws = self._count_pair_draws(tlm_steps, xlco_steps) / np.maximum(self.pair_sampler.sizes, 1)
        return dict(zip([table.label for table in self.pairs], draws.tolist(), strict=True))

    def _count_pair_draws(self, tlm_steps: int, xlco_steps: int) -> np.ndarray:
        """Return the mean number of pairs drawn from each table (tables,) in the given numbers of steps."""
        contrast = self.config.contrast
        probabilities = self.pair_sampler.table_probabilities()  # (tables,)
        partner_probabilities = probabilities
        if contrast.partner != "next":
            partner_probabilities = self.pair_sampler.partner_probabilities(self.corpora)
        sample_draws = probabilities * (tlm_steps + xlco_steps)
        partner_draws = partner_probabilities * contrast.mixup * xlco_steps
        return (sample_draws + partner_draws) * self.config.batches.global_batch_size

    def log_draw_counts(self, steps: int) -> None:
        """Log how often pairs are drawn in `steps` training steps. Warn about corpora that are too small for them."""
        counts_by_corpus = self.count_draws_per_pair(steps)
        drawn_corpora = [corpus for corpus, count in counts_by_corpus.items() if count]
        if not drawn_corpora:
            return
        most_frequent = max(drawn_corpora, key=lambda corpus: counts_by_corpus[corpus])
        rarest = min(drawn_corpora, key=lambda corpus: counts_by_corpus[corpus])
        logger.info(
            "in %d steps, each pair of %s is drawn about %.3g times, and each pair of %s about %.3g times",
            steps, most_frequent, counts_by_corpus[most_frequent], rarest, counts_by_corpus[rarest],
        )  # fmt: skip
        drawn_too_often = [f"{name} ({count:.0f})" for name, count in counts_by_corpus.items() if count > MAX_DRAWS]
        if drawn_too_often:
            logger.warning(
                "each pair of these corpora is drawn more than %d times: %s. Add text, lower batches.alpha or "
                "contrast.mixup, or train for fewer steps", MAX_DRAWS, ", ".join(drawn_too_often[:20]),
            )  # fmt: skip

    def _draw_mlm(self, window: Window[Blocks], rng_key: tuple[object, ...]) -> MaskedSequences:
        """Draw a virtual shard's MLM samples."""
        rng = make_rng(*rng_key, "mlm")
        table_ids, rows = self.block_sampler.draw(self.samples_per_shard, rng, window.row_counts)
        sequences = self._read_blocks(window, table_ids, rows)
        return self._mask_sequences(sequences, make_rng(*rng_key, "mlm mask"), group_ids=table_ids)

    def _read_blocks(self, window: Window[Blocks], table_ids: np.ndarray, rows: np.ndarray) -> Sequences:
        """Return the tokens of blocks, with `<s>` before each block. Sentences in blocks already end with `</s>`."""
        parts, rows_in_parts = window.locate(table_ids, rows)
        begin = np.array([self.vocabulary.begin], np.uint32)
        token_ids: list[np.ndarray] = []
        lengths = []
        for blocks, row in zip(parts, rows_in_parts.tolist(), strict=True):
            start = blocks.starts.item(row)
            length = blocks.lengths.item(row)
            token_ids += [begin, blocks.table.tokens[start : start + length]]
            lengths.append(1 + length)
        return Sequences(concatenate_int64(token_ids), np.array(lengths, np.int64))

    def _draw_tlm(self, window: Window[Pairs], rng_key: tuple[object, ...]) -> MaskedSequences:
        """Draw a virtual shard's TLM samples, with the sides of each pair in random order."""
        rng = make_rng(*rng_key, "tlm")
        table_ids, rows = self.pair_sampler.draw(self.samples_per_shard, rng, window.row_counts)
        source, target = self._read_sides(window, table_ids, rows)
        is_swapped = rng.random(self.samples_per_shard) < 0.5
        first_side = choose_sequences(is_swapped, target, source)
        second_side = choose_sequences(is_swapped, source, target)
        sequences = lay_out([first_side, second_side], self.vocabulary)
        group_ids = table_ids + len(self.texts)  # TLM groups follow MLM groups
        return self._mask_sequences(sequences, make_rng(*rng_key, "tlm mask"), group_ids)

    def _read_sides(
        self, window: Window[Pairs], table_ids: np.ndarray, rows: np.ndarray
    ) -> tuple[Sequences, Sequences]:
        """Return the source and target sides of pairs, truncated to the configured length."""
        max_tokens = self.config.batches.side_tokens
        parts, rows_in_parts = window.locate(table_ids, rows)
        source = read_rows([pairs.source for pairs in parts], rows_in_parts, max_tokens)
        target = read_rows([pairs.target for pairs in parts], rows_in_parts, max_tokens)
        return source, target

    def _mask_sequences(self, sequences: Sequences, rng: np.random.Generator, group_ids: np.ndarray) -> MaskedSequences:
        """Choose the tokens to predict and mask them."""
        masked_ids, target_indices = self.mask(sequences, rng)
        return MaskedSequences(sequences, masked_ids, target_indices, group_ids)

    def _draw_xlco(self, window: Window[Pairs], rng_key: tuple[object, ...]) -> ContrastViews:
        """Draw a virtual shard's contrast samples: translation pairs, most of which are joined by mixup."""
        contrast = self.config.contrast
        count = self.samples_per_shard
        rng = make_rng(*rng_key, "xlco")
        # Always draw all random numbers in this order. A different order would change all samples.
        table_ids, rows = self.pair_sampler.draw(count, rng, window.row_counts)
        pairs = _make_drawn_pairs(window, table_ids, rows)
        partners = self._draw_partners(window, pairs, rng)
        modes = rng.integers(0, 8, count)  # three random bits: reverse source, reverse target, exchange sides
        is_joined = rng.random(count) < contrast.mixup
        is_crossed = rng.random(count) < contrast.cross

        pair_sides = self._read_sides(window, pairs.table_ids, pairs.rows)
        partner_sides = self._read_sides(window, partners.table_ids, partners.rows)
        queries, keys = mix(pair_sides, partner_sides, modes, is_crossed, is_joined, self.vocabulary)
        # Views without a partner repeat the id of their only sentence.
        second_ids = np.where(is_joined, partners.sentence_ids, pairs.sentence_ids)
        sentence_ids = np.stack([pairs.sentence_ids, second_ids], axis=1)  # (count, 2)
        group_ids = pairs.table_ids + len(self.texts) + len(self.pairs)  # XLCO groups follow TLM groups
        views = ContrastViews(queries, keys, sentence_ids, group_ids)
        if contrast.corruption:
            return self._mask_views(views, make_rng(*rng_key, "corruption"))
        return views

    def _draw_partners(self, window: Window[Pairs], pairs: _DrawnPairs, rng: np.random.Generator) -> _DrawnPairs:
        """Draw a mixup partner for each pair.

        Unless `contrast.partner` is `next`, a partner translates a different sentence, and comes from a different
        corpus if possible.

        Raises:
            CorpusTooSmall: a pair has no possible partner, because all pairs translate the same sentence.
        """
        if self.config.contrast.partner == "next":
            next_rows = (pairs.rows + 1) % window.row_counts[pairs.table_ids]  # the first pair follows the last
            return _make_drawn_pairs(window, pairs.table_ids, next_rows)
        table_ids, rows = self.pair_sampler.draw_partners(pairs.table_ids, self.corpora, rng, window.row_counts)
        for draw_number in range(2 * MAX_PARTNER_DRAWS):
            partners = _make_drawn_pairs(window, table_ids, rows)
            is_same_sentence = pairs.sentence_ids == partners.sentence_ids
            if not is_same_sentence.any() or not self.config.contrast.mixup:  # without mixup, partners are unused
                return partners
            tables_of_pairs = pairs.table_ids[is_same_sentence]
            if draw_number < MAX_PARTNER_DRAWS:
                drawn = self.pair_sampler.draw_partners(tables_of_pairs, self.corpora, rng, window.row_counts)
            else:  # the other corpora have no different sentence
                drawn = self.pair_sampler.draw(len(tables_of_pairs), rng, window.row_counts)
            table_ids[is_same_sentence], rows[is_same_sentence] = drawn
        raise CorpusTooSmall("mixup finds no pairs of two different sentences: add pairs, or set contrast.mixup to 0")

    def _mask_views(self, views: ContrastViews, rng: np.random.Generator) -> ContrastViews:
        """Mask queries and keys independently. The masked tokens are not predicted."""
        config = self.config.objectives.model_copy(update={"mask_ratio": self.config.contrast.corruption})
        query_ids, _ = self.mask(views.queries, rng, config)
        key_ids, _ = self.mask(views.keys, rng, config)
        return replace(
            views,
            queries=Sequences(query_ids, views.queries.lengths),
            keys=Sequences(key_ids, views.keys.lengths),
        )


def _make_drawn_pairs(window: Window[Pairs], table_ids: np.ndarray, rows: np.ndarray) -> _DrawnPairs:
    """Return drawn pairs with their sentence ids, which are read from the window."""
    parts, rows_in_parts = window.locate(table_ids, rows)
    sentence_ids = [pairs.sentence_ids.item(row) for pairs, row in zip(parts, rows_in_parts.tolist(), strict=True)]
    return _DrawnPairs(table_ids, rows, np.array(sentence_ids, np.int64))


def _join_masked(batches: list[MaskedSequences]) -> MaskedSequences:
    """Concatenate batches of masked sequences."""
    if not batches:
        return MaskedSequences(EMPTY, EMPTY.flat, EMPTY.flat, EMPTY.flat)
    target_indices = []
    first_token = 0
    for batch in batches:
        target_indices.append(batch.target_indices + first_token)  # indices into the concatenated tokens
        first_token += len(batch.masked_ids)
    return MaskedSequences(
        join([batch.sequences for batch in batches]),
        np.concatenate([batch.masked_ids for batch in batches]),
        np.concatenate(target_indices),
        np.concatenate([batch.group_ids for batch in batches]),
    )


def _join_views(batches: list[ContrastViews]) -> ContrastViews:
    """Concatenate batches of contrast views."""
    if not batches:
        return ContrastViews(EMPTY, EMPTY, np.empty((0, 2), np.int64), EMPTY.flat)
    return ContrastViews(
        join([views.queries for views in batches]),
        join([views.keys for views in batches]),
        np.concatenate([views.sentence_ids for views in batches]),
        np.concatenate([views.group_ids for views in batches]),
    )

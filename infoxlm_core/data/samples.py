"""The samples of a step, drawn from shards, laid out and masked: a pure function of (seed, step, virtual shard)."""

from dataclasses import dataclass

import numpy as np

from infoxlm_core.config import PretrainingConfig
from infoxlm_core.data import masking
from infoxlm_core.data.layouts import NOTHING, Sequences, choose, join, lay_out, mix
from infoxlm_core.data.sampling import Law, generator
from infoxlm_core.data.shards import Shards, gather, gather_slices, make_blocks
from infoxlm_core.data.vocabulary import BOS
from infoxlm_core.errors import CorpusTooSmall


@dataclass(frozen=True)
class Draw:
    """All samples of some virtual shards at one step, laid out and masked, in the order of the global batch."""

    mlm: Sequences
    mlm_seen: np.ndarray
    mlm_rows: np.ndarray
    tlm: Sequences
    tlm_seen: np.ndarray
    tlm_rows: np.ndarray
    queries: Sequences
    keys: Sequences
    meanings: np.ndarray


class Sampler:
    """Draws the samples of every step from shards.

    Raises:
        CorpusTooSmall: an objective has no text at all.
    """

    def __init__(self, shards: Shards, config: PretrainingConfig) -> None:
        self.config, self.vocabulary_size = config, shards.vocabulary_size
        batches, objectives = config.batches, config.objectives
        self.per_shard = batches.global_batch_size // batches.virtual_shards
        # The token limit counts <s>, which blocks get when they are laid out.
        blocks = {name: [make_blocks(t, batches.block_tokens - 1) for t in t_] for name, t_ in shards.mono.items()}
        self.blocks = [block for name in sorted(blocks) for block in blocks[name]]
        self.pairs = [pairs for name in sorted(shards.pairs) for pairs in shards.pairs[name]]
        self.corpora = [pairs.corpus for pairs in self.pairs]
        if objectives.mlm and not self.blocks:
            raise CorpusTooSmall(
                "MLM has no monolingual text: have=0 need=1 block; set objectives.mlm to 0 or add text"
            )
        need = 2 if objectives.xlco and config.contrast.mixup else 1
        if (objectives.tlm or objectives.xlco) and (have := sum(map(len, self.pairs))) < need:
            raise CorpusTooSmall(
                f"TLM and XLCO need translation pairs: have={have} need={need}; add pairs or set both to 0"
            )
        self.block_law = Law([[len(b) for b in blocks[n]] for n in sorted(blocks)], batches.alpha)
        sizes = [[len(pairs) for pairs in shards.pairs[name]] for name in sorted(shards.pairs)]
        self.pair_law = Law(sizes, batches.alpha)

    def draw(self, step: int | str, virtual_shards: range, only_contrast: bool = False) -> Draw:
        """The samples of some virtual shards at a step; `prefill…` names the steps of the reserved stream."""
        objectives = self.config.objectives
        mlm, tlm, xlco = [], [], []
        for shard in virtual_shards:
            key = (self.config.seed, step, shard)
            if objectives.mlm and not only_contrast:
                mlm.append(self._masked(self._mlm(generator(*key, "mlm")), generator(*key, "mlm mask")))
            if objectives.tlm and not only_contrast:
                tlm.append(self._masked(self._tlm(generator(*key, "tlm")), generator(*key, "tlm mask")))
            if objectives.xlco:
                xlco.append(self._xlco(generator(*key, "xlco")))
        queries, keys, meanings = (
            zip(*xlco, strict=True) if xlco else ([NOTHING], [NOTHING], [np.empty((0, 2), np.int64)])
        )
        return Draw(*_merge(mlm), *_merge(tlm), join(list(queries)), join(list(keys)), np.concatenate(meanings))

    def _masked(self, sequences: Sequences, rng: np.random.Generator) -> tuple[Sequences, np.ndarray, np.ndarray]:
        seen, rows = masking.mask(sequences.flat, sequences.lengths, self.vocabulary_size, self.config.objectives, rng)
        return sequences, seen, rows

    def _mlm(self, rng: np.random.Generator) -> Sequences:
        tables, rows = self.block_law.draw(self.per_shard, rng)
        starts, lengths = np.empty_like(rows), np.empty_like(rows)
        for table in np.unique(tables):
            mine = tables == table
            starts[mine], lengths[mine] = self.blocks[table].starts[rows[mine]], self.blocks[table].lengths[rows[mine]]
        flat = gather_slices([block.table.tokens for block in self.blocks], tables, starts, lengths)
        # sentences bring their own </s>: only <s> is put in front
        out = np.insert(flat, lengths.cumsum() - lengths, BOS)
        return Sequences(out, lengths + 1)

    def _sides(self, tables: np.ndarray, rows: np.ndarray) -> tuple[Sequences, Sequences]:
        limit = self.config.batches.side_tokens
        source = gather([pairs.source for pairs in self.pairs], tables, rows, limit)
        target = gather([pairs.target for pairs in self.pairs], tables, rows, limit)
        return Sequences(*source), Sequences(*target)

    def _tlm(self, rng: np.random.Generator) -> Sequences:
        source, target = self._sides(*self.pair_law.draw(self.per_shard, rng))
        swap = rng.random(self.per_shard) < 0.5
        return lay_out(choose(swap, target, source), choose(swap, source, target))

    def _xlco(self, rng: np.random.Generator) -> tuple[Sequences, Sequences, np.ndarray]:
        contrast, count = self.config.contrast, self.per_shard
        tables, rows = self.pair_law.draw(count, rng)
        mine = self._meanings(tables, rows)
        other_tables, other_rows, partner = self._partners(tables, mine, rng)
        mode, luck = rng.integers(0, 8, count), rng.random((2, count))
        joined = luck[0] < contrast.mixup
        queries, keys = mix(
            self._sides(tables, rows), self._sides(other_tables, other_rows), mode, luck[1] < contrast.cross, joined
        )
        return queries, keys, np.stack([mine, np.where(joined, partner, mine)], axis=1)

    def _partners(
        self, tables: np.ndarray, meanings: np.ndarray, rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Mixup partners, with their meanings: of another corpus where there is one, and never of the same meaning."""
        other_tables, other_rows = self.pair_law.draw_elsewhere(tables, self.corpora, rng)
        for _ in range(100):
            partners = self._meanings(other_tables, other_rows)
            same = meanings == partners
            if not same.any() or not self.config.contrast.mixup:
                return other_tables, other_rows, partners
            other_tables[same], other_rows[same] = self.pair_law.draw_elsewhere(tables[same], self.corpora, rng)
        raise CorpusTooSmall("mixup finds no second meaning in the pairs: have=1 need=2; set contrast.mixup to 0")

    def _meanings(self, tables: np.ndarray, rows: np.ndarray) -> np.ndarray:
        found = np.empty(len(rows), np.int64)
        for table in np.unique(tables):
            mine = tables == table
            found[mine] = self.pairs[table].meanings[rows[mine]]
        return found


def _merge(parts: list[tuple[Sequences, np.ndarray, np.ndarray]]) -> tuple[Sequences, np.ndarray, np.ndarray]:
    if not parts:
        return NOTHING, NOTHING.flat, NOTHING.flat
    shifts = np.cumsum([0, *(len(sequences.flat) for sequences, _, _ in parts)])
    rows = [rows + shift for (_, _, rows), shift in zip(parts, shifts, strict=False)]
    return join([p[0] for p in parts]), np.concatenate([p[1] for p in parts]), np.concatenate(rows)

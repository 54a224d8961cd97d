"""Token shards: flat arrays on disk, memory-mapped.

A table is two plain files: `NAME.tokens` (uint32) and `NAME.offsets` (uint64, one more than there are rows; row i is
tokens[offsets[i]:offsets[i + 1]]). Per corpus and language (pair) there are

    mono/de/weblate            rows are sentences that end with `</s>`, so that any run of rows is an MLM block
    pairs/en-de/weblate.source and .target     row i of both translate each other; no special tokens
    pairs/en-de/weblate.meanings               uint64, sentence ids: a hash of each pair's English side
    held_out/en-de/django.source …             the same for pairs that are kept for evaluation, for probes in training
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from infoxlm_core import manifests
from infoxlm_core.errors import CorpusTooSmall, DataCorrupt

TOKENS, OFFSETS, SENTENCE_IDS = np.dtype("<u4"), np.dtype("<u8"), np.dtype("<u8")
REMEDY = "remove the directory and run tokenize_corpus again"
_ROWS_AT_ONCE = 1 << 20  # offsets that are compared at a time


def write_array(path: Path, values: np.ndarray) -> None:
    """Write the bytes of an array. `ndarray.tofile` does not report a full disk."""
    path.write_bytes(values.tobytes())


class TableWriter:
    """Writes a table chunk by chunk and holds only the lengths of its rows in memory."""

    def __init__(self, path: Path):
        self.path, self.lengths, self.largest = path, [np.zeros(1, np.int64)], -1
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = Path(f"{path}.tokens").open("wb")  # noqa: SIM115

    def add(self, flat: np.ndarray, lengths: np.ndarray) -> None:
        """Add rows: their token ids end to end (T,) and their lengths (N,)."""
        self.file.write(np.ascontiguousarray(flat, TOKENS).tobytes())
        self.lengths.append(lengths)
        if len(flat):
            self.largest = max(self.largest, int(flat.max()))

    def close(self) -> dict[str, int]:
        """Finish the table; return the numbers of rows and tokens, and the largest id."""
        self.file.close()
        ends = np.concatenate(self.lengths).cumsum()
        write_array(Path(f"{self.path}.offsets"), ends.astype(OFFSETS))
        return {"rows": len(ends) - 1, "tokens": int(ends[-1]), "largest_id": self.largest}


def write_table(path: Path, chunks: Iterable[tuple[np.ndarray, np.ndarray]]) -> dict[str, int]:
    """Write chunks of (flat token ids, lengths) as one table; return its sizes as `TableWriter.close`."""
    table = TableWriter(path)
    for flat, lengths in chunks:
        table.add(flat, lengths)
    return table.close()


@dataclass(frozen=True)
class Table:
    """Rows of token ids, mapped into memory."""

    tokens: np.ndarray
    offsets: np.ndarray

    @classmethod
    def open(cls, path: Path, verified: bool = False) -> "Table":
        """Map a table into memory; check that its offsets ascend unless its digests were `verified`."""
        tokens, offsets = _map(Path(f"{path}.tokens"), TOKENS), _map(Path(f"{path}.offsets"), OFFSETS)
        if not len(offsets) or offsets[0] != 0 or int(offsets[-1]) != len(tokens):
            raise DataCorrupt(f"{path}.offsets does not fit {path}.tokens: {REMEDY}")
        if not verified:
            for start in range(0, len(offsets) - 1, _ROWS_AT_ONCE):
                part = offsets[start : start + _ROWS_AT_ONCE + 1]
                if (part[1:] < part[:-1]).any():
                    raise DataCorrupt(f"{path}.offsets has a row that ends before it begins: {REMEDY}")
        return cls(tokens, offsets.view(np.int64))  # not copied: the workers of a machine share its pages

    def __len__(self) -> int:
        return len(self.offsets) - 1


def _map(path: Path, dtype: np.dtype) -> np.ndarray:
    if not path.is_file():
        raise DataCorrupt(f"{path} is missing: {REMEDY}")
    if path.stat().st_size % dtype.itemsize:
        raise DataCorrupt(f"{path} ends inside a value: {REMEDY}")
    return np.asarray(np.memmap(path, dtype, "r")) if path.stat().st_size else np.empty(0, dtype)


@dataclass(frozen=True)
class Blocks:
    """MLM samples of one corpus: block i is tokens[starts[i] : starts[i] + lengths[i]]."""

    table: Table
    starts: np.ndarray
    lengths: np.ndarray

    def __len__(self) -> int:
        return len(self.starts)


def make_blocks(table: Table, limit: int, rows_of_a_part: int = 8192) -> Blocks:
    """Join whole sentences greedily, in order, up to `limit` tokens; a longer sentence is cut and loses its `</s>`.

    A block starts where the one before it ends. To vectorise this, the table is divided into parts, and blocks are
    first made in all parts at once, as if each part began with a block. Blocks from different starts soon coincide. The
    blocks from the first row of the table therefore follow those of a part from the first block that both share.
    """
    if not len(table):
        return Blocks(table, np.empty(0, np.int64), np.empty(0, np.int64))
    part_count = min(4096, math.ceil(len(table) / rows_of_a_part))
    borders = np.linspace(0, len(table), part_count + 1).astype(np.int64)
    blocks_of_parts, rows_after_parts = _start_blocks_in_parts(table.offsets, limit, borders)

    row = np.zeros(1, np.int64)  # the first row of the next block
    first_rows: list[np.ndarray] = []  # of all blocks
    for part_blocks, stop, row_after_part in zip(blocks_of_parts, borders[1:], rows_after_parts, strict=True):
        while row[0] < stop:
            index = np.searchsorted(part_blocks, row[0])
            if index < len(part_blocks) and part_blocks[index] == row[0]:
                first_rows.append(part_blocks[index:])
                row = row_after_part[None]
            else:
                first_rows.append(row)
                row = _next_block(table.offsets, limit, row)
    begins = np.concatenate(first_rows)
    starts = table.offsets[begins]
    ends = table.offsets[np.append(begins[1:], len(table))]
    return Blocks(table, starts, np.minimum(ends - starts, limit))


def _next_block(offsets: np.ndarray, limit: int, rows: np.ndarray) -> np.ndarray:
    """Return the first rows of the blocks that follow those from `rows`; a row above the limit is a block."""
    return np.maximum(np.searchsorted(offsets, offsets[rows] + limit, side="right") - 1, rows + 1)


def _start_blocks_in_parts(offsets: np.ndarray, limit: int, borders: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
    """Return the first rows of the blocks of each part, and the rows that follow the parts' last blocks, (parts,).

    Part i has the rows from borders[i] to borders[i + 1], and its first row begins a block.
    """
    stops = borders[1:]
    rows = borders[:-1].copy()  # the first row of the next block of each part
    rounds = []  # the blocks of all parts, one of each part a round; -1: the part has no further block
    while (rows < stops).any():
        unfinished = rows < stops
        rounds.append(np.where(unfinished, rows, -1))
        rows[unfinished] = _next_block(offsets, limit, rows[unfinished])
    rows_of_rounds = np.array(rounds, np.int64).reshape(-1, len(rows))  # (rounds, parts)
    return [part[part >= 0] for part in np.ascontiguousarray(rows_of_rounds.T)], rows


@dataclass(frozen=True)
class Pairs:
    """Translation pairs of one corpus and language pair."""

    corpus: str
    source: Table
    target: Table
    sentence_ids: np.ndarray

    def __len__(self) -> int:
        return len(self.source)


@dataclass(frozen=True)
class Shards:
    """All training text by language and language pair, in alphabetical order, with the corpora of each in order."""

    mono: dict[str, list[Table]]
    pairs: dict[str, list[Pairs]]
    held_out: dict[str, list[Pairs]]
    manifest: dict[str, Any]
    directory: Path

    @property
    def vocabulary_size(self) -> int:
        return self.manifest["facts"]["vocabulary_size"]


def read_manifest(directory: Path, hashed: bool = True) -> dict[str, Any]:
    """Return the manifest of shards after comparing sizes and, with `hashed`, digests; raises like `open_shards`."""
    return manifests.read(directory, "shards", producer="tokenize_corpus", should_hash=lambda _: hashed)


def open_shards(directory: Path, hashed: bool = True) -> Shards:
    """Verify the sizes, ids and, with `hashed`, digests of shards, and map them into memory.

    Raises:
        InputError: there is no manifest.
        DataCorrupt: a file is missing, differs from what was written, or holds an id outside the vocabulary.
        CorpusTooSmall: there is neither monolingual text nor a pair.
    """
    manifest = read_manifest(directory, hashed)
    facts = manifest["facts"]
    mono: dict[str, list[Table]] = {}
    pairs: dict[str, list[Pairs]] = {}
    held_out: dict[str, list[Pairs]] = {}
    for name, table in sorted(facts["tables"].items()):
        if table["largest_id"] >= facts["vocabulary_size"]:
            raise DataCorrupt(
                f"{directory / name} holds id {table['largest_id']}, the vocabulary has {facts['vocabulary_size']}: "
                f"{REMEDY}"
            )
        kind, language, corpus = name.split("/")
        if kind == "mono":
            mono.setdefault(language, []).append(Table.open(directory / name, not hashed))
        elif corpus.endswith(".source"):
            corpus = corpus.removesuffix(".source")
            stem = directory / kind / language / corpus
            source, target = (Table.open(Path(f"{stem}.{side}"), not hashed) for side in ("source", "target"))
            sentence_ids = _map(Path(f"{stem}.meanings"), SENTENCE_IDS)
            if not len(source) == len(target) == len(sentence_ids):
                raise DataCorrupt(f"{stem}: source, target and meanings differ in length: {REMEDY}")
            tables_of_kind = pairs if kind == "pairs" else held_out
            tables_of_kind.setdefault(language, []).append(Pairs(corpus, source, target, sentence_ids.view(np.int64)))
    if not mono and not pairs:
        raise CorpusTooSmall(f"{directory} holds no text: have=0 need=1 sentence")
    return Shards(mono, pairs, held_out, manifest, directory)


def end_to_end(parts: Sequence[np.ndarray | Sequence[int]]) -> np.ndarray:
    """Concatenate parts as int64."""
    return np.concatenate(parts).astype(np.int64) if parts else np.empty(0, np.int64)

"""Token shards: memory-mapped files of token ids.

A table of N rows consists of two arrays: `NAME.tokens` (uint32) and `NAME.offsets` (uint64, N + 1 values); row i is
tokens[offsets[i]:offsets[i + 1]]. Each corpus has these files in each of its languages or language pairs:

    mono/de/weblate.*                           sentences that end with `</s>`: consecutive rows are an MLM sample
    pairs/en-de/weblate.source.* and .target.*  row i of one translates row i of the other; no special tokens
    pairs/en-de/weblate.meanings                uint64, sentence ids: a hash of each pair's English side
    held_out/en-de/django.source.* …            the same for pairs reserved for evaluation, for probes during training
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from infoxlm_core import manifests
from infoxlm_core.data.vocabulary import Vocabulary
from infoxlm_core.errors import CorpusTooSmall, DataCorrupt

TOKENS = np.dtype("<u4")
OFFSETS = np.dtype("<u8")
SENTENCE_IDS = np.dtype("<u8")
REMEDY = "remove the directory and run tokenize_corpus again"
_CHECKED_ROWS = 1 << 20  # rows whose offsets are compared at a time, to limit memory
_MAX_SEGMENTS = 4096


def write_array(path: Path, values: np.ndarray) -> None:
    """Write the bytes of an array. `ndarray.tofile` does not report a full disk."""
    path.write_bytes(values.tobytes())


class TableWriter:
    """Writes a table chunk by chunk and holds only the lengths of its rows in memory."""

    def __init__(self, path: Path):
        self.path = path
        self.lengths = [np.zeros(1, np.int64)]  # begins with 0, so that the cumulative sum begins with offset 0
        self.largest_id = -1
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = Path(f"{path}.tokens").open("wb")  # noqa: SIM115

    def add(self, flat: np.ndarray, lengths: np.ndarray) -> None:
        """Add N rows: their token ids, one row after another (T,), and their lengths (N,)."""
        self.file.write(np.ascontiguousarray(flat, TOKENS).tobytes())
        self.lengths.append(lengths)
        if len(flat):
            self.largest_id = max(self.largest_id, int(flat.max()))

    def close(self) -> dict[str, int]:
        """Finish the table. Return the numbers of rows and tokens, and the largest id."""
        self.file.close()
        offsets = np.concatenate(self.lengths).cumsum()  # (N + 1,)
        write_array(Path(f"{self.path}.offsets"), offsets.astype(OFFSETS))
        return {"rows": len(offsets) - 1, "tokens": int(offsets[-1]), "largest_id": self.largest_id}


def write_table(path: Path, chunks: Iterable[tuple[np.ndarray, np.ndarray]]) -> dict[str, int]:
    """Write chunks of (flat token ids, lengths) as one table. Return its sizes as `TableWriter.close`."""
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
        """Map a table into memory. Check that its offsets ascend, unless its digests were `verified`."""
        tokens = _map(Path(f"{path}.tokens"), TOKENS)
        offsets = _map(Path(f"{path}.offsets"), OFFSETS)
        if not len(offsets) or offsets[0] != 0 or int(offsets[-1]) != len(tokens):
            raise DataCorrupt(f"{path}.offsets does not fit {path}.tokens: {REMEDY}")
        if not verified:
            for start in range(0, len(offsets) - 1, _CHECKED_ROWS):
                checked = offsets[start : start + _CHECKED_ROWS + 1]
                if (checked[1:] < checked[:-1]).any():
                    raise DataCorrupt(f"{path}.offsets has a row that ends before it begins: {REMEDY}")
        return cls(tokens, offsets.view(np.int64))  # not copied: the workers of a machine share its pages

    def __len__(self) -> int:
        return len(self.offsets) - 1


def _map(path: Path, dtype: np.dtype) -> np.ndarray:
    """Map an array into memory. Raise DataCorrupt if its file is missing or truncated."""
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


def make_blocks(table: Table, max_tokens: int, rows_per_segment: int = 8192) -> Blocks:
    """Join consecutive sentences greedily to blocks of at most `max_tokens` tokens.

    A longer sentence is a block of its own; it is truncated and loses its `</s>`.

    Each block starts where the one before it ends, which is slow in a Python loop over all blocks. Therefore the table
    is cut into segments, and the blocks of all segments are computed together, as if a block started at the first row
    of each segment. Blocks that start at different rows soon start at the same row: the true blocks follow those of a
    segment from the first start that they have in common.

    Args:
        table: sentences, each with `</s>`.
        max_tokens: the largest length of a block.
        rows_per_segment: affects only the speed.
    """
    if not len(table):
        return Blocks(table, np.empty(0, np.int64), np.empty(0, np.int64))
    offsets = table.offsets

    def next_block_starts(rows: np.ndarray) -> np.ndarray:
        """Return the rows after the blocks that start at `rows`. A sentence that is too long is a block."""
        return np.maximum(np.searchsorted(offsets, offsets[rows] + max_tokens, side="right") - 1, rows + 1)

    segment_count = min(_MAX_SEGMENTS, math.ceil(len(table) / rows_per_segment))
    segment_borders = np.linspace(0, len(table), segment_count + 1).astype(np.int64)
    segment_ends = segment_borders[1:]
    starts_by_step = []
    current_rows = segment_borders[:-1].copy()  # (segments,) where the next block of each segment starts
    is_inside = current_rows < segment_ends
    while is_inside.any():
        starts_by_step.append(np.where(is_inside, current_rows, -1))
        current_rows[is_inside] = next_block_starts(current_rows[is_inside])
        is_inside = current_rows < segment_ends
    # (segments, steps): the rows at which blocks start in each segment, then -1
    starts_by_segment = np.ascontiguousarray(np.array(starts_by_step, np.int64).reshape(-1, segment_count).T)

    row = np.zeros(1, np.int64)
    first_rows = []
    for padded_starts, segment_end, row_after_segment in zip(
        starts_by_segment, segment_ends, current_rows, strict=True
    ):
        segment_starts = padded_starts[padded_starts >= 0]
        while row[0] < segment_end:
            index = np.searchsorted(segment_starts, row[0])
            if index < len(segment_starts) and segment_starts[index] == row[0]:
                first_rows.append(segment_starts[index:])
                row = row_after_segment[None]
            else:
                first_rows.append(row)
                row = next_block_starts(row)
    block_rows = np.concatenate(first_rows)  # the first row of each block
    start_offsets = offsets[block_rows]
    end_offsets = offsets[np.append(block_rows[1:], len(table))]
    return Blocks(table, start_offsets, np.minimum(end_offsets - start_offsets, max_tokens))


@dataclass(frozen=True)
class Pairs:
    """Translation pairs of one corpus and language pair."""

    corpus: str
    source: Table
    target: Table
    sentence_ids: np.ndarray  # (N,) int64; pairs with the same id translate the same sentence

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

    @cached_property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary.from_facts(self.manifest["facts"])

    @property
    def prefix(self) -> str:
        """Return the text that was added before every sentence."""
        return self.manifest["facts"].get("prefix", "")

    @property
    def vocabulary_size(self) -> int:
        return self.vocabulary.size


def read_manifest(directory: Path, hashed: bool = True) -> dict[str, Any]:
    """Return the manifest of shards after comparing sizes and, with `hashed`, digests. Raises like `open_shards`."""
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
            source = Table.open(Path(f"{stem}.source"), not hashed)
            target = Table.open(Path(f"{stem}.target"), not hashed)
            sentence_ids = _map(Path(f"{stem}.meanings"), SENTENCE_IDS)
            if not len(source) == len(target) == len(sentence_ids):
                raise DataCorrupt(f"{stem}: source, target and meanings differ in length: {REMEDY}")
            pairs_of_kind = pairs if kind == "pairs" else held_out
            pairs_of_kind.setdefault(language, []).append(Pairs(corpus, source, target, sentence_ids.view(np.int64)))
    if not mono and not pairs:
        raise CorpusTooSmall(f"{directory} contains no text (have=0 need=1 sentence): tokenize another corpus")
    return Shards(mono, pairs, held_out, manifest, directory)


def end_to_end(arrays: Sequence[np.ndarray | Sequence[int]]) -> np.ndarray:
    """Concatenate arrays as int64. The result is empty if there are none."""
    return np.concatenate(arrays).astype(np.int64) if arrays else np.empty(0, np.int64)

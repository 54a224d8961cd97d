"""Token shards: tables of token ids, stored as parts of about 4 MB.

Each corpus has a table for each of its languages or language pairs:

    mono/de/weblate        sentences that end with `</s>`; consecutive rows form an MLM sample
    pairs/en-de/weblate    translation pairs, without special tokens
    held_out/en-de/django  translation pairs reserved for evaluation, for probes during training

A part is a file such as `mono/de/weblate/000000.safetensors`. It stores N rows as two arrays of 32-bit integers,
`tokens` and `offsets` (N + 1,): row i is tokens[offsets[i]:offsets[i + 1]]. Parts of sentences also contain `blocks`,
the start offsets of MLM samples with `block_tokens` tokens. Parts of pairs contain both arrays for each side, such as
`source.tokens`, and `sentence_id`, a 64-bit hash of each pair's pivot side. The manifest lists the numbers of rows,
tokens and blocks in each part, so that opening shards reads no part.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from infoxlm_core import manifests
from infoxlm_core.data.reading import REMEDY, PartReader, PartSource, RemotePartReader
from infoxlm_core.data.vocabulary import Vocabulary
from infoxlm_core.errors import CorpusTooSmall, DataCorrupt, InputError

UINT32 = np.dtype("<u4")  # data type of stored token ids and offsets
TEXT = "text"
PAIR_COLUMNS = ("source", "target")
SENTENCE_ID = "sentence_id"


def name_part(table: str, number: int) -> str:
    """Return the file name of a table's part."""
    return f"{table}/{number:06}.safetensors"


@dataclass(frozen=True)
class Table:
    """Rows of token ids."""

    tokens: np.ndarray  # (T,)
    offsets: np.ndarray  # (N + 1,)

    @classmethod
    def join(cls, parts: Sequence[dict[str, np.ndarray]], prefix: str = "") -> "Table":
        """Concatenate the rows of consecutive parts. A single part is not copied."""
        tokens = [part[f"{prefix}tokens"] for part in parts]
        offsets = [part[f"{prefix}offsets"] for part in parts]
        if len(parts) == 1:
            return cls(tokens[0], offsets[0])
        lengths = concatenate_int64([np.diff(part_offsets) for part_offsets in offsets])
        all_tokens = np.concatenate(tokens) if parts else np.empty(0, UINT32)
        return cls(all_tokens, np.concatenate([[0], lengths.cumsum()]).astype(np.int64))

    def __len__(self) -> int:
        return len(self.offsets) - 1


@dataclass(frozen=True)
class Blocks:
    """MLM samples of one corpus. Block i is tokens[starts[i] : starts[i] + lengths[i]]."""

    table: Table
    starts: np.ndarray
    lengths: np.ndarray

    @classmethod
    def of_part(cls, arrays: dict[str, np.ndarray], max_tokens: int) -> "Blocks":
        """Read the blocks of a part from its index. `max_tokens` is the block size of the index."""
        table = Table.join([arrays])
        starts = arrays["blocks"].astype(np.int64)
        lengths = np.diff(starts, append=len(table.tokens))
        return cls(table, starts, np.minimum(lengths, max_tokens))

    def __len__(self) -> int:
        return len(self.starts)


def make_blocks(table: Table, max_tokens: int) -> Blocks:
    """Pack consecutive sentences into blocks of at most `max_tokens` tokens.

    A sentence that exceeds a block is truncated and forms its own block, which does not end with `</s>`.

    Args:
        table: sentences that end with `</s>`.
        max_tokens: largest block length.
    """
    offsets = table.offsets
    # Compute the end of a block for every possible first row at once. A NumPy call for each block would be slow.
    end_rows = np.searchsorted(offsets, offsets[:-1] + max_tokens, side="right") - 1
    end_rows = np.maximum(end_rows, np.arange(1, len(offsets))).tolist()  # at least one sentence per block
    first_rows = []
    row = 0
    while row < len(table):
        first_rows.append(row)
        row = end_rows[row]
    starts = offsets[first_rows].astype(np.int64)
    lengths = np.diff(starts, append=offsets[-1])
    return Blocks(table, starts, np.minimum(lengths, max_tokens))


@dataclass(frozen=True)
class Pairs:
    """Translation pairs of one corpus and language pair."""

    source: Table
    target: Table
    sentence_ids: np.ndarray  # (N,) int64; pairs with the same id translate the same sentence

    @classmethod
    def join(cls, parts: Sequence[dict[str, np.ndarray]]) -> "Pairs":
        """Concatenate the pairs of consecutive parts."""
        source, target = [Table.join(parts, f"{side}.") for side in PAIR_COLUMNS]
        sentence_ids = [part[SENTENCE_ID].view(np.int64) for part in parts]
        return cls(source, target, sentence_ids[0] if len(parts) == 1 else concatenate_int64(sentence_ids))

    @classmethod
    def of_part(cls, arrays: dict[str, np.ndarray]) -> "Pairs":
        """Return a part's pairs."""
        return cls.join([arrays])

    def __len__(self) -> int:
        return len(self.source)


@dataclass(frozen=True)
class StoredTable:
    """A corpus in one language or language pair. Its parts are read when needed."""

    name: str  # such as `mono/de/weblate`
    row_counts: np.ndarray  # (parts,)
    block_counts: np.ndarray  # (parts,) number of MLM samples
    reader: PartReader

    def __len__(self) -> int:
        return int(self.row_counts.sum())

    @property
    def part_count(self) -> int:
        return len(self.row_counts)

    @property
    def corpus(self) -> str:
        return self.name.rpartition("/")[2]

    @property
    def label(self) -> str:
        """Language (pair) and corpus, such as `de/weblate`."""
        return self.name.partition("/")[2]

    @property
    def part_names(self) -> list[str]:
        return [name_part(self.name, number) for number in range(self.part_count)]

    @property
    def byte_count(self) -> int:
        """Size of all parts in bytes."""
        return sum(self.reader.byte_count(name) for name in self.part_names)

    def expect(self, current_parts: Sequence[int], next_parts: Sequence[int]) -> None:
        """Tell the reader the numbers of the parts that the current step and the next steps need."""
        current_names = [name_part(self.name, number) for number in current_parts]
        next_names = [name_part(self.name, number) for number in next_parts]
        self.reader.expect(self.name, current_names, next_names)

    def read_part(self, number: int) -> dict[str, np.ndarray]:
        """Read a part's arrays."""
        return self.reader.read(name_part(self.name, number))

    def read_text(self) -> Table:
        """Read all sentences of a monolingual corpus."""
        return Table.join(self._read_parts())

    def read_pairs(self) -> Pairs:
        """Read all pairs of a parallel corpus."""
        return Pairs.join(self._read_parts())

    def _read_parts(self) -> list[dict[str, np.ndarray]]:
        self.reader.expect(self.name, self.part_names)
        return [self.reader.read(name) for name in self.part_names]


@dataclass(frozen=True)
class Shards:
    """All training text: sorted corpora by language and language pair."""

    mono: dict[str, list[StoredTable]]
    pairs: dict[str, list[StoredTable]]
    held_out: dict[str, list[StoredTable]]
    manifest: dict[str, Any]
    directory: Path

    @cached_property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary.from_facts(self.manifest["facts"])

    @property
    def prefix(self) -> str:
        """Text that tokenization added before every sentence."""
        return self.manifest["facts"].get("prefix", "")

    @property
    def vocabulary_size(self) -> int:
        return self.vocabulary.size


def open_shards(directory: Path, source: PartSource | None = None) -> Shards:
    """Open token shards and verify their tokenizer. Text is read and verified when needed.

    Args:
        directory: directory of the shards. With a `source`, it needs only their manifest and tokenizer.
        source: remote storage of the parts, which are downloaded to the directory when needed.

    Raises:
        InputError: the manifest is missing, or an older version wrote the shards.
        DataCorrupt: the manifest or the tokenizer has changed, or an id is outside the vocabulary.
        CorpusTooSmall: the shards contain neither monolingual text nor pairs.
    """
    manifest = manifests.load_verified(directory, "shards", "tokenize_corpus", should_read=_is_outside_tables)
    facts = manifest["facts"]
    vocabulary_size = facts["vocabulary_size"]
    reader = PartReader(directory, manifest["files"])
    if source:
        reader = RemotePartReader(directory, manifest["files"], source)
    tables: dict[str, dict[str, list[StoredTable]]] = {"mono": {}, "pairs": {}, "held_out": {}}
    for name, table in sorted(facts["tables"].items()):
        if "parts" not in table:
            raise InputError(f"{directory} was written by an older version: run tokenize_corpus again")
        largest_id = table["largest_id"]
        if largest_id >= vocabulary_size:
            raise DataCorrupt(
                f"{directory / name} contains token id {largest_id}, but the vocabulary has only {vocabulary_size} "
                f"ids: {REMEDY}"
            )
        part_counts = np.array(table["parts"], np.int64).reshape(-1, 3)  # rows, tokens and blocks of each part
        stored_table = StoredTable(name, row_counts=part_counts[:, 0], block_counts=part_counts[:, 2], reader=reader)
        kind, language, _ = name.split("/")
        tables[kind].setdefault(language, []).append(stored_table)
    if not tables["mono"] and not tables["pairs"]:
        raise CorpusTooSmall(f"{directory} contains no text: tokenize a different corpus")
    return Shards(tables["mono"], tables["pairs"], tables["held_out"], manifest, directory)


def _is_outside_tables(path: Path) -> bool:
    """Return whether a file is outside the tables, such as a tokenizer file."""
    return path.parts[0] not in ("mono", "pairs", "held_out")


def concatenate_int64(arrays: Sequence[np.ndarray | Sequence[int]]) -> np.ndarray:
    """Concatenate arrays as int64. Without arrays, the result is empty."""
    return np.concatenate(arrays).astype(np.int64) if arrays else np.empty(0, np.int64)

"""Token shards: tables of token ids, each stored as parts of about 4 MB.

Each corpus has a table in each of its languages or language pairs:

    mono/de/weblate       sentences that end with `</s>`: consecutive rows are an MLM sample
    pairs/en-de/weblate   rows of two sides that translate each other; no special tokens
    held_out/en-de/django the same for pairs reserved for evaluation, for probes during training

A part is the file `mono/de/weblate/000000.safetensors`. It holds N rows as two arrays of 32-bit integers, `tokens` and
`offsets` (N + 1,): row i is tokens[offsets[i]:offsets[i + 1]]. Parts of sentences also hold `blocks`, the offsets at
which MLM samples of `block_tokens` tokens start. Parts of pairs hold both arrays for each side, `source.tokens` and so
on, and `sentence_id`, a 64-bit hash of each pair's English side. The manifest lists the rows, tokens and blocks of each
part, so that opening shards reads no part.
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

TOKENS = np.dtype("<u4")
TEXT = "text"
PAIR_COLUMNS = ("source", "target")
SENTENCE_ID = "sentence_id"


def name_part(table: str, number: int) -> str:
    """Return the file name of a part of a table."""
    return f"{table}/{number:06}.safetensors"


@dataclass(frozen=True)
class Table:
    """Rows of token ids."""

    tokens: np.ndarray  # (T,)
    offsets: np.ndarray  # (N + 1,)

    @classmethod
    def join(cls, parts: Sequence[dict[str, np.ndarray]], prefix: str = "") -> "Table":
        """Return the rows of consecutive parts. Those of a single part are not copied."""
        tokens = [part[f"{prefix}tokens"] for part in parts]
        offsets = [part[f"{prefix}offsets"] for part in parts]
        if len(parts) == 1:
            return cls(tokens[0], offsets[0])
        lengths = concatenate_int64([np.diff(part_offsets) for part_offsets in offsets])
        all_tokens = np.concatenate(tokens) if parts else np.empty(0, TOKENS)
        return cls(all_tokens, np.concatenate([[0], lengths.cumsum()]).astype(np.int64))

    def __len__(self) -> int:
        return len(self.offsets) - 1


@dataclass(frozen=True)
class Blocks:
    """MLM samples of one corpus: block i is tokens[starts[i] : starts[i] + lengths[i]]."""

    table: Table
    starts: np.ndarray
    lengths: np.ndarray

    @classmethod
    def of_part(cls, arrays: dict[str, np.ndarray], max_tokens: int) -> "Blocks":
        """Return the blocks in the index of a part, which has blocks of at most `max_tokens` tokens."""
        table = Table.join([arrays])
        starts = arrays["blocks"].astype(np.int64)
        lengths = np.diff(starts, append=len(table.tokens))
        return cls(table, starts, np.minimum(lengths, max_tokens))

    def __len__(self) -> int:
        return len(self.starts)


def make_blocks(table: Table, max_tokens: int) -> Blocks:
    """Fill blocks of at most `max_tokens` tokens with as many consecutive sentences as fit.

    A sentence that is longer than a block is truncated to a block of its own, which does not end with `</s>`.

    Args:
        table: sentences, each with `</s>`.
        max_tokens: the largest length of a block.
    """
    offsets = table.offsets
    # For every row, compute where a block that starts there ends. One NumPy call for each block would be slow.
    end_rows = np.searchsorted(offsets, offsets[:-1] + max_tokens, side="right") - 1
    end_rows = np.maximum(end_rows, np.arange(1, len(offsets))).tolist()  # a block has at least one sentence
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
        """Return the pairs of consecutive parts."""
        source, target = [Table.join(parts, f"{side}.") for side in PAIR_COLUMNS]
        sentence_ids = [part[SENTENCE_ID].view(np.int64) for part in parts]
        return cls(source, target, sentence_ids[0] if len(parts) == 1 else concatenate_int64(sentence_ids))

    @classmethod
    def of_part(cls, arrays: dict[str, np.ndarray]) -> "Pairs":
        """Return the pairs of a part."""
        return cls.join([arrays])

    def __len__(self) -> int:
        return len(self.source)


@dataclass(frozen=True)
class StoredTable:
    """One corpus of one language or language pair, whose parts are read when they are needed."""

    name: str  # such as `mono/de/weblate`
    row_counts: np.ndarray  # (parts,)
    block_counts: np.ndarray  # (parts,) MLM samples
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
        """Return the language (pair) and the corpus, such as `de/weblate`."""
        return self.name.partition("/")[2]

    @property
    def part_names(self) -> list[str]:
        return [name_part(self.name, number) for number in range(self.part_count)]

    @property
    def byte_count(self) -> int:
        """Return the size of all parts."""
        return sum(self.reader.byte_count(name) for name in self.part_names)

    def expect(self, current_parts: Sequence[int], next_parts: Sequence[int]) -> None:
        """Tell the reader the numbers of the parts that the current step and the next steps read."""
        current_names = [name_part(self.name, number) for number in current_parts]
        next_names = [name_part(self.name, number) for number in next_parts]
        self.reader.expect(self.name, current_names, next_names)

    def read_part(self, number: int) -> dict[str, np.ndarray]:
        """Read the arrays of a part."""
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
    """All training text by language and language pair, in alphabetical order, with the corpora of each in order."""

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
        """Return the text that was added before every sentence."""
        return self.manifest["facts"].get("prefix", "")

    @property
    def vocabulary_size(self) -> int:
        return self.vocabulary.size


def open_shards(directory: Path, source: PartSource | None = None) -> Shards:
    """Read the manifest of shards and verify the tokenizer. The text is read and verified when it is needed.

    Args:
        directory: the shards; with a `source`, their manifest and tokenizer.
        source: remote storage of the parts. The directory then receives those that are needed.

    Raises:
        InputError: there is no manifest, or another version has written the shards.
        DataCorrupt: the manifest or the tokenizer differs from what was written, or an id is outside the vocabulary.
        CorpusTooSmall: there is neither monolingual text nor a pair.
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
        row_counts = part_counts[:, 0]
        block_counts = part_counts[:, 2]
        kind, language, _ = name.split("/")
        tables[kind].setdefault(language, []).append(StoredTable(name, row_counts, block_counts, reader))
    if not tables["mono"] and not tables["pairs"]:
        raise CorpusTooSmall(f"{directory} contains no text (have=0 need=1 sentence): tokenize another corpus")
    return Shards(tables["mono"], tables["pairs"], tables["held_out"], manifest, directory)


def _is_outside_tables(path: Path) -> bool:
    """Return whether a file is not a part of a table, such as a file of the tokenizer."""
    return path.parts[0] not in ("mono", "pairs", "held_out")


def concatenate_int64(arrays: Sequence[np.ndarray | Sequence[int]]) -> np.ndarray:
    """Concatenate arrays as int64. The result is empty if there are none."""
    return np.concatenate(arrays).astype(np.int64) if arrays else np.empty(0, np.int64)

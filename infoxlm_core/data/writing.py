"""Write tables of token ids as parts, see `shards`."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import safetensors.numpy

from infoxlm_core.data.shards import PAIR_COLUMNS, SENTENCE_ID, TEXT, TOKENS, Table, make_blocks, name_part

BLOCK_TOKENS = 512
PART_TOKENS = 1 << 20  # 4 MB


def make_column(flat: np.ndarray, lengths: np.ndarray | Sequence[int]) -> pa.LargeListArray:
    """Return a column of N rows from their token ids (T,), one row after another, and their lengths (N,)."""
    return pa.LargeListArray.from_arrays(np.cumsum([0, *lengths]), np.asarray(flat, TOKENS))


def write_table(
    directory: Path,
    name: str,
    chunks: Iterable[pa.Table],
    block_tokens: int = BLOCK_TOKENS,
    part_tokens: int = PART_TOKENS,
) -> dict[str, Any]:
    """Write a table, of which at most one part and one chunk are in memory.

    Args:
        directory: the shards.
        name: name of the table, such as `mono/de/weblate`.
        chunks: rows with the column `text`, or with `source`, `target` and `sentence_id`.
        block_tokens: largest number of tokens of an MLM sequence, special tokens included, for the index of blocks.
        part_tokens: number of tokens after which a part ends.

    Returns:
        The numbers of rows and tokens, the largest id, and rows, tokens and blocks of each part.
    """
    parts: list[list[int]] = []
    largest_id = -1
    for rows in _cut_parts(chunks, block_tokens, part_tokens):
        tables = _token_tables(rows)
        arrays: dict[str, np.ndarray] = {}
        for column, table in tables.items():
            prefix = "" if column == TEXT else f"{column}."
            arrays[f"{prefix}tokens"] = table.tokens
            arrays[f"{prefix}offsets"] = table.offsets.astype(TOKENS)
            largest_id = max(largest_id, int(table.tokens.max(initial=0)))
        block_count = 0
        if TEXT in tables:
            blocks = make_blocks(tables[TEXT], block_tokens - 1)  # `<s>` is added to a block by the layout
            arrays["blocks"] = blocks.starts.astype(TOKENS)
            block_count = len(blocks)
        else:
            arrays[SENTENCE_ID] = rows[SENTENCE_ID].to_numpy()
        path = directory / name_part(name, len(parts))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(safetensors.numpy.save(arrays))
        token_count = sum(len(table.tokens) for table in tables.values())
        parts.append([len(rows), token_count, block_count])
    total_rows, total_tokens, _ = np.array(parts, np.int64).reshape(-1, 3).sum(axis=0).tolist()
    return {"rows": total_rows, "tokens": total_tokens, "largest_id": largest_id, "parts": parts}


def _token_tables(rows: pa.Table) -> dict[str, Table]:
    """Return the token lists of each text column as a table, by column name."""
    tables = {}
    for name in rows.column_names:
        if name in (TEXT, *PAIR_COLUMNS):
            column = rows[name].combine_chunks()
            lengths = pc.list_value_length(column).to_numpy()
            offsets = np.concatenate([[0], lengths.cumsum()])  # (rows + 1,)
            tables[name] = Table(column.flatten().to_numpy(), offsets)
    return tables


def _cut_parts(chunks: Iterable[pa.Table], block_tokens: int, part_tokens: int) -> Iterator[pa.Table]:
    """Yield the rows of each part. Parts of sentences end where blocks end, so that blocks do not depend on parts."""
    pending: pa.Table | None = None
    for chunk in chunks:
        pending = chunk if pending is None else pa.concat_tables([pending, chunk])
        while True:
            row_count = _find_end(_token_tables(pending), block_tokens, part_tokens)
            if row_count is None:
                break
            yield pending.slice(0, row_count)
            pending = pending.slice(row_count)
    if pending is not None and len(pending):
        yield pending


def _find_end(tables: dict[str, Table], block_tokens: int, part_tokens: int) -> int | None:
    """Return the number of rows of the next part, or None if the rows are not enough for a part."""
    offsets = np.sum([table.offsets for table in tables.values()], axis=0)  # (rows + 1,) tokens of all columns
    if offsets[-1] <= part_tokens:
        return None
    possible_ends = np.arange(1, len(offsets))
    if TEXT in tables:
        # The last block may continue in the next chunk, so a part ends where a block starts.
        block_starts = make_blocks(tables[TEXT], block_tokens - 1).starts
        possible_ends = np.searchsorted(offsets, block_starts[1:])
    if not len(possible_ends):
        return None
    ends_within_limit = int(np.searchsorted(offsets[possible_ends], part_tokens, side="right"))
    return int(possible_ends[max(0, ends_within_limit - 1)])

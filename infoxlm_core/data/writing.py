"""Write tables of token ids as parts, see `shards`."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import safetensors.numpy

from infoxlm_core.data.shards import PAIR_COLUMNS, SENTENCE_ID, TEXT, TOKENS, Table, make_blocks, name_part

BLOCK_TOKENS = 512  # tokens of the paper's MLM sequences
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
    """Write a table part by part, so that only one part and one chunk are in memory.

    Args:
        directory: the shards.
        name: name of the table, such as `mono/de/weblate`.
        chunks: rows with the column `text`, or with `source`, `target` and `sentence_id`.
        block_tokens: largest number of tokens of an MLM sequence, special tokens included, for the index of blocks.
        part_tokens: number of tokens after which a part ends.

    Returns:
        The numbers of rows and tokens, the largest id, and rows, tokens and blocks of each part.
    """
    counts_by_part: list[list[int]] = []  # rows, tokens and blocks of each part
    largest_id = -1
    for rows in _cut_parts(chunks, block_tokens, part_tokens):
        columns = _read_token_columns(rows)
        arrays = _make_part_arrays(rows, columns, block_tokens)
        path = directory / name_part(name, len(counts_by_part))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(safetensors.numpy.save(arrays))
        token_count = sum(len(table.tokens) for table in columns.values())
        block_count = len(arrays["blocks"]) if TEXT in columns else 0
        counts_by_part.append([len(rows), token_count, block_count])
        for table in columns.values():
            largest_id = max(largest_id, int(table.tokens.max(initial=0)))
    row_count = sum(rows for rows, _, _ in counts_by_part)
    token_count = sum(tokens for _, tokens, _ in counts_by_part)
    return {"rows": row_count, "tokens": token_count, "largest_id": largest_id, "parts": counts_by_part}


def _make_part_arrays(rows: pa.Table, columns: dict[str, Table], block_tokens: int) -> dict[str, np.ndarray]:
    """Return the arrays of a part by their names in its file, see `shards`."""
    arrays: dict[str, np.ndarray] = {}
    for column, table in columns.items():
        prefix = "" if column == TEXT else f"{column}."
        arrays[f"{prefix}tokens"] = table.tokens
        arrays[f"{prefix}offsets"] = table.offsets.astype(TOKENS)
    if TEXT in columns:
        blocks = make_blocks(columns[TEXT], block_tokens - 1)  # a block gets `<s>` when it is drawn
        arrays["blocks"] = blocks.starts.astype(TOKENS)
    else:
        arrays[SENTENCE_ID] = rows[SENTENCE_ID].to_numpy()
    return arrays


def _read_token_columns(rows: pa.Table) -> dict[str, Table]:
    """Return the token lists of the column `text`, or of `source` and `target`, by column name."""
    tables = {}
    for name in rows.column_names:
        if name == TEXT or name in PAIR_COLUMNS:
            column = rows[name].combine_chunks()
            lengths = pc.list_value_length(column).to_numpy()
            offsets = np.concatenate([[0], lengths.cumsum()])  # (rows + 1,)
            tables[name] = Table(column.flatten().to_numpy(), offsets)
    return tables


def _cut_parts(chunks: Iterable[pa.Table], block_tokens: int, part_tokens: int) -> Iterator[pa.Table]:
    """Yield the rows of one part after another. No part of sentences ends inside an MLM block."""
    remaining_rows: pa.Table | None = None
    for chunk in chunks:
        remaining_rows = chunk if remaining_rows is None else pa.concat_tables([remaining_rows, chunk])
        row_count = _count_rows_of_next_part(remaining_rows, block_tokens, part_tokens)
        while row_count is not None:
            yield remaining_rows.slice(0, row_count)
            remaining_rows = remaining_rows.slice(row_count)
            row_count = _count_rows_of_next_part(remaining_rows, block_tokens, part_tokens)
    if remaining_rows is not None and len(remaining_rows):
        yield remaining_rows


def _count_rows_of_next_part(rows: pa.Table, block_tokens: int, part_tokens: int) -> int | None:
    """Return how many of the rows are the next part, or None if they have too few tokens to fill a part."""
    tables = _read_token_columns(rows)
    offsets = np.sum([table.offsets for table in tables.values()], axis=0)  # (rows + 1,) tokens of all columns
    if offsets[-1] <= part_tokens:
        return None
    possible_counts = np.arange(1, len(offsets))
    if TEXT in tables:
        # The last block may continue in the next chunk, so a part ends where a block starts.
        block_starts = make_blocks(tables[TEXT], block_tokens - 1).starts
        possible_counts = np.searchsorted(offsets, block_starts[1:])
    if not len(possible_counts):
        return None
    # The largest possible part within the limit, or the smallest if even that exceeds it.
    parts_within_limit = int(np.searchsorted(offsets[possible_counts], part_tokens, side="right"))
    return int(possible_counts[max(0, parts_within_limit - 1)])

"""Write tables of token ids in parts, see `shards`."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import safetensors.numpy

from infoxlm_core.data.shards import PAIR_COLUMNS, SENTENCE_ID, TEXT, UINT32, Table, make_blocks, name_part

BLOCK_TOKENS = 512  # tokens of the paper's MLM sequences
PART_TOKENS = 1 << 20  # 4 MB


def make_column(flat: np.ndarray, lengths: np.ndarray | Sequence[int]) -> pa.LargeListArray:
    """Make a column of N rows from their concatenated token ids (T,) and their lengths (N,)."""
    return pa.LargeListArray.from_arrays(np.cumsum([0, *lengths]), np.asarray(flat, UINT32))


def write_table(
    directory: Path,
    name: str,
    chunks: Iterable[pa.Table],
    block_tokens: int = BLOCK_TOKENS,
    part_tokens: int = PART_TOKENS,
) -> dict[str, Any]:
    """Write a table part by part, with only one part and one chunk in memory.

    Args:
        directory: directory of the shards.
        name: name of the table, such as `mono/de/weblate`.
        chunks: tables with the column `text`, or with `source`, `target` and `sentence_id`.
        block_tokens: maximum number of tokens per MLM block, including special tokens.
        part_tokens: largest number of tokens per part.

    Returns:
        Numbers of rows and tokens, the largest id, and the numbers of rows, tokens and blocks of each part.
    """
    counts_by_part: list[list[int]] = []  # rows, tokens and blocks of each part
    largest_id = -1  # `open_shards` compares this id with the vocabulary
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
    """Return a part's arrays by name, see `shards`."""
    arrays: dict[str, np.ndarray] = {}
    for column, table in columns.items():
        prefix = "" if column == TEXT else f"{column}."
        arrays[f"{prefix}tokens"] = table.tokens
        arrays[f"{prefix}offsets"] = table.offsets.astype(UINT32)
    if TEXT in columns:
        blocks = make_blocks(columns[TEXT], block_tokens - 1)  # leaves room for `<s>`, which is added on drawing
        arrays["blocks"] = blocks.starts.astype(UINT32)
    else:
        arrays[SENTENCE_ID] = rows[SENTENCE_ID].to_numpy()
    return arrays


def _read_token_columns(rows: pa.Table) -> dict[str, Table]:
    """Return the token columns (`text`, or `source` and `target`) by name."""
    tables = {}
    for name in rows.column_names:
        if name == TEXT or name in PAIR_COLUMNS:
            column = rows[name].combine_chunks()
            lengths = pc.list_value_length(column).to_numpy()
            offsets = np.concatenate([[0], lengths.cumsum()])  # (rows + 1,)
            tables[name] = Table(column.flatten().to_numpy(), offsets)
    return tables


def _cut_parts(chunks: Iterable[pa.Table], block_tokens: int, part_tokens: int) -> Iterator[pa.Table]:
    """Split rows into parts. A part of sentences ends where an MLM block ends, so that no block spans two parts."""
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
    """Return the number of rows in the next part, or None if the rows do not fill a part."""
    tables = _read_token_columns(rows)
    offsets = np.sum([table.offsets for table in tables.values()], axis=0)  # (rows + 1,) token offsets over all columns
    if offsets[-1] <= part_tokens:
        return None
    possible_counts = np.arange(1, len(offsets))
    if TEXT in tables:
        # The last block may continue in the next chunk, so parts end where a block starts.
        block_starts = make_blocks(tables[TEXT], block_tokens - 1).starts
        possible_counts = np.searchsorted(offsets, block_starts[1:])
    if not len(possible_counts):
        return None
    # Choose the largest part within the limit, or the smallest part if all exceed the limit.
    parts_within_limit = int(np.searchsorted(offsets[possible_counts], part_tokens, side="right"))
    return int(possible_counts[max(0, parts_within_limit - 1)])

"""Moving windows: the parts from which a step draws its samples, as a function of seed and step.

A step draws from w consecutive positions of each table, starting at position a = step x rate. In a table of M parts,
position q is part permutation(q div M)[q mod M], so each pass over the table has its own random order. The rate is the
number of samples that a step draws from the table, divided by the number of samples per part. On average, each sample
is therefore drawn once per pass. If a table has at most w parts, its window does not move and contains all parts in
order.
"""

import bisect
import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from infoxlm_core.data.sampling import make_rng
from infoxlm_core.data.shards import StoredTable

T = TypeVar("T")
MIN_PARTS = 4  # smallest number of parts in a table's window
_RATE_DENOMINATOR = 1 << 20  # rates are fractions of integers, so that positions are the same on all machines


@dataclass(frozen=True)
class Window(Generic[T]):
    """Samples available to one step. A row is a sample's index within its table's window."""

    row_counts: np.ndarray  # (tables,)
    first_rows: list[list[int]]  # first row of each part of each table
    parts: list[list[T]]  # parts of each table

    def locate(self, tables: np.ndarray, rows: np.ndarray) -> tuple[list[T], np.ndarray]:
        """Return each sample's part, and its index within the part (count,)."""
        parts = []
        rows_in_parts = []
        for table, row in zip(tables.tolist(), rows.tolist(), strict=True):
            number = bisect.bisect_right(self.first_rows[table], row) - 1
            parts.append(self.parts[table][number])
            rows_in_parts.append(row - self.first_rows[table][number])
        return parts, np.array(rows_in_parts, np.int64)


class MovingWindow(Generic[T]):
    """Returns each step's window, and reads the parts that newly enter the window.

    Args:
        tables: tables of the shards.
        sample_counts: number of samples in each part (parts,) of each table.
        draws: mean number of samples that a step draws from each table (tables,).
        window_bytes: total size of all tables' windows, divided in proportion to `draws`.
        seed: random seed for the order of parts.
        open_part: function that makes a part's samples from its arrays.
    """

    def __init__(
        self,
        tables: Sequence[StoredTable],
        sample_counts: Sequence[np.ndarray],
        draws: np.ndarray,
        window_bytes: int,
        seed: int,
        open_part: Callable[[dict[str, np.ndarray]], T],
    ) -> None:
        part_counts = np.array([len(counts) for counts in sample_counts], np.int64)  # (tables,)
        table_samples = np.array([counts.sum() for counts in sample_counts], np.int64)
        table_bytes = np.array([table.byte_count for table in tables], np.int64)
        widths = _choose_widths(part_counts, table_bytes, draws, window_bytes)
        parts_per_step = draws * part_counts / np.maximum(table_samples, 1)
        has_all_parts = widths == part_counts  # (tables,) windows that do not move
        rate_numerators = np.where(has_all_parts, 0, np.rint(_RATE_DENOMINATOR * parts_per_step))
        self._rate_numerators = rate_numerators.astype(np.int64)
        self._positions = np.full(len(tables), -1)  # before the first step
        self._table_windows: list[_TableWindow[T]] = []
        for table, counts, width in zip(tables, sample_counts, widths.tolist(), strict=True):
            self._table_windows.append(_TableWindow(table, counts, width, seed, open_part))
        self._window: Window[T] = Window(np.zeros(len(tables), np.int64), [], [])
        self._lock = threading.Lock()  # threads that prepare batches and fill the queue share this window

    def move_to(self, step: int) -> Window[T]:
        """Return a step's window. Raise DataCorrupt if a newly read part is damaged."""
        with self._lock:
            positions = step * self._rate_numerators // _RATE_DENOMINATOR  # (tables,) step * rate, rounded down
            moved_tables = np.flatnonzero(positions != self._positions).tolist()
            if moved_tables:
                # Announce the parts of all tables before reading any, so that all parts are downloaded in parallel.
                for table in moved_tables:
                    self._table_windows[table].announce_parts(int(positions[table]))
                for table in moved_tables:
                    self._table_windows[table].read_parts(int(positions[table]))
                self._window = Window(
                    np.array([window.row_count for window in self._table_windows], np.int64),
                    [window.first_rows for window in self._table_windows],
                    [window.parts for window in self._table_windows],
                )
                self._positions = positions
            return self._window


class _TableWindow(Generic[T]):
    """Window of one table: the parts at `width` consecutive positions.

    Args:
        table: table of the shards.
        sample_counts: number of samples in each part (parts,).
        width: number of parts in the window.
        seed: random seed for the order of parts.
        open_part: function that makes a part's samples from its arrays.
    """

    def __init__(
        self,
        table: StoredTable,
        sample_counts: np.ndarray,
        width: int,
        seed: int,
        open_part: Callable[[dict[str, np.ndarray]], T],
    ) -> None:
        self._table = table
        self._sample_counts = sample_counts
        self._width = width
        self._seed = seed
        self._open_part = open_part
        self._open_parts: dict[int, T] = {}  # by part number
        self.row_count = 0
        self.first_rows: list[int] = []  # first row of each part
        self.parts: list[T] = []

    def announce_parts(self, position: int) -> None:
        """Tell the table which parts the window at `position` contains, and which parts come next."""
        self._table.expect(self._list_parts(position), self._list_parts(position + self._width))

    def read_parts(self, position: int) -> None:
        """Move the window to `position`. Parts that are already in the window are not read again."""
        part_numbers = self._list_parts(position)
        open_parts: dict[int, T] = {}
        for number in part_numbers:
            if number in self._open_parts:
                open_parts[number] = self._open_parts[number]
            elif number not in open_parts:  # a part may end one pass and begin the next
                open_parts[number] = self._open_part(self._table.read_part(number))
        end_rows = [0, *self._sample_counts[part_numbers].cumsum().tolist()]
        self._open_parts = open_parts
        self.row_count = end_rows[-1]
        self.first_rows = end_rows[:-1]
        self.parts = [open_parts[number] for number in part_numbers]

    def _list_parts(self, position: int) -> list[int]:
        """Return the part numbers of the window that starts at `position`."""
        part_count = len(self._sample_counts)
        if self._width == part_count:  # a window of all parts never moves, so their order does not matter
            return list(range(part_count))
        part_numbers = []
        for window_position in range(position, position + self._width):
            pass_number, index = divmod(window_position, part_count)
            order = _order_parts(self._seed, self._table.name, pass_number, part_count)
            part_numbers.append(int(order[index]))
        return part_numbers


def _choose_widths(
    part_counts: np.ndarray, table_bytes: np.ndarray, draws: np.ndarray, window_bytes: int
) -> np.ndarray:
    """Return the number of parts in each table's window (tables,).

    If all tables fit into `window_bytes`, windows contain all parts. Otherwise, tables share `window_bytes` in
    proportion to their draws, with at least `MIN_PARTS` parts each.
    """
    if table_bytes.sum() <= window_bytes:
        return part_counts
    shares = draws / max(draws.sum(), np.finfo(float).tiny)  # avoids division by 0 without draws
    parts_per_byte = part_counts / np.maximum(table_bytes, 1)
    widths = (window_bytes * shares * parts_per_byte).astype(np.int64)
    return np.minimum(np.maximum(MIN_PARTS, widths), part_counts)


@functools.lru_cache(maxsize=4096)
def _order_parts(seed: int, table: str, pass_number: int, part_count: int) -> np.ndarray:
    """Return the random order of a table's parts during one pass."""
    return make_rng(seed, "window", table, pass_number).permutation(part_count)

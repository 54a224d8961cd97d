"""The moving window: the parts of each table that a step draws samples from, a function of seed and step.

A step draws from w consecutive positions of each table, starting at position a = step x rate. Position q is part
permutation(q div M)[q mod M] of a table of M parts, so that each pass over the table has its own random order. The rate
is the number of samples that a step draws from the table, divided by the samples of a part. Each sample is therefore
drawn once per pass on average. A table of at most w parts does not move: all its parts are in the window, in order.
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
MIN_PARTS = 4  # so that a step draws from several parts of even the smallest table
_RATE_UNIT = 1 << 20  # rates are integers, which are equal on all machines


@dataclass(frozen=True)
class Window(Generic[T]):
    """The samples that one step draws from. A row is the number of a sample within the window of its table."""

    row_counts: np.ndarray  # (tables,)
    first_rows: list[list[int]]  # of each table, the row at which each part starts
    parts: list[list[T]]  # of each table

    def locate(self, tables: np.ndarray, rows: np.ndarray) -> tuple[list[T], np.ndarray]:
        """Return the part of each sample, and the sample's number within its part, (count,)."""
        parts = []
        rows_in_parts = []
        for table, row in zip(tables.tolist(), rows.tolist(), strict=True):
            number = bisect.bisect_right(self.first_rows[table], row) - 1
            parts.append(self.parts[table][number])
            rows_in_parts.append(row - self.first_rows[table][number])
        return parts, np.array(rows_in_parts, np.int64)


class MovingWindow(Generic[T]):
    """Returns the window of each step, and reads the parts that enter it.

    Args:
        tables: the tables.
        sample_counts: the number of samples in each part of each table.
        draws: (tables,) how many samples of each table a step draws, on average.
        window_bytes: size of the windows of all tables together, which they share in proportion to `draws`.
        seed: seed of the order of parts.
        open_part: makes the samples of a part from its arrays.
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
        has_all_parts = widths == part_counts  # (tables,) such a window does not move
        self._rates = np.where(has_all_parts, 0, np.rint(_RATE_UNIT * parts_per_step)).astype(np.int64)
        self._positions = np.full(len(tables), -1)  # before the first step
        self._table_windows: list[_TableWindow[T]] = []
        for table, counts, width in zip(tables, sample_counts, widths.tolist(), strict=True):
            self._table_windows.append(_TableWindow(table, counts, width, seed, open_part))
        self._window: Window[T] = Window(np.zeros(len(tables), np.int64), [], [])
        self._lock = threading.Lock()  # one thread prepares batches, another fills the queue

    def move_to(self, step: int) -> Window[T]:
        """Return the window of a step. Raise DataCorrupt if a part that enters it is damaged."""
        with self._lock:
            positions = step * self._rates // _RATE_UNIT  # (tables,)
            moved_tables = np.flatnonzero(positions != self._positions).tolist()
            if moved_tables:
                # Announce the parts of all tables before the first is read, so that they are downloaded in parallel.
                for table in moved_tables:
                    self._table_windows[table].announce_parts(int(positions[table]))
                for table in moved_tables:
                    self._table_windows[table].read_parts(int(positions[table]))
                self._window = self._join_tables()
                self._positions = positions
            return self._window

    def _join_tables(self) -> Window[T]:
        """Return the current windows of all tables as one window."""
        return Window(
            np.array([window.row_count for window in self._table_windows], np.int64),
            [window.first_rows for window in self._table_windows],
            [window.parts for window in self._table_windows],
        )


class _TableWindow(Generic[T]):
    """The window of one table: the parts at `width` consecutive positions.

    Args:
        table: the table.
        sample_counts: (parts,) the number of samples in each part.
        width: number of parts in the window.
        seed: seed of the order of parts.
        open_part: makes the samples of a part from its arrays.
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
        self._open_parts: dict[int, T] = {}  # by number
        self.row_count = 0
        self.first_rows: list[int] = []  # the row at which each part starts
        self.parts: list[T] = []

    def announce_parts(self, position: int) -> None:
        """Tell the table which parts the window at a position contains, and which come next."""
        self._table.expect(self._list_parts(position), self._list_parts(position + self._width))

    def read_parts(self, position: int) -> None:
        """Move the window to a position. Only parts that were not in the window before are read."""
        part_numbers = self._list_parts(position)
        open_parts: dict[int, T] = {}
        for number in part_numbers:
            if number in self._open_parts:
                open_parts[number] = self._open_parts[number]
            elif number not in open_parts:  # a part is in the window twice if it ends one pass and begins the next
                open_parts[number] = self._open_part(self._table.read_part(number))
        end_rows = [0, *self._sample_counts[part_numbers].cumsum().tolist()]
        self._open_parts = open_parts
        self.row_count = end_rows[-1]
        self.first_rows = end_rows[:-1]
        self.parts = [open_parts[number] for number in part_numbers]

    def _list_parts(self, position: int) -> list[int]:
        """Return the numbers of the parts in the window that starts at a position."""
        part_count = len(self._sample_counts)
        if self._width == part_count:
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
    """Return the number of parts in the window of each table, (tables,).

    These are all parts if all tables fit into `window_bytes`. Otherwise the tables share them in proportion to their
    draws, with at least `MIN_PARTS` parts each.
    """
    if table_bytes.sum() <= window_bytes:
        return part_counts
    shares = draws / max(draws.sum(), np.finfo(float).tiny)  # avoids dividing by 0 if nothing is drawn
    parts_per_byte = part_counts / np.maximum(table_bytes, 1)
    widths = (window_bytes * shares * parts_per_byte).astype(np.int64)
    return np.minimum(np.maximum(MIN_PARTS, widths), part_counts)


@functools.lru_cache(maxsize=4096)
def _order_parts(seed: int, table: str, pass_number: int, part_count: int) -> np.ndarray:
    """Return the random order in which parts enter the window during one pass over a table."""
    return make_rng(seed, "window", table, pass_number).permutation(part_count)

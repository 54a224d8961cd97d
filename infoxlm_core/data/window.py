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
MIN_PARTS = 4
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
        self._tables = tables
        self._sample_counts = sample_counts
        self._seed = seed
        self._open_part = open_part
        part_counts = np.array([len(counts) for counts in sample_counts], np.int64)  # (tables,)
        table_samples = np.array([counts.sum() for counts in sample_counts], np.int64)
        table_bytes = np.array([table.byte_count for table in tables], np.int64)
        self.widths = _choose_widths(part_counts, table_bytes, draws, window_bytes)
        self.has_all_parts = self.widths == part_counts  # (tables,) such a window does not move
        parts_per_step = draws * part_counts / np.maximum(table_samples, 1)
        self._rates = np.where(self.has_all_parts, 0, np.rint(_RATE_UNIT * parts_per_step)).astype(np.int64)
        self._positions = np.full(len(tables), -1)
        self._window: Window[T] = Window(np.zeros(len(tables), np.int64), [[]] * len(tables), [[]] * len(tables))
        self._open_parts: list[dict[int, T]] = [{} for _ in tables]  # of each table, by number
        self._lock = threading.Lock()  # one thread prepares batches, another fills the queue

    def move_to(self, step: int) -> Window[T]:
        """Return the window of a step. Raise DataCorrupt if a part that enters it is damaged."""
        with self._lock:
            positions = step * self._rates // _RATE_UNIT  # (tables,)
            moved_tables = np.flatnonzero(positions != self._positions).tolist()
            if moved_tables:
                self._window = self._move(moved_tables, positions)
                self._positions = positions
            return self._window

    def list_parts(self, table: int, position: int) -> list[int]:
        """Return the numbers of the parts in the window of a table that starts at a position."""
        if self.has_all_parts[table]:
            return list(range(int(self.widths[table])))
        part_count = len(self._sample_counts[table])
        part_numbers = []
        for window_position in range(position, position + int(self.widths[table])):
            pass_number, index = divmod(window_position, part_count)
            order = _order_parts(self._seed, self._tables[table].name, pass_number, part_count)
            part_numbers.append(int(order[index]))
        return part_numbers

    def _move(self, moved_tables: Sequence[int], positions: np.ndarray) -> Window[T]:
        """Return the window with the parts at new positions of the moved tables."""
        part_numbers = {table: self.list_parts(table, int(positions[table])) for table in moved_tables}
        for table, numbers in part_numbers.items():
            next_position = int(positions[table] + self.widths[table])
            self._tables[table].expect(numbers, self.list_parts(table, next_position))
        row_counts = self._window.row_counts.copy()
        first_rows = self._window.first_rows.copy()
        parts = self._window.parts.copy()
        for table, numbers in part_numbers.items():
            previous_parts = self._open_parts[table]
            open_parts: dict[int, T] = {}
            for number in numbers:
                if number in previous_parts:
                    open_parts[number] = previous_parts[number]
                elif number not in open_parts:
                    open_parts[number] = self._open_part(self._tables[table].read_part(number))
            self._open_parts[table] = open_parts
            parts[table] = [open_parts[number] for number in numbers]
            end_rows = self._sample_counts[table][numbers].cumsum().tolist()
            first_rows[table] = [0, *end_rows[:-1]]
            row_counts[table] = end_rows[-1] if end_rows else 0
        return Window(row_counts, first_rows, parts)


def _choose_widths(
    part_counts: np.ndarray, table_bytes: np.ndarray, draws: np.ndarray, window_bytes: int
) -> np.ndarray:
    """Return the number of parts in the window of each table, (tables,): all parts if all tables fit.

    Otherwise the tables share `window_bytes` in proportion to their draws, with at least `MIN_PARTS` parts each.
    """
    if table_bytes.sum() <= window_bytes:
        return part_counts
    shares = draws / max(draws.sum(), np.finfo(float).tiny)
    parts_per_byte = part_counts / np.maximum(table_bytes, 1)
    widths = (window_bytes * shares * parts_per_byte).astype(np.int64)
    return np.minimum(np.maximum(MIN_PARTS, widths), part_counts)


@functools.lru_cache(maxsize=4096)
def _order_parts(seed: int, table: str, pass_number: int, part_count: int) -> np.ndarray:
    """Return the random order in which parts enter the window during one pass over a table."""
    return make_rng(seed, "window", table, pass_number).permutation(part_count)

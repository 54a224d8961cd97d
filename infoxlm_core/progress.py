"""Show the progress of a long loop: as a bar on a terminal, otherwise as log lines."""

import functools
import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

logger = logging.getLogger(__name__)
SECONDS_BETWEEN_LINES = 15.0  # a line for each unit would hide the other messages of a log


def format_remaining_time(elapsed_seconds: float, finished_count: int, total_count: int) -> str:
    """Return the expected remaining time of a loop in minutes and seconds, such as `3:20 left`.

    Args:
        elapsed_seconds: time that the finished units took.
        finished_count: number of finished units.
        total_count: number of all units.
    """
    seconds_per_unit = elapsed_seconds / finished_count
    remaining_seconds = seconds_per_unit * (total_count - finished_count)
    return f"{remaining_seconds // 60:.0f}:{int(remaining_seconds % 60):02d} left"


class _ProgressLog:
    """Logs the progress of a loop at most once in `SECONDS_BETWEEN_LINES`."""

    def __init__(self, title: str, total: int, unit: str):
        self.title = title
        self.total = total
        self.unit = unit
        self.finished_count = 0
        self.start_time = self.last_line_time = time.monotonic()

    def advance(self, count: int) -> None:
        """Count more finished units."""
        self.finished_count += count
        current_time = time.monotonic()
        if current_time - self.last_line_time < SECONDS_BETWEEN_LINES:
            return
        self.last_line_time = current_time
        remaining_time = format_remaining_time(current_time - self.start_time, self.finished_count, self.total)
        logger.info("%s: %d of %d %s, %s", self.title, self.finished_count, self.total, self.unit, remaining_time)


@contextmanager
def show_progress(title: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
    """Show the progress of the loop in a `with` block.

    Args:
        title: name of the loop, such as "tokenizing".
        total: number of units that the loop processes.
        unit: name of the units, in the plural.

    Yields:
        A function that takes the number of units that were finished since its last call.
    """
    if not sys.stderr.isatty():
        yield _ProgressLog(title, total, unit).advance
        return
    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TextColumn(unit), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(title, total=total)
        yield functools.partial(bar.advance, task)

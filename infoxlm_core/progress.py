"""Show a long loop's progress, as a bar on a terminal and as log lines elsewhere."""

import functools
import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

logger = logging.getLogger(__name__)
SECONDS_BETWEEN_LINES = 15.0  # a line for each unit would drown other log messages


def format_remaining_time(elapsed_seconds: float, finished_count: int, total_count: int) -> str:
    """Format a loop's expected remaining time in minutes and seconds, such as `3:20 left`.

    Args:
        elapsed_seconds: time spent on the finished units.
        finished_count: number of finished units.
        total_count: total number of units.
    """
    seconds_per_unit = elapsed_seconds / finished_count
    remaining_seconds = seconds_per_unit * (total_count - finished_count)
    return f"{remaining_seconds // 60:.0f}:{int(remaining_seconds % 60):02d} left"


class _ProgressLog:
    """Logs a loop's progress, at most once every `SECONDS_BETWEEN_LINES`."""

    def __init__(self, title: str, total: int, unit: str):
        self.title = title
        self.total = total
        self.unit = unit
        self.finished_count = 0
        self.start_time = self.last_line_time = time.monotonic()

    def advance(self, count: int) -> None:
        """Add finished units, and log the progress if the last line is old enough."""
        self.finished_count += count
        current_time = time.monotonic()
        if current_time - self.last_line_time < SECONDS_BETWEEN_LINES:
            return
        self.last_line_time = current_time
        remaining_time = format_remaining_time(current_time - self.start_time, self.finished_count, self.total)
        logger.info("%s: %d of %d %s, %s", self.title, self.finished_count, self.total, self.unit, remaining_time)


@contextmanager
def show_progress(title: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
    """Show the progress of a loop inside the `with` block.

    Args:
        title: name of the loop, such as "tokenizing".
        total: number of units that the loop processes.
        unit: plural name of the units, such as "lines".

    Yields:
        Function to call with the number of units finished since the last call.
    """
    if not sys.stderr.isatty():  # in a log, a bar would leave a line for each update
        yield _ProgressLog(title, total, unit).advance
        return
    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TextColumn(unit), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(title, total=total)
        yield functools.partial(bar.advance, task)

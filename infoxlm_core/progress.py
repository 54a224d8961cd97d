"""Show the progress of long work: a bar on a terminal, otherwise log lines."""

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

logger = logging.getLogger(__name__)
SECONDS_BETWEEN_LINES = 15.0


def time_left(seconds: float, done: int, total: int) -> str:
    """Return the expected remaining time, such as `3:20 left`.

    Args:
        seconds: time that the finished units took.
        done: number of finished units.
        total: number of all units.
    """
    remaining_seconds = seconds / done * (total - done)
    return f"{remaining_seconds // 60:.0f}:{int(remaining_seconds % 60):02d} left"


@contextmanager
def progress(title: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
    """Show the progress of work.

    Args:
        title: what the work is.
        total: number of units of the work.
        unit: name of the units, in the plural.

    Yields:
        A function to call whenever units are finished, with the number of units since its last call.
    """
    if sys.stderr.isatty():
        columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TextColumn(unit), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task(title, total=total)
            yield lambda count: bar.advance(task, count)
        return
    start_time = time.monotonic()
    last_line_time = start_time
    finished_count = 0

    def advance(count: int) -> None:
        nonlocal finished_count, last_line_time
        finished_count += count
        current_time = time.monotonic()
        if current_time - last_line_time >= SECONDS_BETWEEN_LINES:
            remaining = time_left(current_time - start_time, finished_count, total)
            logger.info("%s: %d of %d %s, %s", title, finished_count, total, unit, remaining)
            last_line_time = current_time

    yield advance

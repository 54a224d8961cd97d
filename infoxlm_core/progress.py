"""Progress of long work: a bar where somebody watches, a log line now and then where nobody does."""

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
    """`3:20 left`, if the rest goes as fast as what is done in so many seconds."""
    left = seconds / done * (total - done)
    return f"{left // 60:.0f}:{int(left % 60):02d} left"


@contextmanager
def progress(what: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
    """Show how far `what` is; the function it gives takes how many more units are done."""
    if sys.stderr.isatty():
        columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TextColumn(unit), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task(what, total=total)
            yield lambda count: bar.advance(task, count)
        return
    began = spoke = time.monotonic()
    done = 0

    def advance(count: int) -> None:
        nonlocal done, spoke
        done += count
        now = time.monotonic()
        if now - spoke >= SECONDS_BETWEEN_LINES:
            logger.info("%s: %d of %d %s, %s", what, done, total, unit, time_left(now - began, done, total))
            spoke = now

    yield advance

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
            left = (now - began) / done * (total - done)
            logger.info("%s: %d of %d %s, %d:%02d left", what, done, total, unit, left // 60, left % 60)
            spoke = now

    yield advance

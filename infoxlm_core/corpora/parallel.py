"""Apply a function to many items in this process, in several processes, or on machines that the caller provides.

A `ParallelMap` returns the results in order, so that the output of a stage does not depend on where the items were
processed.
"""

import itertools
import logging
import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from infoxlm_core.errors import WorkerLost

logger = logging.getLogger(__name__)
CHUNK = 4096  # rows of a chunk of a table: enough that the cost of sending a chunk hardly counts
AHEAD = 4  # items for each worker ahead of the results, so that no worker waits for a slow item of another one
_MAX_POOLS = 4  # more new pools would hardly help: processes are killed because memory is short

ItemFunction = Callable[[Any], Any]
"""A pure function that other processes can import, or a `functools.partial` of one."""

ParallelMap = Callable[[ItemFunction, Iterable[Any]], Iterator[Any]]
"""Yields a function's result for each item, in order. Items are read in the caller's thread, a few of them ahead."""


def map_in_process(function: ItemFunction, items: Iterable[Any]) -> Iterator[Any]:
    """Apply a function to the items in this process."""
    return map(function, items)


def yield_in_order(futures: Iterable[Future[Any]], max_pending: int) -> Iterator[Any]:
    """Yield the results of futures in order.

    Args:
        futures: submits an item whenever its next future is taken.
        max_pending: number of futures that are taken ahead of the result. It bounds the memory of waiting results.
    """
    pending: deque[Future[Any]] = deque()
    try:
        for future in futures:
            pending.append(future)
            if len(pending) > max_pending:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        for future in pending:
            future.cancel()


class ProcessPoolMap:
    """A `ParallelMap` over processes of this machine. If one is killed, all of them are replaced."""

    def __init__(self, process_count: int):
        self.process_count = process_count

    def __call__(self, function: ItemFunction, items: Iterable[Any]) -> Iterator[Any]:
        """Yield the result for each item in order.

        Raises:
            WorkerLost: processes were killed too often.
        """
        items = iter(items)  # a new pool continues after the items that an earlier pool has taken
        spawn = multiprocessing.get_context("spawn")  # forking a process with threads may deadlock
        for _ in range(_MAX_POOLS):
            unfinished_items: deque[Any] = deque()  # items that were submitted, and whose results were not yielded
            try:
                with ProcessPoolExecutor(
                    self.process_count, spawn, initializer=_initialise_worker, initargs=(function,)
                ) as pool:
                    futures = _submit_items(pool, items, unfinished_items)
                    for result in yield_in_order(futures, AHEAD * self.process_count):
                        unfinished_items.popleft()
                        yield result
                return
            except BrokenProcessPool:  # usually out of memory
                logger.warning("a worker process was killed: starting new ones")
                items = itertools.chain(unfinished_items, items)
        raise WorkerLost("worker processes were killed, usually for lack of memory: free memory, then run again")


def _submit_items(
    pool: ProcessPoolExecutor, items: Iterable[Any], submitted_items: deque[Any]
) -> Iterator[Future[Any]]:
    """Yield the future of each item, which is submitted when its turn comes and appended to `submitted_items`."""
    for item in items:
        submitted_items.append(item)
        yield pool.submit(_process_item, item)


_function_of_process: list[ItemFunction] = []  # sent to a process once, not with every item: it may contain a model


def _initialise_worker(function: ItemFunction) -> None:
    _function_of_process[:] = [function]
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    """Exit when the parent ends. A killed parent cannot end its pool, and its workers would wait forever."""
    parent = multiprocessing.parent_process()
    if parent:
        parent.join()
        os._exit(1)


def _process_item(item: Any) -> Any:
    return _function_of_process[0](item)

"""Map a function over many items in this process, in several processes, or on the caller's machines.

A `ParallelMap` yields results in order, so that a stage's output does not depend on where items were processed.
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
CHUNK = 4096  # rows per chunk; large enough that the cost of sending a chunk is negligible
AHEAD = 4  # items per worker ahead of the results, so that no worker waits for another worker's slow item
_MAX_POOLS = 4  # processes are usually killed because memory is short, so more attempts would hardly help

ItemFunction = Callable[[Any], Any]
"""A pure function that other processes can import, or a `functools.partial` of one."""

ParallelMap = Callable[[ItemFunction, Iterable[Any]], Iterator[Any]]
"""Yields a function's result for each item, in order. The caller's thread reads the items, a few ahead of the
results."""


def map_in_process(function: ItemFunction, items: Iterable[Any]) -> Iterator[Any]:
    """Map a function over the items in this process."""
    return map(function, items)


def yield_in_order(futures: Iterable[Future[Any]], max_pending: int) -> Iterator[Any]:
    """Yield the results of futures in order.

    Args:
        futures: lazy iterator that submits an item only when its future is taken.
        max_pending: number of futures to take ahead of the results. It bounds the memory for waiting results.
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
    """A `ParallelMap` over local processes. If a process is killed, the whole pool is replaced."""

    def __init__(self, process_count: int):
        self.process_count = process_count

    def __call__(self, function: ItemFunction, items: Iterable[Any]) -> Iterator[Any]:
        """Yield the function's result for each item, in order.

        Raises:
            WorkerLost: processes were killed too often.
        """
        items = iter(items)  # a new pool continues after the items of earlier pools
        spawn = multiprocessing.get_context("spawn")  # forking a multi-threaded process may deadlock
        for _ in range(_MAX_POOLS):
            unfinished_items: deque[Any] = deque()  # submitted items without a yielded result
            try:
                with ProcessPoolExecutor(
                    self.process_count, spawn, initializer=_initialise_worker, initargs=(function,)
                ) as pool:
                    futures = _submit_items(pool, items, unfinished_items)
                    for result in yield_in_order(futures, AHEAD * self.process_count):
                        unfinished_items.popleft()
                        yield result
                return
            except BrokenProcessPool:  # usually for lack of memory
                logger.warning("a worker process was killed: starting new ones")
                items = itertools.chain(unfinished_items, items)
        raise WorkerLost("worker processes were killed, usually for lack of memory: free memory, then run again")


def _submit_items(
    pool: ProcessPoolExecutor, items: Iterable[Any], submitted_items: deque[Any]
) -> Iterator[Future[Any]]:
    """Submit items one by one and yield their futures. Append each submitted item to `submitted_items`."""
    for item in items:
        submitted_items.append(item)
        yield pool.submit(_process_item, item)


_function_of_process: list[ItemFunction] = []  # sent once per process, because it may contain a model


def _initialise_worker(function: ItemFunction) -> None:
    _function_of_process[:] = [function]
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    """Exit when the parent process ends. A killed parent cannot shut down its pool, and workers would wait forever."""
    parent = multiprocessing.parent_process()
    if parent:
        parent.join()
        os._exit(1)


def _process_item(item: Any) -> Any:
    return _function_of_process[0](item)

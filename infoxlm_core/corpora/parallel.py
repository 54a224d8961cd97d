"""Apply a function to many items in this process, in several processes, or on machines that the caller provides.

A `ParallelMap` returns the results in order, so that the output of a stage does not depend on where the work ran.
"""

import functools
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
CHUNK = 4096  # rows of a chunk of a table
AHEAD = 4  # items for each worker that are processed ahead of the results
_ATTEMPTS = 4  # to finish the work with pools whose processes are killed

Work = Callable[[Any], Any]
"""A pure function that other processes can import, or a `functools.partial` of one."""

ParallelMap = Callable[[Work, Iterable[Any]], Iterator[Any]]
"""Yields a result for each item, in order. Items are read in the caller's thread, a few of them ahead."""


def in_process(work: Work, items: Iterable[Any]) -> Iterator[Any]:
    """Apply `work` to the items in this process."""
    return map(work, items)


def yield_in_order(submit: Callable[[Any], Future[Any]], items: Iterable[Any], max_pending: int) -> Iterator[Any]:
    """Yield the results of submitted items in order. Submit a few items ahead, so that memory stays small."""
    pending: deque[Future[Any]] = deque()
    try:
        for item in items:
            pending.append(submit(item))
            if len(pending) > max_pending:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        for future in pending:
            future.cancel()


def in_processes(count: int) -> ParallelMap:
    """Return a `ParallelMap` that uses `count` processes of this machine, and replaces them if some are killed."""

    def parallel_map(work: Work, items: Iterable[Any]) -> Iterator[Any]:
        new_items = iter(items)
        unfinished: deque[Any] = deque()  # items whose results were not yielded

        def unfinished_then_new() -> Iterator[Any]:
            yield from tuple(unfinished)
            for item in new_items:
                unfinished.append(item)
                yield item

        spawn = multiprocessing.get_context("spawn")  # forking a process with threads may deadlock
        for _ in range(_ATTEMPTS):
            try:
                with ProcessPoolExecutor(count, spawn, initializer=_initialise_worker, initargs=(work,)) as pool:
                    submit = functools.partial(_submit, pool)
                    for result in yield_in_order(submit, unfinished_then_new(), AHEAD * count):
                        unfinished.popleft()
                        yield result
                return
            except BrokenProcessPool:  # usually out of memory
                logger.warning("a worker process was killed: starting new ones")
        raise WorkerLost("worker processes were killed, usually for lack of memory: free memory, then run again")

    return parallel_map


_work_of_process: list[Work] = []  # sent to a process once and not with every item, because it may contain a model


def _initialise_worker(work: Work) -> None:
    _work_of_process[:] = [work]
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Exit when the parent ends. A killed parent cannot end its pool, and its workers would wait forever."""
    parent = multiprocessing.parent_process()
    if parent:
        parent.join()
        os._exit(1)


def _submit(pool: ProcessPoolExecutor, item: Any) -> Future[Any]:
    return pool.submit(_process, item)


def _process(item: Any) -> Any:
    return _work_of_process[0](item)

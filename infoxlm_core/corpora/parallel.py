"""Process chunks of tables in this process, in several processes, or on machines that the caller provides.

A `ParallelMap` applies a function to every chunk and returns the results in order, so that the output of a stage does
not depend on where the work ran.
"""

import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import pyarrow as pa

from infoxlm_core.errors import WorkerLost

CHUNK = 4096  # rows of one chunk

Work = Callable[[pa.Table], pa.Table]
"""A pure function that other processes can import, or a `functools.partial` of one."""

ParallelMap = Callable[[Work, Iterable[pa.Table]], Iterator[pa.Table]]
"""Yields one result for each chunk, in order. Chunks are read in the caller's thread, a few of them ahead."""


def in_process(work: Work, chunks: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Apply `work` to the chunks in this process."""
    return map(work, chunks)


def in_processes(count: int) -> ParallelMap:
    """Return a `ParallelMap` that uses `count` processes of this machine."""

    def parallel_map(work: Work, chunks: Iterable[pa.Table]) -> Iterator[pa.Table]:
        """Submit a few chunks ahead of the results, so that no process waits and memory stays small."""
        spawn = multiprocessing.get_context("spawn")  # forking a process with threads may deadlock
        pending: deque[Future[pa.Table]] = deque()
        try:
            with ProcessPoolExecutor(count, spawn, initializer=_initialise_worker, initargs=(work,)) as pool:
                for chunk in chunks:
                    pending.append(pool.submit(_process_chunk, chunk))
                    if len(pending) > 4 * count:
                        yield pending.popleft().result()
                while pending:
                    yield pending.popleft().result()
        except BrokenProcessPool:  # usually out of memory
            raise WorkerLost(
                "a worker process was killed, usually for lack of memory: free memory, then run again"
            ) from None

    return parallel_map


_work_of_process: list[Work] = []  # sent once, not with every chunk: it may hold a model


def _initialise_worker(work: Work) -> None:
    _work_of_process[:] = [work]
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Exit with the parent: a killed parent cannot end its pool, and its workers would wait forever."""
    parent = multiprocessing.parent_process()
    if parent:
        parent.join()
        os._exit(1)


def _process_chunk(chunk: pa.Table) -> pa.Table:
    return _work_of_process[0](chunk)

"""Work on tables, a chunk of rows at a time: here, in several processes, or on the machines of whoever calls a stage.

A stage says what is to be done to each chunk; a `ParallelMap` has it done and gives the results in order.
So nothing that a stage writes depends on who worked for it.
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
"""Gives one result for each chunk, in order. Chunks are read in the caller's thread, only some of them ahead."""


def in_process(work: Work, chunks: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Work in this process."""
    return map(work, chunks)


def in_processes(count: int) -> ParallelMap:
    """Return a `ParallelMap` that uses `count` processes of this machine."""

    def parallel_map(work: Work, chunks: Iterable[pa.Table]) -> Iterator[pa.Table]:
        spawn = multiprocessing.get_context("spawn")  # a fork of a process with threads may hang
        waiting: deque[Future[pa.Table]] = deque()
        try:
            with ProcessPoolExecutor(count, spawn, initializer=_take, initargs=(work,)) as pool:
                for chunk in chunks:
                    waiting.append(pool.submit(_do, chunk))
                    if len(waiting) > 4 * count:
                        yield waiting.popleft().result()
                while waiting:
                    yield waiting.popleft().result()
        except BrokenProcessPool:  # out of memory, most often
            raise WorkerLost("a process that worked on text was killed: free memory, then run again") from None

    return parallel_map


_taken: list[Work] = []  # by this process: work may hold a model, which is not sent with every chunk


def _take(work: Work) -> None:
    _taken[:] = [work]
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A parent that is killed cannot end its pool, whose processes would wait for work for ever."""
    if parent := multiprocessing.parent_process():
        parent.join()
        os._exit(1)


def _do(chunk: pa.Table) -> pa.Table:
    return _taken[0](chunk)

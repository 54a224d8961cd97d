"""Let a stage's work on single rows be done by N Ray workers, on this machine or on all of a cluster.

Ray Data runs it: each chunk of rows is one task, results come back in order, and a task whose worker or node dies is
done again somewhere else. Chunks travel through Ray's object store, and so does what the work needs, such as a model:
workers need our package and none of our files.
"""

import contextlib
import functools
import itertools
import logging
import os
import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pyarrow as pa

from components.adapters.ray import train as ray_train
from infoxlm_core import errors
from infoxlm_core.corpora.parallel import ParallelMap, Work
from infoxlm_core.errors import InfoXLMError, WorkerLost

_WINDOW = 8
"""Chunks a worker that are read before they are handed to Ray Data. Three windows are in memory: one being worked on,
one before it and one after."""
_RETRIES = 3
"""Of one chunk. Ray Data would try without end, even a chunk that exhausts the memory of every worker that takes it."""


@contextlib.contextmanager
def workers(count: int) -> Iterator[ParallelMap | None]:
    """Give a `ParallelMap` over `count` Ray workers, a CPU core each; None, which means "here", for 0.

    The workers of a cluster that RAY_ADDRESS names are all of its cores.

    Joins the Ray that this process uses, or the cluster that RAY_ADDRESS names, or starts Ray on this machine.

    Raises:
        WorkerLost: Ray does not start, or a chunk has lost its worker too often.
        and what is ours of the errors of the work.
    """
    if not count:
        yield None
        return
    import ray
    import ray.data

    mine = not ray.is_initialized()
    if mine:
        ray_train.start(count)
    warnings.filterwarnings("ignore", message="`ray_remote_args` is deprecated")  # nothing else limits retries
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # what matters is raised, and not as a stack of its own
    context = ray.data.DataContext.get_current().copy()
    context.execution_options.preserve_order = True
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    try:
        if os.environ.get("RAY_ADDRESS"):
            count = max(count, int(ray.cluster_resources().get("CPU", 0)))
        with ray.data.DataContext.current(context):
            yield functools.partial(_map_windows, count)
    finally:
        if mine:
            ray.shutdown()


def _map_windows(count: int, work: Work, chunks: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """The `ParallelMap`: while workers have one window of chunks, the next is read and the last one is used up."""
    chunks = iter(chunks)
    waiting: deque[Future[list[pa.Table]]] = deque()
    with ThreadPoolExecutor(1) as ahead:
        while window := list(itertools.islice(chunks, _WINDOW * count)):
            waiting.append(ahead.submit(_run, count, work, window))
            if len(waiting) > 2:
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()


def _run(count: int, work: Work, window: list[pa.Table]) -> list[pa.Table]:
    """Work on some chunks; one row of the data set is one chunk."""
    import ray.data
    from ray.exceptions import RayError, RayTaskError

    rows = [{"chunk": _pack(chunk)} for chunk in window]
    done = ray.data.from_items(rows, override_num_blocks=len(rows)).map(
        functools.partial(_apply, work=work),
        compute=ray.data.TaskPoolStrategy(size=min(count, len(rows))),
        max_retries=_RETRIES,
    )
    try:
        found = list(done.iter_rows())
    except RayTaskError:  # an error in code, as it would be here
        raise
    except RayError as error:
        reason = " ".join(str(error).split())[-300:]
        raise WorkerLost(f"Ray Data: {type(error).__name__}: {reason}: run again") from error
    for row in found:
        if row["error"]:
            raise errors.from_name(row["error"], row["message"])
    return [_unpack(row["chunk"]) for row in found]


def _apply(row: dict[str, Any], work: Work) -> dict[str, Any]:
    """Work on one chunk, in a Ray worker; an error of ours is a result, since trying again would not help."""
    try:
        return {"chunk": _pack(work(_unpack(row["chunk"]))), "error": "", "message": ""}
    except InfoXLMError as error:
        return {"chunk": b"", "error": type(error).__name__, "message": str(error)}


def _pack(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    return sink.getvalue().to_pybytes()


def _unpack(packed: bytes) -> pa.Table:
    return pa.ipc.open_stream(packed).read_all()

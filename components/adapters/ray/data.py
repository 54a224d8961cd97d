"""Process chunks of rows on N Ray workers, of this machine or of a whole cluster.

Ray Data runs each chunk as a task, returns results in order, and repeats a task on another node if its worker dies.
Chunks and the data that the work needs, such as a model, are passed through Ray's object store: workers need our
package, but none of our files.
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

from components.adapters.ray import train
from infoxlm_core import errors
from infoxlm_core.corpora.parallel import ParallelMap, Work
from infoxlm_core.errors import InfoXLMError

_WINDOW = 8
"""Chunks per worker in one window. Three windows are in memory: one being read, one being processed, and one being
consumed."""
_RETRIES = 3
"""Retries of one chunk. By default Ray Data retries for ever, even a chunk that exhausts every worker's memory."""


@contextlib.contextmanager
def workers(count: int) -> Iterator[ParallelMap | None]:
    """Yield a `ParallelMap` over `count` Ray workers with one CPU core each. Yield None for 0 workers.

    Uses the Ray instance of this process if there is one, else the cluster that RAY_ADDRESS names, with all its cores,
    else a new instance on this machine.

    Raises:
        WorkerLost: Ray does not start, or a chunk has lost its worker too often.
        OutOfMemory: Ray killed workers because their pod or machine has too little memory.
        and any InfoXLMError that the work raises.
    """
    if not count:
        yield None
        return
    import ray
    import ray.data

    starts_ray = not ray.is_initialized()
    if starts_ray:
        train.start(count)
    warnings.filterwarnings("ignore", message="`ray_remote_args` is deprecated")  # no other option limits retries
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # errors that matter are raised
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
        if starts_ray:
            ray.shutdown()


def _map_windows(count: int, work: Work, chunks: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Map chunks window by window: while workers process one, the next is read and the previous one is consumed."""
    remaining_chunks = iter(chunks)
    windows: deque[Future[list[pa.Table]]] = deque()  # being processed, or finished and not yet consumed
    with ThreadPoolExecutor(1) as executor:
        while True:
            window = list(itertools.islice(remaining_chunks, _WINDOW * count))
            if not window:
                break
            windows.append(executor.submit(_run, count, work, window))
            if len(windows) > 2:
                yield from windows.popleft().result()
        while windows:
            yield from windows.popleft().result()


def _run(count: int, work: Work, window: list[pa.Table]) -> list[pa.Table]:
    """Process one window of chunks. Each row of the Ray data set is a chunk."""
    import ray.data
    from ray.exceptions import RayError, RayTaskError

    rows = [{"chunk": _pack(chunk)} for chunk in window]
    results = ray.data.from_items(rows, override_num_blocks=len(rows)).map(
        functools.partial(_apply, work=work),
        compute=ray.data.TaskPoolStrategy(size=min(count, len(rows))),
        max_retries=_RETRIES,
    )
    try:
        processed = list(results.iter_rows())
    except RayTaskError:  # an error in our code
        raise
    except RayError as error:
        raise train.translate_error(error, "Ray Data") from error
    for row in processed:
        if row["error"]:
            raise errors.from_name(row["error"], row["message"])
    return [_unpack(row["chunk"]) for row in processed]


def _apply(row: dict[str, Any], work: Work) -> dict[str, Any]:
    """Process one chunk in a Ray worker. Return an InfoXLMError as a result, because a retry would not help."""
    try:
        return {"chunk": _pack(work(_unpack(row["chunk"]))), "error": "", "message": ""}
    except InfoXLMError as error:
        return {"chunk": b"", "error": type(error).__name__, "message": str(error)}


def _pack(table: pa.Table) -> bytes:
    """Serialise a table in Arrow's stream format."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    return sink.getvalue().to_pybytes()


def _unpack(packed: bytes) -> pa.Table:
    return pa.ipc.open_stream(packed).read_all()

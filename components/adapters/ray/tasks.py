"""Run the tasks of preparation and tokenization on N Ray workers, of this machine or of a whole cluster.

Each item is a Ray task, which is repeated on another node if its worker dies. Items, results and the data that the work
needs, such as a model, are passed through Ray's object store. Workers import this module, so it does not import torch.
"""

import contextlib
import functools
import os
from collections.abc import Iterable, Iterator
from typing import Any

from infoxlm_core.corpora import parallel
from infoxlm_core.corpora.parallel import ItemFunction, ParallelMap
from infoxlm_core.errors import InfoXLMError

_RETRIES = 3
"""Retries of a task whose worker died."""


@contextlib.contextmanager
def workers(count: int) -> Iterator[ParallelMap | None]:
    """Yield a `ParallelMap` over `count` Ray workers with one CPU core each. Yield None for 0 workers.

    Uses the Ray instance of this process if there is one, else the cluster that RAY_ADDRESS names, with all its cores,
    else a new instance on this machine.

    Raises:
        WorkerLost: Ray does not start, or a task has lost its worker too often.
        OutOfMemory: Ray killed workers because their pod or machine has too little memory.
        and any InfoXLMError that the work raises.
    """
    if not count:
        yield None
        return
    import ray

    from components.adapters.ray import train

    starts_ray = not ray.is_initialized()
    if starts_ray:
        train.start(count)
    try:
        if os.environ.get("RAY_ADDRESS"):
            count = max(count, int(ray.cluster_resources().get("CPU", 0)))
        yield functools.partial(_map, count)
    finally:
        if starts_ray:
            ray.shutdown()


def _map(count: int, function: ItemFunction, items: Iterable[Any]) -> Iterator[Any]:
    """Yield the results of Ray tasks in the order of the items."""
    import ray
    from ray.exceptions import RayError, RayTaskError

    shared_function = ray.put(function)  # sent to each node once
    task = ray.remote(num_cpus=1, max_retries=_RETRIES, scheduling_strategy="SPREAD")(_apply)

    try:
        futures = (task.remote(shared_function, item).future() for item in items)
        yield from parallel.yield_in_order(futures, parallel.AHEAD * count)
    except RayTaskError as error:
        if isinstance(error.cause, InfoXLMError):
            raise error.cause from None
        raise
    except RayError as error:
        from components.adapters.ray import train

        raise train.translate_error(error, "Ray") from error


def _apply(function: ItemFunction, item: Any) -> Any:
    return function(item)

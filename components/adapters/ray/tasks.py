"""Run preparation and tokenization on N Ray workers of this machine or of a cluster.

Each item is a Ray task. If its worker dies, Ray repeats the task on another node. Ray's object store transports items,
results and the data that all tasks share, such as a model. Workers import this module, so it does not import torch.
"""

import contextlib
import functools
import os
from collections.abc import Iterable, Iterator
from typing import Any

from infoxlm_core.corpora import parallel
from infoxlm_core.corpora.parallel import ItemFunction, ParallelMap
from infoxlm_core.errors import InfoXLMError

_RETRIES = 3  # retries of a task after its worker died


@contextlib.contextmanager
def start_workers(count: int) -> Iterator[ParallelMap | None]:
    """Start Ray workers with one CPU core each and yield a `ParallelMap` over them. Yield None if `count` is 0.

    If RAY_ADDRESS names a cluster with more than `count` CPU cores, start one worker per core.

    Raises:
        WorkerLost: Ray does not start, or a task has lost its worker more than `_RETRIES` times.
        OutOfMemory: Ray killed workers because their pod or machine has too little memory.
        and any InfoXLMError that a task raises.
    """
    if not count:
        yield None
        return
    import ray

    from components.adapters.ray import train  # here, because it imports torch, and workers import this module

    with train.use_ray(count):
        if os.environ.get("RAY_ADDRESS"):
            count = max(count, int(ray.cluster_resources().get("CPU", 0)))
        yield functools.partial(_map_with_ray_tasks, max_pending=parallel.AHEAD * count)


def _map_with_ray_tasks(function: ItemFunction, items: Iterable[Any], max_pending: int) -> Iterator[Any]:
    """Apply a function to each item in a Ray task. Yield the results in the order of the items.

    The items are read lazily, so that at most `max_pending` tasks run or wait at the same time.
    """
    import ray
    from ray.exceptions import RayError, RayTaskError

    from components.adapters.ray import train  # here, because it imports torch, and workers import this module

    shared_function = ray.put(function)  # each node receives the function only once
    # SPREAD uses all nodes from the start. Ray's default fills some of them first.
    remote_task = ray.remote(num_cpus=1, max_retries=_RETRIES, scheduling_strategy="SPREAD")(_apply)
    try:
        futures = (remote_task.remote(shared_function, item).future() for item in items)
        yield from parallel.yield_in_order(futures, max_pending)
    except RayTaskError as error:  # the function itself raised an exception
        if isinstance(error.cause, InfoXLMError):
            raise error.cause from None
        raise
    except RayError as error:
        raise train.to_infoxlm_error(error, "Ray") from error


def _apply(function: ItemFunction, item: Any) -> Any:
    """Call a function in a Ray worker. Ray replaces the reference `shared_function` by the function itself."""
    return function(item)

"""How many tasks a run may have on a cluster: Argo keeps the status of all in one object, and fails a run that outgrows
it, half-way.

The bytes are calculated, not measured: from the status of a similar run of Kubeflow 2.17, where a task of ours is many
nodes (driver, retry, pod, the iteration around them), compressed as Argo does it. A fifth is left for the error.
"""

from collections.abc import Sequence
from typing import TypeVar

from infoxlm_core.errors import ConfigError

HELD = 2**20
"""Bytes that Argo holds of a run (MAX_WORKFLOW_SIZE), if it keeps node status in no database (nodeStatusOffload)."""
_TASK, _OTHERS = 5500, 16 * 1024
_BATCHES = range(8, 17)
"""Points of a task that has more than one: fewer would make many tasks of a long suite, more a long task to repeat."""

Point = TypeVar("Point")


def status_bytes(tasks: int) -> int:
    """What the status of a run with so many tasks in its loop takes."""
    return _OTHERS + tasks * _TASK


def fits(tasks: int) -> bool:
    """Whether Argo holds a run with so many tasks in its loop."""
    return status_bytes(tasks) <= HELD * 4 // 5


def points_per_task(points: int) -> int:
    """How many points of a suite one task works off: one, or, if these were too many tasks, 8 to 16.

    Raises:
        ConfigError: not even so does Argo hold the run.
    """
    for size in (1, *_BATCHES):
        if fits(tasks := -(-points // size)):
            return size
    raise ConfigError(
        f"{points} points are {tasks} tasks of {size}, {status_bytes(tasks) >> 10} KiB of status, and Argo holds "
        f"{HELD >> 10} KiB: submit it in parts, by --only TASK; what is measured is found again"
    )


def share_out(points: Sequence[Point], size: int) -> list[list[Point]]:
    """Batches of at most so many points, as even as can be; neighbours, which take equally long, are not in one."""
    tasks = -(-len(points) // size)
    return [list(points[first::tasks]) for first in range(tasks)]

"""What becomes of a RayJob, as seen through an API server that may be busy, away or silent.

A thread watches and hands over what it sees, so that whoever waits keeps its limits and notices its signals.
"""

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

from components.adapters.kuberay.api import NoAnswer, RayJobs
from infoxlm_core.errors import WorkerLost

logger = logging.getLogger(__name__)

_WATCH = 30  # seconds of one watch; the job is read again after each
_PAUSE = 1.0  # between a watch and the next: never a hot loop
_FAILURES = 20  # of the API in a row, pauses growing to half a minute: about ten minutes


def has_ended(status: dict[str, Any]) -> bool:
    """Whether nothing more will come; the job itself may have ended before the operator has tidied up."""
    return status.get("jobStatus") in ("SUCCEEDED", "FAILED", "STOPPED") or status.get("jobDeploymentStatus") in (
        "Complete",
        "Failed",
        "ValidationFailed",
    )


def describe(status: dict[str, Any]) -> str:
    """A job's state in a few words."""
    words = [status.get("jobDeploymentStatus") or "new", status.get("jobStatus")]
    pods = status.get("rayClusterStatus") or {}
    if wanted := pods.get("desiredWorkerReplicas"):
        words.append(f"{pods.get('readyWorkerReplicas', 0)} of {wanted} worker pods ready")
    return ", ".join(word for word in words if word)


@contextlib.contextmanager
def states(jobs: RayJobs, name: str) -> Iterator[Iterator[dict[str, Any]]]:
    """The job's status, once a second and whenever it changes."""
    news: queue.SimpleQueue[dict[str, Any] | Exception] = queue.SimpleQueue()
    over = threading.Event()

    def latest() -> Iterator[dict[str, Any]]:
        status: dict[str, Any] = {}
        while True:
            with contextlib.suppress(queue.Empty):
                found = news.get(timeout=_PAUSE)
                if isinstance(found, Exception):
                    raise found
                status = found
            yield status

    threading.Thread(target=_watch, args=(jobs, name, news.put, over), name=f"watch of {name}", daemon=True).start()
    try:
        yield latest()
    finally:
        over.set()


def _watch(jobs: RayJobs, name: str, tell: Callable[[dict[str, Any] | Exception], None], over: threading.Event) -> None:
    """Tell the job's status, read anew after each watch: that heals lost events and cut connections."""
    failures = 0
    while not over.is_set():
        try:
            if (job := jobs.get(name)) is None:
                raise WorkerLost(f"rayjob/{name} was deleted by somebody else: run again to go on")
            failures = 0
            tell(job.get("status") or {})
            for job in jobs.watch(name, _WATCH):
                tell(job.get("status") or {})
                if over.is_set():
                    return
        except NoAnswer as error:
            try:
                failures = bear(name, failures, error)
            except WorkerLost as lost:
                tell(lost)
                return
        except Exception as error:  # a refusal, or a mistake of ours: the one who waits must know
            tell(error)
            return
        over.wait(min(_PAUSE * 2**failures, 30))


def bear(name: str, failures: int, error: NoAnswer) -> int:
    """Count one more call in a row that got no answer; raise WorkerLost when it is too many."""
    if failures >= _FAILURES:
        raise WorkerLost(
            f"rayjob/{name}: Kubernetes does not answer ({error}): the job was left alone; run again to find it"
        ) from error
    logger.info("rayjob/%s: Kubernetes does not answer (%s): asking again", name, error)
    return failures + 1

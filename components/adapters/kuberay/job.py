"""Run work as a KubeRay RayJob and wait for it, so that GPUs are requested late and released at once.

The job is named after the artifact that it makes and is owned by the workflow, not by the step's pod. If a step dies,
the next attempt of the step, or the next run of the pipeline, therefore finds its job and follows it. The job is
deleted when it has ended, when its GPUs are not available in time, and when this process is asked to stop and no
running workflow needs the job. It is never deleted because the API server has a failure.
"""

import contextlib
import logging
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from typing import Any

from components.adapters.kuberay import api, manifest
from components.adapters.kuberay.api import AlreadyExists, Job, RayJobs, Unavailable
from components.adapters.kuberay.log import JobLog
from components.adapters.kuberay.obstacles import ObstacleWatch, find_obstacle, find_out_of_memory
from components.settings.cluster import ClusterConfig
from infoxlm_core import errors
from infoxlm_core.errors import (
    InfoXLMError,
    InputError,
    OutOfMemory,
    Preempted,
    ResourcesUnavailable,
    TryAgain,
    WorkerLost,
    shorten,
)

logger = logging.getLogger(__name__)

_POLL = 2.0  # seconds between two requests for the state of the job
_LONGEST_POLL = 30.0
_FAILURES = 20  # consecutive calls without an answer: about ten minutes
_HEARTBEAT = 60.0  # seconds without a log line after which the state of the job is logged
_LAST_LINES = 10.0  # seconds to wait for the last log lines of a job that has ended
_OPERATOR_FIRST = 300.0  # seconds to let the operator enforce its own time limit first
_DELETION = 600.0  # seconds after which a deletion counts as stuck
_DEAD_NODE = 120.0  # seconds beyond the grace period after which a remaining pod must be on a dead node
_BETWEEN_ATTEMPTS = 30.0
_PAUSE_AFTER_RELEASE = (30.0, 120.0)  # random seconds, so that of two jobs that blocked each other one comes first
_STOPPING = 10.0  # seconds to wait for the request to save
_NEEDED_ATTEMPTS = 3  # attempts to find out whether a workflow still needs the job


class _StopRequested(BaseException):
    """Raised in the main thread by a signal; a BaseException, so that handlers of errors do not catch it."""


class _PartlyScheduled(Exception):
    """Only some pods of the job have had a node for too long; they may keep another job from starting."""


def run(
    name: str,
    work: str,
    cluster: ClusterConfig,
    num_workers: int,
    step_environment: Sequence[Mapping[str, Any]],
    ask_to_stop: Callable[[], None],
    read_outcome: Callable[[], dict[str, Any] | None],
) -> None:
    """Run work on the cluster; return when the job has succeeded.

    Args:
        name: name of the job, from `manifest.job_name`.
        work: URL of the work, the only argument of `python -m components.platform.job`.
        cluster: where and how jobs run.
        num_workers: training workers, one per GPU.
        step_environment: environment variables of the step's pod, as Kubernetes describes them.
        ask_to_stop: asks a running training to save and stop.
        read_outcome: returns the job's stored failure, {"code", "class", "message"}, or None.

    Raises:
        ResourcesUnavailable: the GPUs were not available in time, or the job ran too long.
        Preempted: this process was asked to stop.
        WorkerLost: the job ended without an outcome, or Kubernetes stopped answering.
        InputError: Kubernetes refuses.
        and the error in the outcome; a TryAgain only after `cluster.retries` further jobs.
    """
    outcome = read_outcome()
    if outcome and 2 <= int(outcome["code"]) <= 5:  # an earlier attempt failed with an error that would happen again
        raise _error_of(outcome)
    body = manifest.render(name, work, cluster, num_workers, step_environment, version("ray"))
    jobs = api.connect()
    owner = _find_owner(jobs)
    if owner:
        body["metadata"]["ownerReferences"] = [owner]
    with _raising_on_signals():
        try:
            for attempt in range(cluster.retries + 1):
                error = _run_once(jobs, body, cluster, read_outcome)
                if error is None:
                    return
                can_retry = isinstance(error, TryAgain) and not isinstance(error, ResourcesUnavailable)
                if attempt == cluster.retries or not can_retry:
                    raise error
                logger.warning("%s; starting it again (%d of %d)", error, attempt + 1, cluster.retries)
                time.sleep(_BETWEEN_ATTEMPTS)
        except _StopRequested:
            raise _stop(jobs, name, owner, ask_to_stop) from None


def _find_owner(jobs: RayJobs) -> Job | None:
    """Return the workflow of this step, or None; a job without an owner ends by itself when no step follows it."""
    try:
        owner = jobs.workflow()
        if owner:
            return owner
        logger.info("this process does not run in a workflow, so the job has no owner that is deleted with it")
    except (Unavailable, InputError) as error:
        logger.warning("the workflow of this step was not found (%s): the job will not be deleted with it", error)
    return None


def _run_once(
    jobs: RayJobs, body: Job, cluster: ClusterConfig, read_outcome: Callable[[], dict[str, Any] | None]
) -> InfoXLMError | None:
    """Create or adopt the job, follow it to its end, and delete it; return the reason if it has failed.

    A job that holds some of its pods, while the others find no node, is deleted and created again later: its pods may
    be what another such job waits for.
    """
    name = body["metadata"]["name"]
    start_deadline = time.monotonic() + cluster.start_seconds
    while True:
        _create_or_adopt(jobs, body, cluster.grace_seconds)
        log = JobLog(jobs, name)
        try:
            status = _follow(jobs, name, cluster, log, start_deadline)
            log.finish(_LAST_LINES)
            break
        except _PartlyScheduled as obstacle:
            _delete(jobs, name)
            pause = random.uniform(*_PAUSE_AFTER_RELEASE)  # noqa: S311 - not for a secret
            logger.warning("rayjob/%s gave its pods back (%s); creating it again in %.0f s", name, obstacle, pause)
            time.sleep(pause)
        finally:
            log.finish(0)
    error = None if status.get("jobStatus") == "SUCCEEDED" else _failure_of(jobs, name, status, read_outcome())
    _delete(jobs, name)
    return error


def has_ended(status: dict[str, Any]) -> bool:
    """Return whether the job has ended; the operator may still be cleaning up."""
    return status.get("jobStatus") in ("SUCCEEDED", "FAILED", "STOPPED") or status.get("jobDeploymentStatus") in (
        "Complete",
        "Failed",
        "ValidationFailed",
    )


def describe(status: dict[str, Any]) -> str:
    """Return a short description of a job's state."""
    words = [status.get("jobDeploymentStatus") or "new", status.get("jobStatus")]
    pods = status.get("rayClusterStatus") or {}
    if desired := pods.get("desiredWorkerReplicas"):
        words.append(f"{pods.get('readyWorkerReplicas', 0)} of {desired} worker pods ready")
    return ", ".join(word for word in words if word)


# ---------------------------------------------------------------- create or adopt


def _create_or_adopt(jobs: RayJobs, body: Job, grace: float) -> None:
    """Create the job. Adopt an existing job of this name if it runs or has succeeded; delete it if it has failed."""
    name, failures = body["metadata"]["name"], 0
    now = time.monotonic()
    deadline, leave_pods_at = now + grace + _DELETION, now + grace + _DEAD_NODE
    while time.monotonic() < deadline:
        try:
            job = jobs.get(name)
            if job is None:
                jobs.create(body)
                logger.info("created rayjob/%s", name)
                return
            status = job.get("status") or {}
            is_useful = not has_ended(status) or status.get("jobStatus") == "SUCCEEDED"
            if job["metadata"].get("deletionTimestamp"):
                if time.monotonic() > leave_pods_at:
                    logger.warning("pods of rayjob/%s do not end, maybe on a dead node: continuing without them", name)
                    jobs.delete(name, wait_for_pods=False)
                    leave_pods_at = deadline
            elif is_useful:
                _adopt(jobs, job, body)
                logger.info("found rayjob/%s, %s: following it", name, describe(status))
                return
            else:
                logger.info("rayjob/%s of an earlier attempt is %s: deleting it", name, describe(status))
                jobs.delete(name)
            failures = 0
        except AlreadyExists:
            pass  # another process created it, or the answer to an earlier call was lost
        except Unavailable as error:
            failures = _count_failure(name, failures, error)
        time.sleep(_POLL)
    raise WorkerLost(
        f"rayjob/{name} is still being deleted after {grace + _DELETION:.0f} s: look at its finalizers, run again"
    )


def _adopt(jobs: RayJobs, job: Job, body: Job) -> None:
    """Make our workflow the owner of the job, so that the job is not deleted with the run that created it."""
    owners, new_owners = (metadata.get("ownerReferences") or [] for metadata in (job["metadata"], body["metadata"]))
    for owner in new_owners:
        if owner["uid"] not in [existing["uid"] for existing in owners]:
            jobs.set_owner(job, owner)


def _count_failure(name: str, failures: int, error: Unavailable) -> int:
    """Count a call that failed; raise WorkerLost after too many consecutive ones."""
    if failures >= _FAILURES:
        raise WorkerLost(f"rayjob/{name}: {error}: the job was left alone; run again to find it") from error
    logger.info("rayjob/%s: %s: asking again", name, error)
    return failures + 1


# ---------------------------------------------------------------- follow


def _follow(jobs: RayJobs, name: str, cluster: ClusterConfig, log: JobLog, start_deadline: float) -> dict[str, Any]:
    """Wait for the end of the job and return its status; enforce the time limits, and log the state regularly."""
    began = run_began = last_report = time.monotonic()
    was_running, obstacles = False, ObstacleWatch(jobs)
    for job in _poll(jobs, name):
        now, status = time.monotonic(), job.get("status") or {}
        if has_ended(status):
            return status
        # The operator sets its own state to Running when it has created the submitter, which may still find no node.
        is_running = status.get("jobDeploymentStatus") == "Running" and status.get("jobStatus") == "RUNNING"
        is_queued = cluster.queue and status.get("jobDeploymentStatus") == "Suspended"
        if is_running != was_running:
            was_running, run_began = is_running, now
            logger.info("rayjob/%s is %s", name, describe(status))
            start_deadline = now + cluster.start_seconds  # for a job that its queue takes back
        if is_queued:  # time in the queue does not count: Kueue has not admitted the job
            start_deadline = now + cluster.start_seconds
        if not is_running:
            _check_start(jobs, job, cluster, obstacles, start_deadline - now)
        elif now - run_began > cluster.run_seconds + _OPERATOR_FIRST:
            _give_up(jobs, job, f"still not ended after {cluster.run_seconds} s")
        if now - max(log.last_line, last_report) > _HEARTBEAT:
            last_report = now
            logger.info("rayjob/%s is %s, %.0f s after the start", name, describe(status), now - began)
    raise AssertionError("unreachable")


def _check_start(
    jobs: RayJobs, job: Job, cluster: ClusterConfig, obstacles: ObstacleWatch, remaining_seconds: float
) -> None:
    """Raise the reason if a job cannot start, or has waited for too long.

    Raises:
        InputError: waiting does not help; the job was deleted.
        ResourcesUnavailable: there is no time left; the job was deleted.
        _PartlyScheduled: the job should give its pods back. Kueue does not admit a job in part.
    """
    obstacles.update(job)
    permanent, partial = obstacles.permanent(), obstacles.partial(cluster.partial_seconds)
    if permanent:
        name = job["metadata"]["name"]
        _delete(jobs, name)
        raise InputError(f"rayjob/{name} cannot start: {permanent.message}: the job was deleted; fix this, run again")
    if remaining_seconds < 0:
        _give_up(jobs, job, f"no GPUs after {cluster.start_seconds} s ({describe(job.get('status') or {})})")
    if partial and not cluster.queue:
        raise _PartlyScheduled(partial.message)


def _poll(jobs: RayJobs, name: str) -> Iterator[Job]:
    """Yield the job's current state repeatedly; raise WorkerLost if the job is gone or Kubernetes stops answering."""
    failures = 0
    while True:
        try:
            job = jobs.get(name)
        except Unavailable as error:
            failures = _count_failure(name, failures, error)
            time.sleep(min(_POLL * 2**failures, _LONGEST_POLL))
            continue
        if job is None:
            raise WorkerLost(f"rayjob/{name} was deleted by somebody else: run again to continue")
        failures = 0
        yield job
        time.sleep(_POLL)


def _failure_of(jobs: RayJobs, name: str, status: dict[str, Any], outcome: dict[str, Any] | None) -> InfoXLMError:
    """Return the error of a failed job: the operator's if it ended the job, else the job's own outcome.

    The job of a worker or head that was killed for its memory has no outcome that says so; its pods do.
    """
    reason = status.get("reason")
    details = shorten(f"{describe(status)} {reason or ''}: {status.get('message') or ''}")
    if reason == "PreRunningDeadlineExceeded":
        return ResourcesUnavailable(f"rayjob/{name}: no GPUs in time ({details}): free or add GPUs, then run again")
    if reason == "DeadlineExceeded":
        return ResourcesUnavailable(f"rayjob/{name}: it reached its time limit ({details}): run again to continue")
    if "ValidationFailed" in (reason, status.get("jobDeploymentStatus")):
        return InputError(f"rayjob/{name}: refused by KubeRay ({details}): check its version, 1.7 or later")
    error: InfoXLMError = WorkerLost(f"rayjob/{name} ended as {details}: run again to continue")
    if outcome:
        error = _error_of(outcome)
    if isinstance(error, WorkerLost):
        with contextlib.suppress(Unavailable, InputError):
            if out_of_memory := find_out_of_memory(jobs, name):
                return OutOfMemory(f"rayjob/{name}: {out_of_memory}, then run again")
    return error


def _error_of(outcome: dict[str, Any]) -> InfoXLMError:
    """Return the error that a job has stored as its outcome."""
    return errors.from_name(str(outcome.get("class")), " ".join(str(outcome.get("message")).split()))


def _give_up(jobs: RayJobs, job: Job, reason: str) -> None:
    """Delete the job and raise ResourcesUnavailable, with what Kubernetes reports about its pods."""
    name = job["metadata"]["name"]
    with contextlib.suppress(Unavailable, InputError):
        if obstacle := find_obstacle(jobs, job):
            reason += f": {obstacle.message}"
    _delete(jobs, name)
    raise ResourcesUnavailable(f"rayjob/{name}: {reason}: the job was deleted; free or add GPUs, then run again")


# ---------------------------------------------------------------- stop


def _delete(jobs: RayJobs, name: str) -> None:
    """Delete the job to release its GPUs; if that fails, log the command for it."""
    for _ in range(3):
        try:
            jobs.delete(name)
            return
        except Unavailable as error:
            reason: Exception = error
            time.sleep(1)
        except InputError as error:
            reason = error
            break
    logger.error("rayjob/%s could not be deleted (%s): kubectl delete rayjob %s", name, reason, name)


def _stop(jobs: RayJobs, name: str, owner: Job | None, ask_to_stop: Callable[[], None]) -> Preempted:
    """Ask the training to save, and delete the job at the same time, because Kubeflow gives a step about a second.

    This process does not wait for the training; the hooks of the pods do, for `grace_seconds`. The job is left alone if
    a workflow needs it, or if Kubernetes does not answer: it ends by itself if no step follows it.
    """
    is_needed = _is_needed(jobs, name, owner)
    if is_needed:
        return Preempted(f"rayjob/{name} goes on without this step, for a run that needs it: run again to follow it")
    if is_needed is None:
        return Preempted(f"rayjob/{name} was left alone, because Kubernetes does not answer: run again to follow it")

    def ask() -> None:
        try:
            ask_to_stop()
        except Exception as error:  # the hooks of the pods also ask
            logger.warning("rayjob/%s cannot be asked to save: %s", name, error)

    asking = threading.Thread(target=ask, name="ask to save", daemon=True)
    asking.start()
    _delete(jobs, name)
    asking.join(_STOPPING)
    return Preempted(f"rayjob/{name} was stopped and deleted: run again to continue")


def _is_needed(jobs: RayJobs, name: str, owner: Job | None) -> bool | None:
    """Return whether a workflow needs the job: ours, if only this pod is stopped, or another one that has adopted it.

    Returns:
        None if Kubernetes does not answer.
    """
    for _ in range(_NEEDED_ATTEMPTS):
        try:
            owner = owner or jobs.workflow()  # the first call may have had no answer
            if owner is None:
                return False
            if jobs.is_under_way(owner):  # the node is drained: the next attempt of the step will follow the job
                return True
            job = jobs.get(name) or {"metadata": {}}
            uids = [other["uid"] for other in job["metadata"].get("ownerReferences") or []]
            return bool(uids) and owner["uid"] not in uids
        except Unavailable as error:
            reason = error
        except InputError as error:
            logger.warning("rayjob/%s: cannot tell whether a run still needs it: %s", name, error)
            return False
    logger.warning("rayjob/%s: cannot tell whether a run still needs it (%s): it is left alone", name, reason)
    return None


@contextlib.contextmanager
def _raising_on_signals() -> Iterator[None]:
    """Raise _StopRequested in the main thread on SIGTERM or Ctrl-C; ignore further signals.

    Does nothing in another thread, where Python allows no signal handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        for number in previous:  # Kubernetes and Argo may each send one
            signal.signal(number, signal.SIG_IGN)
        raise _StopRequested

    previous = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        for number in previous:
            signal.signal(number, stop)
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)

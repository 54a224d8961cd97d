"""Run work as a KubeRay RayJob and wait for it, so that GPUs are requested late and released at once.

The job is named after the artifact that it makes and is owned by the workflow, not by the step's pod. The next attempt
of a step, or the next run of the pipeline, therefore finds the job that a dead step left behind and continues with it.
The job is deleted when it has ended, when its GPUs do not come, and when this process is told to stop and no running
workflow needs the job. A job is never deleted because the API server is in trouble.
"""

import contextlib
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from typing import Any

from components.adapters.kuberay import api, manifest
from components.adapters.kuberay.api import AlreadyExists, Job, NoAnswer, RayJobs
from components.adapters.kuberay.log import JobLog
from components.adapters.kuberay.obstacles import ObstacleWatch, find_obstacle
from components.settings.cluster import ClusterConfig
from infoxlm_core import errors
from infoxlm_core.errors import InfoXLMError, InputError, Preempted, ResourcesUnavailable, TryAgain, WorkerLost

logger = logging.getLogger(__name__)

_POLL = 2.0  # seconds between two looks at the job
_LONGEST_POLL = 30.0
_FAILURES = 20  # calls without an answer in a row: about ten minutes
_HEARTBEAT = 60.0  # seconds without a line of the log after which the state of the job is logged
_LAST_LINES = 10.0  # seconds for the last log lines of a job that has ended
_OPERATOR_FIRST = 300.0  # seconds by which the operator's own limit precedes the launcher's
_DELETION = 600.0  # seconds after which a deletion counts as stuck
_DEAD_NODE = 120.0  # seconds beyond the grace period after which a pod that stays is on a dead node
_BETWEEN_ATTEMPTS = 30.0
_STOPPING = 10.0  # seconds for the calls that end a job
_WANTED_TRIES = 3  # rounds of calls that ask whether a workflow still needs the job


class _StopRequested(BaseException):
    """Raised in the main thread by a signal; no handler of ordinary errors may swallow it."""


def run(
    name: str,
    work: str,
    cluster: ClusterConfig,
    num_workers: int,
    step_environment: Sequence[Mapping[str, Any]],
    ask_to_stop: Callable[[], None],
    read_outcome: Callable[[], dict[str, Any] | None],
) -> None:
    """Train on the cluster; return when the job has succeeded.

    Args:
        name: name of the job, from `manifest.job_name`.
        work: URL of the work, the only argument of `python -m components.platform.job`.
        cluster: where and how jobs run.
        num_workers: training workers, one per GPU.
        step_environment: environment variables of the step's pod, as Kubernetes describes them.
        ask_to_stop: asks the training to save and stop, if it runs.
        read_outcome: returns why the job failed, {"code", "class", "message"}, if the job has written that.

    Raises:
        ResourcesUnavailable: the GPUs did not come in time, or were held too long.
        Preempted: this process was told to stop.
        WorkerLost: the job ended without an outcome, or Kubernetes does not answer any more.
        InputError: Kubernetes refuses.
        and the error in the outcome; a TryAgain only after `cluster.retries` new jobs.
    """
    outcome = read_outcome()
    if outcome and 2 <= int(outcome["code"]) <= 5:  # of an earlier attempt: the same would happen again
        raise _error_of(outcome)
    body = manifest.render(name, work, cluster, num_workers, step_environment, version("ray"))
    jobs = api.connect()
    owner = _find_owner(jobs)
    if owner:
        body["metadata"]["ownerReferences"] = [owner]
    with _raising_on_signals():
        try:
            for attempt in range(cluster.retries + 1):
                status = _run_once(jobs, body, cluster)
                if status.get("jobStatus") == "SUCCEEDED":
                    return
                error = _why_ended(name, status, read_outcome())
                is_worth_another = isinstance(error, TryAgain) and not isinstance(error, ResourcesUnavailable)
                if attempt == cluster.retries or not is_worth_another:
                    raise error
                logger.warning("%s; starting it again (%d of %d)", error, attempt + 1, cluster.retries)
                time.sleep(_BETWEEN_ATTEMPTS)
        except _StopRequested:
            raise _stop(jobs, name, owner, ask_to_stop) from None


def _find_owner(jobs: RayJobs) -> Job | None:
    """Return the workflow of this step; a job without an owner still ends by itself when nobody follows it."""
    try:
        if owner := jobs.workflow():
            return owner
        logger.info("this process is in no pod of a workflow: the job will not be deleted with one")
    except (NoAnswer, InputError) as error:
        logger.warning("the workflow of this step cannot be found (%s): the job will not be deleted with it", error)
    return None


def _run_once(jobs: RayJobs, body: Job, cluster: ClusterConfig) -> dict[str, Any]:
    """Create or adopt the job, follow it to its end, delete it, and return its last status."""
    name = body["metadata"]["name"]
    _create_or_adopt(jobs, body, cluster.grace_seconds)
    log = JobLog(jobs, name)
    try:
        status = _follow(jobs, name, cluster, log)
        log.finish(_LAST_LINES)
    finally:
        log.finish(0)
    _delete(jobs, name)
    return status


def has_ended(status: dict[str, Any]) -> bool:
    """Whether the job has ended; the operator may still be tidying up."""
    return status.get("jobStatus") in ("SUCCEEDED", "FAILED", "STOPPED") or status.get("jobDeploymentStatus") in (
        "Complete",
        "Failed",
        "ValidationFailed",
    )


def describe(status: dict[str, Any]) -> str:
    """Return a job's state in a few words."""
    words = [status.get("jobDeploymentStatus") or "new", status.get("jobStatus")]
    pods = status.get("rayClusterStatus") or {}
    if desired := pods.get("desiredWorkerReplicas"):
        words.append(f"{pods.get('readyWorkerReplicas', 0)} of {desired} worker pods ready")
    return ", ".join(word for word in words if word)


# ---------------------------------------------------------------- begin


def _create_or_adopt(jobs: RayJobs, body: Job, grace: float) -> None:
    """Create the job; adopt the one of this name if it runs or has succeeded, else delete that first."""
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
                    logger.warning("pods of rayjob/%s do not end, maybe on a dead node: going on without them", name)
                    jobs.delete(name, wait_for_pods=False)
                    leave_pods_at = deadline
            elif is_useful:
                _adopt(jobs, job, body)
                logger.info("found rayjob/%s, %s: going on with it", name, describe(status))
                return
            else:
                logger.info("rayjob/%s of an earlier attempt is %s: deleting it", name, describe(status))
                jobs.delete(name)
            failures = 0
        except AlreadyExists:
            pass  # another process was faster, or the answer to an earlier call was lost
        except NoAnswer as error:
            failures = _count_failure(name, failures, error)
        time.sleep(_POLL)
    raise WorkerLost(
        f"rayjob/{name} is still being deleted after {grace + _DELETION:.0f} s: look at its finalizers, run again"
    )


def _adopt(jobs: RayJobs, job: Job, body: Job) -> None:
    """Make our workflow an owner of the job too, so that the job is not deleted with the run that created it."""
    owners = job["metadata"].get("ownerReferences") or []
    uids = {owner["uid"] for owner in owners}
    new_owners = [owner for owner in body["metadata"].get("ownerReferences", []) if owner["uid"] not in uids]
    if new_owners:
        jobs.set_owners(job, owners + new_owners)


def _count_failure(name: str, failures: int, error: NoAnswer) -> int:
    """Count one more call without an answer; raise WorkerLost when there are too many in a row."""
    if failures >= _FAILURES:
        raise WorkerLost(
            f"rayjob/{name}: Kubernetes does not answer ({error}): the job was left alone; run again to find it"
        ) from error
    logger.info("rayjob/%s: Kubernetes does not answer (%s): asking again", name, error)
    return failures + 1


# ---------------------------------------------------------------- follow


def _follow(jobs: RayJobs, name: str, cluster: ClusterConfig, log: JobLog) -> dict[str, Any]:
    """Wait for the end of the job and return its status; enforce the time limits, and log the state now and then."""
    began = phase_began = last_report = time.monotonic()
    was_running, obstacles = False, ObstacleWatch(jobs)
    for job in _poll(jobs, name):
        now, status = time.monotonic(), job.get("status") or {}
        if has_ended(status):
            return status
        is_running = status.get("jobDeploymentStatus") == "Running"
        if is_running != was_running:
            was_running, phase_began = is_running, now
            logger.info("rayjob/%s is %s", name, describe(status))
        if cluster.queue and status.get("jobDeploymentStatus") == "Suspended":
            phase_began = now  # Kueue has not admitted the job: a queue may be long
        _enforce_limits(jobs, job, cluster, obstacles, is_running, now - phase_began)
        if now - max(log.last_line, last_report) > _HEARTBEAT:
            last_report = now
            logger.info("rayjob/%s is %s, %.0f s after the start", name, describe(status), now - began)
    raise AssertionError("unreachable")


def _enforce_limits(
    jobs: RayJobs, job: Job, cluster: ClusterConfig, obstacles: ObstacleWatch, is_running: bool, seconds: float
) -> None:
    """Delete a job that has run, or waited, for too long, or that cannot start, and raise the reason."""
    if is_running:
        if seconds > cluster.run_seconds + _OPERATOR_FIRST:
            _give_up(jobs, job, f"still not ended after {cluster.run_seconds} s")
        return
    if obstacle := obstacles.permanent(job):
        name = job["metadata"]["name"]
        _delete(jobs, name)
        raise InputError(f"rayjob/{name} cannot start: {obstacle.message}: the job was deleted; fix this, run again")
    if seconds > cluster.start_seconds:
        _give_up(jobs, job, f"no GPUs after {cluster.start_seconds} s ({describe(job.get('status') or {})})")


def _poll(jobs: RayJobs, name: str) -> Iterator[Job]:
    """Yield the job again and again; raise WorkerLost if it is gone, or if Kubernetes does not answer any more."""
    failures = 0
    while True:
        try:
            job = jobs.get(name)
        except NoAnswer as error:
            failures = _count_failure(name, failures, error)
            time.sleep(min(_POLL * 2**failures, _LONGEST_POLL))
            continue
        if job is None:
            raise WorkerLost(f"rayjob/{name} was deleted by somebody else: run again to go on")
        failures = 0
        yield job
        time.sleep(_POLL)


def _why_ended(name: str, status: dict[str, Any], outcome: dict[str, Any] | None) -> InfoXLMError:
    """Return the error of a job that failed: its own outcome if it has written one, else the operator's reason."""
    reason = status.get("reason")
    details = " ".join(f"{describe(status)} {reason or ''}: {status.get('message') or ''}".split())[:300]
    if reason == "PreRunningDeadlineExceeded":
        return ResourcesUnavailable(f"rayjob/{name}: no GPUs in time ({details}): free or add GPUs, then run again")
    if reason == "DeadlineExceeded":
        return ResourcesUnavailable(f"rayjob/{name}: its time is over ({details}): run again to go on")
    if "ValidationFailed" in (reason, status.get("jobDeploymentStatus")):
        return InputError(f"rayjob/{name}: refused by KubeRay ({details}): check its version, 1.7 or later")
    return _error_of(outcome) if outcome else WorkerLost(f"rayjob/{name} ended as {details}: run again to go on")


def _error_of(outcome: dict[str, Any]) -> InfoXLMError:
    """Return the error that a job has written down."""
    return errors.from_name(str(outcome.get("class")), " ".join(str(outcome.get("message")).split())[:1000])


def _give_up(jobs: RayJobs, job: Job, reason: str) -> None:
    """Delete the job and raise ResourcesUnavailable, with what Kubernetes reports about its pods."""
    name = job["metadata"]["name"]
    with contextlib.suppress(NoAnswer, InputError):
        if obstacle := find_obstacle(jobs, job):
            reason += f": {obstacle.message}"
    _delete(jobs, name)
    raise ResourcesUnavailable(f"rayjob/{name}: {reason}: the job was deleted; free or add GPUs, then run again")


# ---------------------------------------------------------------- end


def _delete(jobs: RayJobs, name: str) -> None:
    """Delete the job to release its GPUs; if that fails, log the command that does it."""
    for _ in range(3):
        try:
            jobs.delete(name)
            return
        except NoAnswer as error:
            reason: Exception = error
            time.sleep(1)
        except InputError as error:
            reason = error
            break
    logger.error("rayjob/%s could not be deleted (%s): kubectl delete rayjob %s", name, reason, name)


def _stop(jobs: RayJobs, name: str, owner: Job | None, ask_to_stop: Callable[[], None]) -> Preempted:
    """Ask the training to save and delete the job, both at once: Kubeflow leaves a step about a second.

    This process does not wait for the training; the hooks of the pods do, for `grace_seconds`. The job is left alone if
    a workflow needs it, and if Kubernetes does not say: if nobody follows it then, the job ends by itself.
    """
    is_wanted = _is_wanted(jobs, name, owner)
    if is_wanted:
        return Preempted(f"rayjob/{name} goes on without this step, for a run that needs it: run again to follow it")
    if is_wanted is None:
        return Preempted(f"rayjob/{name} was left alone, because Kubernetes does not answer: run again to follow it")

    def ask() -> None:
        try:
            ask_to_stop()
        except Exception as error:  # the hooks of the pods ask, too
            logger.warning("rayjob/%s cannot be asked to save: %s", name, error)

    asking = threading.Thread(target=ask, name="ask to save", daemon=True)
    asking.start()
    _delete(jobs, name)
    asking.join(_STOPPING)
    return Preempted(f"rayjob/{name} was stopped and deleted: run again to go on")


def _is_wanted(jobs: RayJobs, name: str, owner: Job | None) -> bool | None:
    """Whether a running workflow needs the job: ours, if only this pod must go, or another one that has adopted it.

    Returns:
        None if Kubernetes does not say.
    """
    for _ in range(_WANTED_TRIES):
        try:
            owner = owner or jobs.workflow()  # it may not have been found at the start
            if owner is None:
                return False
            if jobs.is_under_way(owner):  # a node is drained: the next attempt of the step finds the job
                return True
            job = jobs.get(name) or {"metadata": {}}
            others = [other for other in job["metadata"].get("ownerReferences") or [] if other["uid"] != owner["uid"]]
            if not any(jobs.is_under_way(other) for other in others):
                return False
            jobs.set_owners(job, others)
            return True
        except NoAnswer as error:
            reason = error
        except InputError as error:
            logger.warning("rayjob/%s: whether a run still needs it is not known: %s", name, error)
            return False
    logger.warning("rayjob/%s: whether a run still needs it is not known (%s): it is left alone", name, reason)
    return None


@contextlib.contextmanager
def _raising_on_signals() -> Iterator[None]:
    """Raise _StopRequested on SIGTERM or Ctrl-C, whatever the main thread waits for; ignore further signals.

    Outside of the main thread the caller handles signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        for number in previous:  # Kubernetes and Argo may both send one
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

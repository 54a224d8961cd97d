"""Run a training as a KubeRay RayJob and wait for it, so that GPUs are asked for late and given back at once.

The job is named by what it makes, and belongs to the workflow, not to the step's pod: a step that is tried again, or a
run that is submitted again, finds the job that its dead predecessor left, running or ended, and goes on with it. It is
deleted as soon as it has ended, when GPUs do not come, and when this process is told to stop and no run is under way
that wants it, but never because the API server is in trouble.
"""

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from typing import Any

from components.adapters.kuberay import api as kubernetes_api
from components.adapters.kuberay import manifest as ray_job_manifest
from components.adapters.kuberay.api import AlreadyExists, Job, NoAnswer, RayJobs
from components.adapters.kuberay.log import JobLog
from components.adapters.kuberay.manifest import job_name
from components.adapters.kuberay.states import bear, describe, has_ended, states
from components.settings.cluster import ClusterConfig
from infoxlm_core import errors
from infoxlm_core.errors import InfoXLMError, InputError, Preempted, ResourcesUnavailable, TryAgain, WorkerLost

__all__ = ["job_name", "run"]

logger = logging.getLogger(__name__)

_HEARTBEAT = 60.0
_POLL = 30.0  # seconds between two questions what keeps a job from running
_LOG_REST = 10.0  # seconds for the last lines of a job that has ended
_SLACK = 300.0  # by which the operator's own limit comes first
_REMOVAL = 600.0  # seconds after which a job that is being deleted is stuck
_PODS_GO = 120.0  # seconds beyond the grace after which its pods are on a node that is dead
_PAUSE = 2.0
_BETWEEN_TRIES = 30.0


class Stop:
    """Whether this process was told to stop, and whether its job is kept for a run that wants it; None: not known.

    A signal's handler may set no `Event`, since who waits for it holds its lock: `over` is set by a thread.
    """

    def __init__(self) -> None:
        self.asked, self.over = False, threading.Event()
        self.kept: bool | None = None


_STOPPED = 10.0  # seconds for the calls that end a job
_QUESTIONS = 3  # whether a job is wanted, before it is left alone


def run(
    name: str,
    work: str,
    cluster: ClusterConfig,
    num_workers: int,
    step_environment: Sequence[Mapping[str, Any]],
    ask_to_stop: Callable[[], None],
    ended: Callable[[], dict[str, Any] | None],
) -> None:
    """Train on the cluster: return when the job has succeeded.

    Args:
        name: of the job, by `job_name`.
        work: URL of the work, the only argument of `python -m components.platform.job`.
        cluster: where and how jobs run.
        num_workers: training workers, one a GPU.
        step_environment: environment variables of the step's pod, as Kubernetes describes them.
        ask_to_stop: makes the training save and stop, if it runs.
        ended: how the job said that it failed, {"code", "class", "message"}, if it did.

    Raises:
        ResourcesUnavailable: the GPUs did not come in time, or were held too long.
        Preempted: this process was told to stop.
        WorkerLost: the job ended without a word, or Kubernetes does not answer any more.
        InputError: Kubernetes refuses.
        and what the job said; "try again" only after it has been started anew `cluster.retries` times.
    """
    said = ended()
    if said and 2 <= int(said["code"]) <= 5:  # of an earlier attempt: the same would happen again
        raise _as_error(said)
    body = ray_job_manifest.render(name, work, cluster, num_workers, step_environment, version("ray"))
    jobs = kubernetes_api.connect()
    if owner := _owner(jobs):
        body["metadata"]["ownerReferences"] = [owner]
    with _ending_on_signals(lambda stop: _end(jobs, name, owner, ask_to_stop, stop)) as stop:
        for attempt in range(cluster.retries + 1):
            status = _once(jobs, body, cluster, stop)
            if status.get("jobStatus") == "SUCCEEDED":
                return
            error = _why(name, status, ended())
            again = isinstance(error, TryAgain) and not isinstance(error, ResourcesUnavailable)
            if attempt == cluster.retries or not again:
                raise error
            logger.warning("%s; starting it again (%d of %d)", error, attempt + 1, cluster.retries)
            _pause(jobs, name, stop, _BETWEEN_TRIES)


def _owner(jobs: RayJobs) -> Job | None:
    """The workflow of this step; a job without an owner still ends by itself when nobody follows it."""
    try:
        if owner := jobs.workflow():
            return owner
        logger.info("this process is in no pod of a workflow: the job will not go with one")
    except (NoAnswer, InputError) as error:
        logger.warning("the workflow of this step cannot be found (%s): the job will not go with it", error)
    return None


def _uids(owners: list[Job]) -> set[str]:
    return {owner["uid"] for owner in owners}


def _once(jobs: RayJobs, body: Job, cluster: ClusterConfig, stop: Stop) -> dict[str, Any]:
    """Create or find the job, follow it to its end, delete it; return its last status."""
    name = body["metadata"]["name"]
    _begin(jobs, body, stop, cluster.grace_seconds)
    log = JobLog(jobs, name)
    try:
        status = _follow(jobs, name, cluster, stop, log)
    finally:
        log.finish(0 if stop.asked else _LOG_REST)
    _delete(jobs, name)
    return status


def _begin(jobs: RayJobs, body: Job, stop: Stop, grace: float) -> None:
    """Create the job; if there is one of this name, adopt it, unless it is of no more use."""
    name, seconds, failures = body["metadata"]["name"], _REMOVAL + grace, 0
    leave_pods, deadline = time.monotonic() + grace + _PODS_GO, time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if (job := jobs.get(name)) is None:
                jobs.create(body)
                logger.info("created rayjob/%s", name)
                return
            leaving = bool(job["metadata"].get("deletionTimestamp"))
            status = job.get("status") or {}
            if not leaving and (not has_ended(status) or status.get("jobStatus") == "SUCCEEDED"):
                known = job["metadata"].get("ownerReferences") or []
                ours = [one for one in body["metadata"].get("ownerReferences", []) if one["uid"] not in _uids(known)]
                if ours:  # else it would go with the run that made it
                    jobs.adopt(job, known + ours)
                logger.info("found rayjob/%s, %s: going on with it", name, describe(status))
                return
            if not leaving:
                logger.info("rayjob/%s of an earlier attempt is %s: deleting it", name, describe(status))
                jobs.delete(name)
            elif time.monotonic() > leave_pods:
                logger.warning("rayjob/%s waits for pods that do not go, on a dead node?: going on without them", name)
                jobs.delete(name, wait_for_pods=False)
                leave_pods = deadline
            failures = 0
        except AlreadyExists:
            pass  # somebody was faster, or the answer to an earlier try was lost: look again
        except NoAnswer as error:
            failures = bear(name, failures, error)
        _pause(jobs, name, stop, _PAUSE)
    raise WorkerLost(f"rayjob/{name} is still being deleted after {seconds:.0f} s: look at its finalizers, run again")


def _follow(jobs: RayJobs, name: str, cluster: ClusterConfig, stop: Stop, log: JobLog) -> dict[str, Any]:
    """Wait for the end of the job; keep the limits; speak up when it is quiet."""
    began = since = beat = time.monotonic()  # `since`: how long it has been waiting, or running
    was_running, status = False, {}
    hindrance = Hindrance(jobs, name)
    with states(jobs, name) as seen:
        for status in seen:
            now = time.monotonic()
            if has_ended(status):
                return status
            if stop.asked:
                raise _stopped(jobs, name, stop)
            running = status.get("jobDeploymentStatus") == "Running"
            if running != was_running:
                was_running, since = running, now
                logger.info("rayjob/%s is %s", name, describe(status))
            if cluster.queue and status.get("jobDeploymentStatus") == "Suspended":
                since = now  # Kueue has not admitted it: a queue may be long
            if not running and hindrance.is_for_good(now):
                _delete(jobs, name)
                raise InputError(f"rayjob/{name} cannot start: {hindrance.text}: it was deleted; mend that, run again")
            if not running and now - since > cluster.start_seconds:
                _give_up(jobs, name, f"no GPUs after {cluster.start_seconds} s ({describe(status)})")
            if running and now - since > cluster.run_seconds + _SLACK:
                _give_up(jobs, name, f"still not ended after {cluster.run_seconds} s")
            if now - max(log.last_line, beat) > _HEARTBEAT:
                beat = now
                logger.info("rayjob/%s is %s, %.0f s after the start", name, describe(status), now - began)
    return status


class Hindrance:
    """What keeps a job from running, said in the log when it changes."""

    def __init__(self, jobs: RayJobs, name: str) -> None:
        self.text, self._jobs, self._name = "", jobs, name
        self._polled, self._created, self._in_vain = time.monotonic(), "", 0

    def is_for_good(self, now: float) -> bool:
        """Whether two answers in a row say that nothing but a change by somebody helps."""
        if now - self._polled > _POLL:
            self._polled = now
            try:
                if not self._created and (job := self._jobs.get(self._name)):
                    self._created = job["metadata"].get("creationTimestamp") or ""
                text, in_vain = self._jobs.why_waiting(self._name, self._created)
            except (NoAnswer, InputError) as error:  # it may still start
                logger.debug("what keeps rayjob/%s waiting is not known: %s", self._name, error)
                return False
            if text and text != self.text:
                logger.info("rayjob/%s waits: %s", self._name, text)
            self.text, self._in_vain = text, self._in_vain + 1 if in_vain else 0
        return self._in_vain > 1


def _end(jobs: RayJobs, name: str, owner: Job | None, ask_to_stop: Callable[[], None], stop: Stop) -> None:
    """Ask the training to save, and delete the job, both at once: Kubeflow leaves a step about a second.

    Nobody waits here for the training: the pods' hooks do, for as long as `grace_seconds` says. A job that is wanted is
    left alone, and so is one of which that is not known: nobody follows it then, and it ends by itself.
    """
    stop.kept = _is_wanted(jobs, name, owner)
    if stop.kept is not False:
        return

    def ask() -> None:
        try:
            ask_to_stop()
        except Exception as error:  # the hooks ask it, too
            logger.warning("rayjob/%s cannot be asked to save: %s", name, error)

    asking = threading.Thread(target=ask, name="ask to save", daemon=True)
    asking.start()
    _delete(jobs, name)
    asking.join(_STOPPED)


def _is_wanted(jobs: RayJobs, name: str, owner: Job | None) -> bool | None:
    """Whether a run is under way that wants the job: ours, of which only this step's pod must go, or another one.

    None if Kubernetes does not say. A run that was not found at the start is looked for again.
    """
    for _ in range(_QUESTIONS):
        try:
            if (owner := owner or jobs.workflow()) is None:
                return False
            if jobs.is_under_way(owner):  # a node is drained: the step's next attempt finds the job
                return True
            job = jobs.get(name) or {"metadata": {}}
            others = [one for one in job["metadata"].get("ownerReferences") or [] if one["uid"] != owner["uid"]]
            if not any(jobs.is_under_way(one) for one in others):
                return False
            jobs.adopt(job, others)  # it goes no longer with our run
            return True
        except NoAnswer as error:  # or the job was changed meanwhile
            unknown = error
        except InputError as error:
            logger.warning("rayjob/%s: whether a run still wants it is not known: %s", name, error)
            return False
    logger.warning("rayjob/%s: whether a run still wants it is not known (%s): it is left alone", name, unknown)
    return None


def _stopped(jobs: RayJobs, name: str, stop: Stop) -> Preempted:
    """The error of a process that was told to stop."""
    stop.over.wait(_STOPPED)
    if stop.kept:
        return Preempted(f"rayjob/{name} goes on without this step, for a run that wants it: run again to follow it")
    if stop.kept is None:
        return Preempted(f"rayjob/{name} was left alone, since Kubernetes does not answer: run again to follow it")
    _delete(jobs, name)  # it may have been created by a call whose answer was lost
    return Preempted(f"rayjob/{name} was stopped and deleted: run again to go on")


def _give_up(jobs: RayJobs, name: str, why: str) -> None:
    """Delete the job, with what the cluster says about its pods as the reason."""
    with contextlib.suppress(NoAnswer, InputError):
        why += f": {hindrance}" if (hindrance := jobs.why_waiting(name)[0]) else ""
    _delete(jobs, name)
    raise ResourcesUnavailable(f"rayjob/{name}: {why}: it was deleted; free or add GPUs, then run again")


def _delete(jobs: RayJobs, name: str) -> None:
    """Give the GPUs back; if Kubernetes does not let us, say how, as what happened before matters more."""
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


def _why(name: str, status: dict[str, Any], said: dict[str, Any] | None) -> InfoXLMError:
    """The error that a job's end stands for: what the job said itself, else what the operator knows."""
    known = " ".join(f"{describe(status)} {status.get('reason') or ''}: {status.get('message') or ''}".split())[:300]
    if status.get("reason") == "PreRunningDeadlineExceeded":
        return ResourcesUnavailable(f"rayjob/{name}: no GPUs in time ({known}): free or add GPUs, then run again")
    if status.get("reason") == "DeadlineExceeded":
        return ResourcesUnavailable(f"rayjob/{name}: its time is over ({known}): run again to go on")
    if status.get("reason") == "ValidationFailed" or status.get("jobDeploymentStatus") == "ValidationFailed":
        return InputError(f"rayjob/{name}: refused by KubeRay ({known}): check its version, 1.7 or later")
    return _as_error(said) if said else WorkerLost(f"rayjob/{name} ended as {known}: run again to go on")


def _as_error(said: dict[str, Any]) -> InfoXLMError:
    """What a job wrote about its end, as the error that it was."""
    return errors.named(str(said.get("class")), " ".join(str(said.get("message")).split())[:1000])


def _pause(jobs: RayJobs, name: str, stop: Stop, seconds: float) -> None:
    """Wait, unless this process is told to stop."""
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0 and not stop.asked:
        time.sleep(min(left, 0.5))  # a signal does not end a sleep
    if stop.asked:
        raise _stopped(jobs, name, stop)


@contextlib.contextmanager
def _ending_on_signals(end: Callable[[Stop], None]) -> Iterator[Stop]:
    """Let a thread call `end` as soon as SIGTERM or Ctrl-C arrives, whatever the loops here wait for, and tell them.

    In a thread, whoever runs us handles signals.
    """
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    told, tell = os.pipe()  # a handler may write to it

    def wait() -> None:
        if os.read(told, 1):
            end(stop)
            stop.over.set()

    def notice(*_: object) -> None:
        if not stop.asked:
            stop.asked = True
            os.write(tell, b"!")

    waiting = threading.Thread(target=wait, name="waits for signals", daemon=True)
    waiting.start()
    before = {number: signal.signal(number, notice) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(tell)
        waiting.join(2 * _STOPPED)
        if not waiting.is_alive():
            os.close(told)

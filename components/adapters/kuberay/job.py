"""Run work as a KubeRay RayJob and wait for it, so that GPUs are requested late and released at once.

The job is named after the artifact that it builds and is owned by the workflow, not by the step's pod. If a step dies,
the next attempt of the step, or the next run of the pipeline, therefore finds its job and follows it. The job is
deleted when it has ended, when its GPUs are not available in time, and when this process is asked to stop and no
running workflow needs the job. An error of the API server is never a reason to delete it.
"""

import contextlib
import logging
import random
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, NoReturn, TypeVar

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
from infoxlm_core.training import workers

logger = logging.getLogger(__name__)
T = TypeVar("T")

_POLL_SECONDS = 2.0  # between two requests for the state of the job
_MAX_RETRY_SECONDS = 30.0  # between two attempts of a call
_MAX_ATTEMPTS = 20  # of a call that Kubernetes does not answer: about ten minutes
_REPORT_SECONDS = 60.0  # the state of the job is logged after this time without a log line
_LAST_LINES_SECONDS = 10.0  # to wait for the last log lines of a job that has ended
_OPERATOR_SECONDS = 300.0  # to let the operator enforce its own time limit first
_DELETION_SECONDS = 600.0  # after this time a deletion counts as stuck
_DEAD_NODE_SECONDS = 120.0  # a pod that remains for this time after the grace period must be on a dead node
_RETRY_SECONDS = 30.0  # between two attempts
_PAUSE_AFTER_RELEASE = (30.0, 120.0)  # seconds; the pause is random, so that two jobs do not block each other again
_REQUEST_SECONDS = 10.0  # to wait until the request to save is sent
_LAST_ATTEMPTS = 3  # of the calls of a process that is being stopped, because it has only about a second
_DELETION_PAUSE = 1.0  # seconds between two attempts to delete a job


class _StopRequested(BaseException):
    """Raised in the main thread by a signal. It is a BaseException, so that handlers of errors do not catch it."""


class _PartlyScheduled(Exception):
    """Only some pods of the job have had a node for too long, so two jobs may block each other."""


def run(
    name: str,
    work: str,
    cluster: ClusterConfig,
    num_workers: int,
    step_environment: Sequence[Mapping[str, Any]],
    ask_to_stop: Callable[[], None],
    read_outcome: Callable[[], dict[str, Any] | None],
) -> None:
    """Run work on the cluster. Return when the job has succeeded.

    Args:
        name: name of the job, from `manifest.job_name`.
        work: URL of the work, the only argument of `python -m components.platform.job`.
        cluster: where and how jobs run.
        num_workers: training workers, one per GPU.
        step_environment: environment variables of the step's pod, as Kubernetes describes them.
        ask_to_stop: asks a training run to save and stop.
        read_outcome: returns the job's stored failure, {"code", "class", "message"}, or None.

    Raises:
        ResourcesUnavailable: the GPUs were not available in time, or the job ran too long.
        Preempted: this process was asked to stop.
        WorkerLost: the job ended without an outcome, or Kubernetes stopped answering.
        InputError: Kubernetes refuses.
        and the error that the job stored; a TryAgain only after `cluster.retries` more jobs have failed.
    """
    outcome = read_outcome()
    if outcome and 2 <= int(outcome["code"]) <= 5:  # an earlier attempt failed with an error that would happen again
        raise _read_error(outcome)
    body = manifest.render(name, work, cluster, num_workers, step_environment, version("ray"))
    jobs = api.connect()
    owner = _find_owner(jobs)
    if owner:
        body["metadata"]["ownerReferences"] = [owner]
    launched_job = _LaunchedJob(jobs, body, owner, cluster, ask_to_stop, read_outcome)
    with _raising_on_signals():
        try:
            for attempt in range(cluster.retries + 1):
                error = launched_job.run_once()
                if error is None:
                    return
                can_retry = isinstance(error, TryAgain) and not isinstance(error, ResourcesUnavailable)
                if attempt == cluster.retries or not can_retry:
                    raise error
                logger.warning("%s; starting it again (%d of %d)", error, attempt + 1, cluster.retries)
                time.sleep(_RETRY_SECONDS)
        except _StopRequested:
            raise Preempted(launched_job.stop()) from None


def _find_owner(jobs: RayJobs) -> Job | None:
    """Return the workflow of this step, or None. A job without an owner ends by itself when no step follows it."""
    try:
        owner = jobs.find_workflow()
        if owner:
            return owner
        logger.info("this process does not run in a workflow, so the job has no owner that is deleted with it")
    except (Unavailable, InputError) as error:
        logger.warning("the workflow of this step was not found (%s): the job will not be deleted with it", error)
    return None


@dataclass(frozen=True)
class _LaunchedJob:
    """A RayJob that this process creates or finds, follows to its end, and deletes."""

    jobs: RayJobs
    body: Job
    """The manifest of the job."""
    owner: Job | None
    """Owner reference to the workflow of this step."""
    cluster: ClusterConfig
    ask_to_stop: Callable[[], None]
    read_outcome: Callable[[], dict[str, Any] | None]

    @property
    def name(self) -> str:
        return str(self.body["metadata"]["name"])

    def run_once(self) -> InfoXLMError | None:
        """Create or find the job, follow it to its end, and delete it. Return the reason if it has failed.

        If only some pods of the job have a node for too long, the job is deleted and created again later, because two
        such jobs could block each other.
        """
        start_deadline = time.monotonic() + self.cluster.start_seconds
        while True:
            self._create_or_find()
            log = JobLog(self.jobs, self.name)
            try:
                status = self._follow(log, start_deadline)
                log.finish(_LAST_LINES_SECONDS)
                break
            except _PartlyScheduled as obstacle:
                self._delete()
                pause = random.uniform(*_PAUSE_AFTER_RELEASE)  # noqa: S311 - not for a secret
                reason = f"was deleted to free its nodes ({obstacle})"
                logger.warning("rayjob/%s %s; creating it again in %.0f s", self.name, reason, pause)
                time.sleep(pause)
            finally:
                log.finish(0)  # ends the thread, also after an error
        error = None
        if status.get("jobStatus") != "SUCCEEDED":
            # Before the deletion, because the state of the pods may be the cause.
            error = self._find_error(status)
        self._delete()
        return error

    def _create_or_find(self) -> None:
        """Create the job, or find the one of an earlier attempt if it runs or has succeeded. Replace a failed one."""
        grace_end = time.monotonic() + self.cluster.grace_seconds
        waits_for_pods = True
        while time.monotonic() < grace_end + _DELETION_SECONDS:
            job = self._retry(self.jobs.get, self.name)
            if job is None:
                with contextlib.suppress(AlreadyExists):  # the response to an earlier call may have been lost
                    self._retry(self.jobs.create, self.body)
                    logger.info("created rayjob/%s", self.name)
                    return
            elif job["metadata"].get("deletionTimestamp"):
                if waits_for_pods and time.monotonic() > grace_end + _DEAD_NODE_SECONDS:
                    logger.warning("Pods of rayjob/%s do not end, perhaps on a lost node: not waiting.", self.name)
                    self._retry(self.jobs.delete, self.name, False)
                    waits_for_pods = False
            else:
                status = job.get("status") or {}
                if not has_ended(status) or status.get("jobStatus") == "SUCCEEDED":
                    logger.info("following the existing rayjob/%s (%s)", self.name, describe(status))
                    return
                logger.info("rayjob/%s of an earlier attempt is %s: deleting it", self.name, describe(status))
                self._retry(self.jobs.delete, self.name)
            time.sleep(_POLL_SECONDS)
        longest_wait = self.cluster.grace_seconds + _DELETION_SECONDS
        raise WorkerLost(
            f"rayjob/{self.name} is still being deleted after {longest_wait:.0f} s: check its finalizers, "
            "then run again"
        )

    def _retry(self, call: Callable[..., T], *arguments: Any) -> T:
        """Return the result of a call. Repeat it while Kubernetes does not answer, up to `_MAX_ATTEMPTS` times.

        Raises:
            WorkerLost: Kubernetes has stopped answering.
        """
        attempt = 1
        while True:
            try:
                return call(*arguments)
            except Unavailable as error:
                if attempt == _MAX_ATTEMPTS:
                    message = f"rayjob/{self.name}: {error}: the job was not deleted; run again to follow it"
                    raise WorkerLost(message) from error
                logger.info("rayjob/%s: %s; retrying", self.name, error)
            # Wait longer after each failure, so that many steps do not overload an API server that is recovering.
            time.sleep(min(_POLL_SECONDS * 2**attempt, _MAX_RETRY_SECONDS))
            attempt += 1

    def _follow(self, log: JobLog, start_deadline: float) -> dict[str, Any]:
        """Wait for the end of the job and return its status. Enforce the time limits, and log the state regularly.

        Raises:
            WorkerLost: the job was deleted, or Kubernetes has stopped answering.
            and the errors of `_check_start`.
        """
        follow_start = time.monotonic()
        state_start = follow_start  # when the job began to run, or lost its pods
        last_report = follow_start
        was_running = False
        obstacles = ObstacleWatch(self.jobs)
        while True:
            job = self._retry(self.jobs.get, self.name)
            if job is None:
                raise WorkerLost(f"rayjob/{self.name} was deleted by another process: run again to continue")
            current_time = time.monotonic()
            status = job.get("status") or {}
            if has_ended(status):
                return status
            # The operator's own state is Running once it has created the submitter, which may still find no node.
            is_running = status.get("jobDeploymentStatus") == "Running" and status.get("jobStatus") == "RUNNING"
            is_queued = self.cluster.queue and status.get("jobDeploymentStatus") == "Suspended"
            has_changed = is_running != was_running
            if has_changed:
                was_running = is_running
                state_start = current_time
                logger.info("rayjob/%s is %s", self.name, describe(status))
            # A job that loses its pods gets the full time again, and time in Kueue's queue does not count.
            if has_changed or is_queued:
                start_deadline = current_time + self.cluster.start_seconds
            if not is_running:
                self._check_start(job, obstacles, start_deadline - current_time)
            elif current_time - state_start > self.cluster.run_seconds + _OPERATOR_SECONDS:
                self._delete_and_raise_unavailable(
                    job, f"not finished after ray.run_seconds ({self.cluster.run_seconds} s)"
                )
            if current_time - max(log.last_line, last_report) > _REPORT_SECONDS:
                last_report = current_time
                elapsed = current_time - follow_start
                logger.info("rayjob/%s is %s, %.0f s after the start", self.name, describe(status), elapsed)
            time.sleep(_POLL_SECONDS)

    def _check_start(self, job: Job, obstacles: ObstacleWatch, remaining_seconds: float) -> None:
        """Raise the reason if a job cannot start, or has waited for too long.

        Raises:
            InputError: waiting does not help; the job was deleted.
            ResourcesUnavailable: the time to start is over; the job was deleted.
            _PartlyScheduled: only some pods have a node. Jobs of Kueue are exempt, because it admits all pods or none.
        """
        obstacles.update(job)
        permanent = obstacles.get_permanent()
        if permanent:
            self._delete()
            raise InputError(
                f"rayjob/{self.name} cannot start: {permanent.message}: the job was deleted; fix this, then run again"
            )
        if remaining_seconds < 0:
            state = describe(job.get("status") or {})
            self._delete_and_raise_unavailable(job, f"no GPUs after {self.cluster.start_seconds} s ({state})")
        partly_scheduled = obstacles.get_partly_scheduled(self.cluster.partial_seconds)
        if partly_scheduled and not self.cluster.queue:
            raise _PartlyScheduled(partly_scheduled.message)

    def _find_error(self, status: dict[str, Any]) -> InfoXLMError:
        """Return the error of a failed job: the operator's if it ended the job, else the error that the job stored.

        A job whose worker or head exceeded its memory limit stores no such error, so the state of its pods is checked.
        """
        reason = status.get("reason") or ""
        message = status.get("message") or ""
        details = shorten(f"{describe(status)} {reason}: {message}")
        if reason == "PreRunningDeadlineExceeded":
            return ResourcesUnavailable(
                f"rayjob/{self.name}: GPUs were not available in time ({details}): free or add GPUs, then run again"
            )
        if reason == "DeadlineExceeded":
            return ResourcesUnavailable(f"rayjob/{self.name} reached its time limit ({details}): run again to continue")
        if "ValidationFailed" in (reason, status.get("jobDeploymentStatus")):
            return InputError(
                f"rayjob/{self.name} was refused by KubeRay ({details}): check that KubeRay is 1.7 or later"
            )
        error: InfoXLMError = WorkerLost(f"rayjob/{self.name} ended as {details}: run again to continue")
        outcome = self.read_outcome()
        if outcome:
            error = _read_error(outcome)
        if isinstance(error, WorkerLost):
            with contextlib.suppress(Unavailable, InputError):
                description = find_out_of_memory(self.jobs, self.name)
                if description:
                    return OutOfMemory(f"rayjob/{self.name}: {description}, then run again")
        return error

    def _delete_and_raise_unavailable(self, job: Job, reason: str) -> NoReturn:
        """Delete the job and raise ResourcesUnavailable, with what Kubernetes reports about its pods."""
        with contextlib.suppress(Unavailable, InputError):
            obstacle = find_obstacle(self.jobs, job)
            if obstacle:
                reason += f": {obstacle.message}"
        self._delete()
        raise ResourcesUnavailable(
            f"rayjob/{self.name}: {reason}: the job was deleted; free or add GPUs, then run again"
        )

    def _delete(self) -> None:
        """Delete the job to release its GPUs. If that fails, log the command that deletes it."""
        try:
            _retry_briefly(lambda: self.jobs.delete(self.name), _DELETION_PAUSE)
        except (Unavailable, InputError) as error:
            logger.error("rayjob/%s could not be deleted (%s): kubectl delete rayjob %s", self.name, error, self.name)

    def stop(self) -> str:
        """Ask the training to save, and delete the job, unless a workflow needs it. Return what was done, as a message.

        Both requests are sent at the same time, because Kubeflow kills a step about a second after its signal. The
        hooks of the pods wait up to `grace_seconds` for the training to save, so this process does not wait for it.

        If Kubernetes does not answer, the job is not deleted. A job that no step follows ends by itself.
        """
        try:
            if _retry_briefly(self._is_needed):
                return f"rayjob/{self.name} continues without this step, because a run needs it: run again to follow it"
        except Unavailable as error:
            logger.warning("cannot find out whether a run needs rayjob/%s (%s), so it is not deleted", self.name, error)
            return f"rayjob/{self.name} was not deleted, because Kubernetes does not answer: run again to follow it"
        except InputError as error:
            logger.warning("cannot find out whether a run needs rayjob/%s: %s", self.name, error)
        request_thread = threading.Thread(target=self._send_request, daemon=True)
        request_thread.start()
        self._delete()
        request_thread.join(_REQUEST_SECONDS)
        return f"rayjob/{self.name} was stopped and deleted: run again to continue"

    def _send_request(self) -> None:
        """Ask the training to save. A failure is not fatal, because the hooks of the pods send the same request."""
        try:
            self.ask_to_stop()
        except Exception as error:
            logger.warning("rayjob/%s: the request to save cannot be sent: %s", self.name, error)

    def _is_needed(self) -> bool:
        """Return whether a running workflow needs the job.

        The workflow of this step needs the job if only this pod is stopped, for instance because its node is drained:
        the next attempt of the step will follow the job. Another workflow needs the job if it owns it.

        Raises:
            Unavailable: Kubernetes does not answer.
            InputError: this process may not read workflows.
        """
        # The workflow is unknown if Kubernetes did not answer at the start.
        owner = self.owner or self.jobs.find_workflow()
        if owner is None:
            return False
        if self.jobs.is_workflow_running(owner):
            return True
        job = self.jobs.get(self.name)
        if job is None:
            return False
        owner_uids = [reference["uid"] for reference in job["metadata"].get("ownerReferences") or []]
        return bool(owner_uids) and owner["uid"] not in owner_uids


def _retry_briefly(call: Callable[[], T], pause: float = 0.0) -> T:
    """Return the result of a call. Make up to `_LAST_ATTEMPTS` attempts if Kubernetes does not answer.

    Args:
        call: the call.
        pause: seconds between two attempts.
    """
    for _ in range(_LAST_ATTEMPTS - 1):
        with contextlib.suppress(Unavailable):
            return call()
        time.sleep(pause)  # a server that restarts refuses connections at once
    return call()


def has_ended(status: dict[str, Any]) -> bool:
    """Return whether the job has ended. The operator may still be cleaning up."""
    if status.get("jobStatus") in ("SUCCEEDED", "FAILED", "STOPPED"):
        return True
    return status.get("jobDeploymentStatus") in ("Complete", "Failed", "ValidationFailed")


def describe(status: dict[str, Any]) -> str:
    """Return a short description of a job's state."""
    descriptions = [status.get("jobDeploymentStatus") or "new"]
    if status.get("jobStatus"):
        descriptions.append(status["jobStatus"])
    cluster_status = status.get("rayClusterStatus") or {}
    worker_count = cluster_status.get("desiredWorkerReplicas")
    if worker_count:
        ready_count = cluster_status.get("readyWorkerReplicas", 0)
        descriptions.append(f"{ready_count} of {worker_count} worker pods ready")
    return ", ".join(descriptions)


def _read_error(outcome: dict[str, Any]) -> InfoXLMError:
    """Return the error that a job has stored, with its message as one line."""
    message = " ".join(str(outcome.get("message")).split())
    return errors.from_name(str(outcome.get("class")), message)


def _raising_on_signals() -> contextlib.AbstractContextManager[None]:
    """Raise _StopRequested in the main thread on SIGTERM or Ctrl-C. Ignore further signals."""

    def stop(*_: object) -> None:
        for signal_number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(signal_number, signal.SIG_IGN)  # Kubernetes and Argo may each send a signal
        raise _StopRequested

    return workers.handling_signals(stop)

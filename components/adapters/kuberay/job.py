"""Run work as a KubeRay RayJob and wait for its end, so that GPUs are requested late and released at once.

The job is named after the artifact that it builds. Its owner is the workflow, not the step's pod. If a step dies, the
step's next attempt or the next pipeline run therefore finds the job and follows it. The job is deleted after its end,
if its GPUs are not available in time, or if this process is asked to stop and no running workflow needs the job. API
errors never cause a deletion.
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
from components.adapters.kuberay.api import AlreadyExists, Job, OwnerReference, RayJobs, Unavailable
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

_POLL_SECONDS = 2.0  # pause between two requests for the job's state
_MAX_RETRY_SECONDS = 30.0  # longest pause between two attempts of a call
_MAX_ATTEMPTS = 20  # attempts of a call while Kubernetes does not answer: about ten minutes
_REPORT_SECONDS = 60.0  # time without log lines after which the job's state is logged
_LAST_LINES_SECONDS = 10.0  # time limit for the last log lines of an ended job
_OPERATOR_SECONDS = 300.0  # time beyond `run_seconds` after which the launcher itself ends a job
_MAX_DELETION_SECONDS = 600.0  # time after which a deletion counts as stuck
_DEAD_NODE_SECONDS = 120.0  # a pod that still exists this long after its grace period must be on a dead node
_RESTART_SECONDS = 30.0  # pause between a failed job and its restart
_RECREATION_SECONDS = (30.0, 120.0)  # limits of the random pause after the deletion of a partly scheduled job
_SAVE_REQUEST_SECONDS = 10.0  # time limit for sending the request to save
_SHUTDOWN_ATTEMPTS = 3  # few attempts of a call, because a process that is being stopped has only about a second
_DELETION_RETRY_SECONDS = 1.0  # pause between two attempts to delete a job


class _StopRequested(BaseException):
    """Raised in the main thread by a signal. A BaseException, so that `except Exception` does not catch it."""


class _PartlyScheduled(Exception):
    """Only some of the job's pods have had a node for too long, so two jobs may block each other."""


def run(
    name: str,
    spec_url: str,
    cluster: ClusterConfig,
    num_workers: int,
    step_environment: Sequence[Mapping[str, Any]],
    ask_to_stop: Callable[[], None],
    read_outcome: Callable[[], dict[str, Any] | None],
) -> None:
    """Build an artifact on the cluster as a RayJob. Return when the job has succeeded.

    Args:
        name: name of the job, from `manifest.make_job_name`.
        spec_url: URL of the build spec, the only argument of `python -m components.platform.job`.
        cluster: settings of the cluster's jobs.
        num_workers: number of training workers, one per GPU.
        step_environment: environment variables of the step's pod, in Kubernetes format.
        ask_to_stop: function that asks the training run to save and stop.
        read_outcome: function that returns the job's stored failure, {"code", "class", "message"}, or None.

    Raises:
        ResourcesUnavailable: the GPUs were not available in time, or the job ran too long.
        Preempted: this process was asked to stop.
        WorkerLost: the job ended without an outcome, or Kubernetes stopped answering.
        InputError: Kubernetes refuses the job.
        and the error that the job stored. A temporary error (TryAgain) is raised only after `cluster.retries` restarts.
    """
    outcome = read_outcome()
    if outcome and 2 <= int(outcome["code"]) <= 5:  # the exit codes of permanent errors: a new job would fail, too
        raise _parse_error(outcome)
    body = manifest.render(name, spec_url, cluster, num_workers, step_environment, version("ray"))
    jobs = api.connect()  # a client for the RayJobs of this pod's namespace
    owner = _find_owner(jobs)
    if owner:
        body["metadata"]["ownerReferences"] = [owner]
    launched_job = _LaunchedJob(jobs, body, owner, cluster, ask_to_stop, read_outcome)
    with workers.handle_signals(_raise_stop_requested):
        try:
            launched_job.run_with_restarts()
        except _StopRequested:
            raise Preempted(launched_job.stop()) from None  # `stop` returns the message


def _find_owner(jobs: RayJobs) -> OwnerReference | None:
    """Return a reference to this step's workflow, the owner of the job, or None if no workflow is known."""
    try:
        workflow = jobs.find_workflow()
    except (Unavailable, InputError) as error:
        # The training matters more than the cleanup. A job without an owner ends itself when no step follows it.
        logger.warning("the workflow of this step was not found (%s): the job will not be deleted with it", error)
        return None
    if workflow is None:
        logger.info("this process does not run in a workflow, so no workflow deletes the job")
    return workflow


@dataclass(frozen=True)
class _LaunchedJob:
    """A RayJob that this process creates or finds, follows to its end, and deletes."""

    jobs: RayJobs
    body: Job
    """The manifest of the job."""
    owner: OwnerReference | None
    """Owner reference to this step's workflow."""
    cluster: ClusterConfig
    ask_to_stop: Callable[[], None]
    read_outcome: Callable[[], dict[str, Any] | None]

    @property
    def name(self) -> str:
        return str(self.body["metadata"]["name"])

    def run_with_restarts(self) -> None:
        """Run the job until it succeeds. Restart it up to `cluster.retries` times after a temporary error.

        Raises:
            InfoXLMError: a permanent error, or the last temporary one.
        """
        for restart in range(self.cluster.retries + 1):
            error = self._run_once()
            if error is None:
                return
            # A job that got no GPUs is not restarted, because it has already waited for `start_seconds`.
            is_temporary = isinstance(error, TryAgain) and not isinstance(error, ResourcesUnavailable)
            if restart == self.cluster.retries or not is_temporary:
                raise error
            logger.warning("%s; starting it again (%d of %d)", error, restart + 1, self.cluster.retries)
            time.sleep(_RESTART_SECONDS)

    def _run_once(self) -> InfoXLMError | None:
        """Create or find the job, wait for its end, and delete it. Return its error, or None on success."""
        start_deadline = time.monotonic() + self.cluster.start_seconds  # stays when the job is created again
        status = None
        while status is None:
            self._create_or_find()
            try:
                status = self._print_log_until_end(start_deadline)
            except _PartlyScheduled as obstacle:
                self._delete_and_wait(obstacle)
        # Find the error before the deletion, because the state of the pods may explain it.
        error = None if status.get("jobStatus") == "SUCCEEDED" else self._find_error(status)
        self._delete()
        return error

    def _print_log_until_end(self, start_deadline: float) -> dict[str, Any]:
        """Print the job's log until the job ends, and return the job's status. See `_follow` for the errors."""
        log = JobLog(self.jobs, self.name)
        try:
            status = self._follow(log, start_deadline)
            log.finish(_LAST_LINES_SECONDS)
        finally:
            log.finish(0)  # end the thread even after an error
        return status

    def _delete_and_wait(self, obstacle: _PartlyScheduled) -> None:
        """Delete a partly scheduled job, and pause before the job is created again.

        Two partly scheduled jobs block each other, because each holds nodes that the other needs. Their pauses are
        random, so one job is created again before the other and gets all nodes.
        """
        self._delete()
        pause_seconds = random.uniform(*_RECREATION_SECONDS)  # noqa: S311 - not a secret
        reason = f"was deleted to free its nodes ({obstacle})"
        logger.warning("rayjob/%s %s; creating it again in %.0f s", self.name, reason, pause_seconds)
        time.sleep(pause_seconds)

    def _create_or_find(self) -> None:
        """Create the job, or find a job of this name that is running or has succeeded. Replace a failed job."""
        grace_end = time.monotonic() + self.cluster.grace_seconds
        waits_for_pods = True
        while time.monotonic() < grace_end + _MAX_DELETION_SECONDS:
            job = self._retry(self.jobs.get, self.name)
            if job is None:
                if self._create():
                    return
            elif not job["metadata"].get("deletionTimestamp"):
                status = job.get("status") or {}
                # A succeeded job is left over if the previous step died before it could delete the job.
                if not has_ended(status) or status.get("jobStatus") == "SUCCEEDED":
                    logger.info("following the existing rayjob/%s (%s)", self.name, describe_status(status))
                    return
                logger.info("rayjob/%s of an earlier attempt is %s: deleting it", self.name, describe_status(status))
                self._retry(self.jobs.delete, self.name)
            elif waits_for_pods and time.monotonic() > grace_end + _DEAD_NODE_SECONDS:
                # The pods of a dead node stay until somebody removes the node. They do not disturb the next job, whose
                # RayCluster gets a new name.
                logger.warning("pods of rayjob/%s do not end, perhaps because a node is lost: not waiting", self.name)
                self._retry(self.jobs.delete, self.name, "Background")  # removes the job at once
                waits_for_pods = False
            time.sleep(_POLL_SECONDS)
        max_wait_seconds = self.cluster.grace_seconds + _MAX_DELETION_SECONDS
        raise WorkerLost(
            f"rayjob/{self.name} is still being deleted after {max_wait_seconds:.0f} s: check its finalizers, "
            "then run again"
        )

    def _create(self) -> bool:
        """Create the job. Return False if it exists because the response to an earlier call was lost."""
        try:
            self._retry(self.jobs.create, self.body)
        except AlreadyExists:
            return False
        logger.info("created rayjob/%s", self.name)
        return True

    def _retry(self, call: Callable[..., T], *arguments: Any) -> T:
        """Return the result of a call. Make up to `_MAX_ATTEMPTS` attempts while Kubernetes does not answer.

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
            # Wait longer after each failure, so that many steps do not overload a recovering API server.
            time.sleep(min(_POLL_SECONDS * 2**attempt, _MAX_RETRY_SECONDS))
            attempt += 1

    def _follow(self, log: JobLog, start_deadline: float) -> dict[str, Any]:
        """Wait until the job ends and return its status. Enforce the time limits and report the job's state.

        Args:
            log: the job's log; the state is reported while the log has no new lines.
            start_deadline: monotonic time by which the job must be running.

        Raises:
            WorkerLost: the job was deleted, or Kubernetes has stopped answering.
            ResourcesUnavailable: the job has run for too long and was deleted.
            and the errors of `_check_start`.
        """
        follow_start = last_report = run_start = time.monotonic()
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
            is_running = _is_running(status)
            if is_running != was_running:
                was_running = is_running
                run_start = current_time
                # A job that has lost its pods gets the full start time again.
                start_deadline = current_time + self.cluster.start_seconds
                logger.info("rayjob/%s is %s", self.name, describe_status(status))
            is_queued = self.cluster.queue and status.get("jobDeploymentStatus") == "Suspended"
            if is_queued:  # time in Kueue's queue does not count
                start_deadline = current_time + self.cluster.start_seconds
            if is_running:
                self._check_run_time(job, current_time - run_start)
            else:
                self._check_start(job, obstacles, start_deadline - current_time)
            if current_time - max(log.last_line_time, last_report) > _REPORT_SECONDS:
                last_report = current_time
                state = f"{describe_status(status)}, followed for {current_time - follow_start:.0f} s"
                logger.info("rayjob/%s is %s", self.name, state)
            time.sleep(_POLL_SECONDS)

    def _check_run_time(self, job: Job, run_seconds: float) -> None:
        """Delete a job that has run too long, and raise ResourcesUnavailable."""
        # The operator's limit, `activeDeadlineSeconds`, comes later if the job started soon: it adds `start_seconds`.
        if run_seconds > self.cluster.run_seconds + _OPERATOR_SECONDS:
            limit = f"ray.run_seconds ({self.cluster.run_seconds} s)"
            self._delete_and_raise_unavailable(job, f"not finished after {limit}")

    def _check_start(self, job: Job, obstacles: ObstacleWatch, remaining_seconds: float) -> None:
        """Raise an error if a job cannot start or has waited too long.

        Raises:
            InputError: waiting does not help; the job was deleted.
            ResourcesUnavailable: the job did not start in time; the job was deleted.
            _PartlyScheduled: only some pods have a node. Jobs in a queue are exempt, because Kueue admits whole jobs.
        """
        obstacles.check(job)
        permanent_obstacle = obstacles.get_permanent()
        if permanent_obstacle:
            self._delete()
            reason = f"rayjob/{self.name} cannot start: {permanent_obstacle.message}"
            raise InputError(f"{reason}: the job was deleted; fix this, then run again")
        if remaining_seconds < 0:
            state = describe_status(job.get("status") or {})
            self._delete_and_raise_unavailable(job, f"no GPUs after {self.cluster.start_seconds} s ({state})")
        partly_scheduled = obstacles.get_partly_scheduled(self.cluster.partial_seconds)
        if partly_scheduled and not self.cluster.queue:
            raise _PartlyScheduled(partly_scheduled.message)

    def _find_error(self, status: dict[str, Any]) -> InfoXLMError:
        """Return the error of a failed job, from the operator's state, the job's stored error, or its pods."""
        details = shorten(f"{describe_status(status)} {status.get('reason') or ''}: {status.get('message') or ''}")
        operator_error = self._find_operator_error(status, details)
        if operator_error:
            return operator_error
        outcome = self.read_outcome()
        if outcome:
            error = _parse_error(outcome)
        else:
            error = WorkerLost(f"rayjob/{self.name} ended as {details}: run again to continue")
        if not isinstance(error, WorkerLost):
            return error
        # A process killed for lack of memory cannot store an error, but Kubernetes reports the cause in its pod. If the
        # pods cannot be read, the original error is still useful.
        with contextlib.suppress(Unavailable, InputError):
            cause_and_remedy = find_out_of_memory(self.jobs, self.name)
            if cause_and_remedy:
                return OutOfMemory(f"rayjob/{self.name}: {cause_and_remedy}, then run again")
        return error

    def _find_operator_error(self, status: dict[str, Any], details: str) -> InfoXLMError | None:
        """Return the error if KubeRay itself has stopped or refused the job, else None."""
        reason = status.get("reason")
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
        return None

    def _delete_and_raise_unavailable(self, job: Job, reason: str) -> NoReturn:
        """Delete the job and raise ResourcesUnavailable with the reason and the obstacle that Kubernetes reports."""
        obstacle = None
        with contextlib.suppress(Unavailable, InputError):  # the obstacle only makes the message more helpful
            obstacle = find_obstacle(self.jobs, job)
        self._delete()
        if obstacle:
            reason = f"{reason}: {obstacle.message}"
        raise ResourcesUnavailable(
            f"rayjob/{self.name}: {reason}: the job was deleted; free or add GPUs, then run again"
        )

    def _delete(self) -> None:
        """Delete the job to release its GPUs. If the deletion fails, log the command for a manual deletion."""
        try:
            _retry_briefly(lambda: self.jobs.delete(self.name), pause_seconds=_DELETION_RETRY_SECONDS)
        except (Unavailable, InputError) as error:  # it must not replace the outcome of the job
            logger.error("rayjob/%s could not be deleted (%s): kubectl delete rayjob %s", self.name, error, self.name)

    def stop(self) -> str:
        """Stop the job unless a running workflow needs it. Return a message about the outcome.

        The request to save and the deletion are sent at the same time, because Kubeflow kills a step about a second
        after SIGTERM. The pods' `preStop` hooks wait up to `grace_seconds` for the training to save.
        """
        try:
            is_needed = _retry_briefly(self._is_needed_by_workflow, pause_seconds=0)  # leaves time for the deletion
        except Unavailable as error:
            # Leave the job, because it ends itself if no step follows it.
            logger.warning("cannot find out whether a run needs rayjob/%s (%s), so it is not deleted", self.name, error)
            return f"rayjob/{self.name} was not deleted, because Kubernetes does not answer: run again to follow it"
        except InputError as error:
            # Kubernetes refuses to answer, and another attempt would not help. A useless job must not keep its GPUs.
            logger.warning("cannot find out whether a run needs rayjob/%s: %s", self.name, error)
            is_needed = False
        if is_needed:
            return f"rayjob/{self.name} continues without this step, because a run needs it: run again to follow it"
        request_thread = threading.Thread(target=self._request_save, daemon=True)
        request_thread.start()
        self._delete()
        request_thread.join(_SAVE_REQUEST_SECONDS)
        return f"rayjob/{self.name} was stopped and deleted: run again to continue"

    def _request_save(self) -> None:
        """Ask the training to save. A failure is not fatal, because the pods' hooks send the same request."""
        try:
            self.ask_to_stop()
        except Exception as error:
            logger.warning("rayjob/%s: the request to save cannot be sent: %s", self.name, error)

    def _is_needed_by_workflow(self) -> bool:
        """Return whether this step's workflow or a different owner still needs the job.

        If only this pod is stopped, for example because its node is drained, the workflow retries the step. The next
        attempt then follows the job.

        Raises:
            Unavailable: Kubernetes does not answer.
            InputError: this process may not read workflows.
        """
        # If Kubernetes did not answer at the start, the workflow is unknown: ask again.
        workflow = self.owner or self.jobs.find_workflow()
        if workflow is None:
            return False
        if self.jobs.is_workflow_running(workflow):
            return True
        job = self.jobs.get(self.name)
        if job is None:
            return False
        # If another run has created the job, this step has only followed it.
        owner_uids = [reference["uid"] for reference in job["metadata"].get("ownerReferences") or []]
        return bool(owner_uids) and workflow["uid"] not in owner_uids


def _retry_briefly(call: Callable[[], T], pause_seconds: float) -> T:
    """Return the result of a call. Make up to `_SHUTDOWN_ATTEMPTS` attempts while Kubernetes does not answer.

    Without a pause, all attempts fail within milliseconds if a restarting API server refuses connections.
    """
    for _ in range(_SHUTDOWN_ATTEMPTS - 1):
        with contextlib.suppress(Unavailable):
            return call()
        time.sleep(pause_seconds)
    return call()


def has_ended(status: dict[str, Any]) -> bool:
    """Return whether the job has ended. The operator may still be cleaning up."""
    if status.get("jobStatus") in ("SUCCEEDED", "FAILED", "STOPPED"):
        return True
    return status.get("jobDeploymentStatus") in ("Complete", "Failed", "ValidationFailed")


def _is_running(status: dict[str, Any]) -> bool:
    """Return whether the job's driver is running.

    The operator's state alone does not show it: it is Running as soon as the submitter pod exists, even without a node.
    """
    return status.get("jobDeploymentStatus") == "Running" and status.get("jobStatus") == "RUNNING"


def describe_status(status: dict[str, Any]) -> str:
    """Return a short description of a job's status, such as "Running, RUNNING, 2 of 2 worker pods ready"."""
    states = [status.get("jobDeploymentStatus") or "new"]
    if status.get("jobStatus"):
        states.append(status["jobStatus"])
    cluster_status = status.get("rayClusterStatus") or {}
    worker_count = cluster_status.get("desiredWorkerReplicas")
    if worker_count:
        ready_count = cluster_status.get("readyWorkerReplicas", 0)
        states.append(f"{ready_count} of {worker_count} worker pods ready")
    return ", ".join(states)


def _parse_error(outcome: dict[str, Any]) -> InfoXLMError:
    """Return the error that a job has stored, with a one-line message."""
    message = " ".join(str(outcome.get("message")).split())
    return errors.from_name(str(outcome.get("class")), message)


def _raise_stop_requested(*_: object) -> NoReturn:
    """Handle a signal in the main thread: ignore further signals and raise _StopRequested.

    The exception ends a pause or an API call at once. After a handler that only sets a flag, Python would resume them.
    """
    for signal_number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signal_number, signal.SIG_IGN)  # Kubernetes and Argo may each send a signal
    raise _StopRequested

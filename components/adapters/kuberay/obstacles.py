"""Explain from pods and events why a RayJob does not run, or which of its containers ran out of memory."""

import logging
import re
import time
from typing import Any, NamedTuple

from components.adapters.kuberay.api import Job, RayJobs, Unavailable
from infoxlm_core.errors import InputError, shorten

logger = logging.getLogger(__name__)

_POLL_SECONDS = 30.0  # interval between two checks
_INVALID_IMAGE = ("InvalidImageName", "ErrImageNeverPull")
_IMAGE_ERRORS = (*_INVALID_IMAGE, "ErrImagePull", "ImagePullBackOff")
_REGISTRY_REFUSAL = re.compile(r"not found|manifest unknown|unauthorized|denied|no match for platform", re.IGNORECASE)
"""Registry messages that mean a permanent failure. Any other failure to pull an image may be temporary."""
_TIMESTAMP_LENGTH = len("2026-01-31T12:00:00")  # excludes the time zone, which has several formats
_NODE_TYPE = "ray.io/node-type"
"""Pod label with the role in the RayCluster: head or worker."""


class Obstacle(NamedTuple):
    """The reason why a job's pods do not run."""

    message: str
    is_permanent: bool = False
    """Whether waiting is useless until somebody changes a setting or an image."""
    is_partly_scheduled: bool = False
    """Whether only some of the job's pods have a node. Their nodes are blocked for other jobs."""


class ObstacleWatch:
    """Checks a job every `_POLL_SECONDS`. Logs why the job does not run whenever the reason changes."""

    def __init__(self, jobs: RayJobs) -> None:
        self._jobs = jobs
        self._last_check = time.monotonic()
        self._obstacle: Obstacle | None = None
        self._consecutive_permanent_checks = 0  # since the last check without a permanent obstacle
        self._partly_scheduled_since: float | None = None

    def check(self, job: Job) -> None:
        """Find out what keeps a job waiting, and log a new obstacle. Do nothing within `_POLL_SECONDS` of a check."""
        current_time = time.monotonic()
        if current_time - self._last_check <= _POLL_SECONDS:  # a check lists pods and events of the whole namespace
            return
        self._last_check = current_time
        obstacle = self._find_obstacle(job)
        if obstacle and obstacle != self._obstacle:
            logger.info("rayjob/%s waits: %s", job["metadata"]["name"], obstacle.message)
        self._obstacle = obstacle
        is_permanent = obstacle is not None and obstacle.is_permanent
        self._consecutive_permanent_checks = self._consecutive_permanent_checks + 1 if is_permanent else 0
        if obstacle is None or not obstacle.is_partly_scheduled:
            self._partly_scheduled_since = None
        elif self._partly_scheduled_since is None:  # later checks must not reset the start of this state
            self._partly_scheduled_since = current_time

    def _find_obstacle(self, job: Job) -> Obstacle | None:
        """Return a job's obstacle, or None if none is known."""
        try:
            return find_obstacle(self._jobs, job)
        except (Unavailable, InputError) as error:  # the job may still start
            logger.debug("cannot find out what keeps rayjob/%s waiting: %s", job["metadata"]["name"], error)
            return None

    def get_permanent(self) -> Obstacle | None:
        """Return a permanent obstacle after two consecutive checks, else None. A single event may be outdated."""
        return self._obstacle if self._consecutive_permanent_checks > 1 else None

    def get_partly_scheduled(self, seconds: float) -> Obstacle | None:
        """Return the obstacle if only some of the job's pods have had a node for at least `seconds`, else None."""
        since = self._partly_scheduled_since
        return self._obstacle if since is not None and time.monotonic() - since >= seconds else None


def find_obstacle(jobs: RayJobs, job: Job) -> Obstacle | None:
    """Return the reason why a job's pods do not run, or None if Kubernetes reports none.

    Reasons in order of precedence: an image that cannot be pulled, a violation of Pod Security, a pod that the
    scheduler cannot place, the newest warning.
    """
    name = job["metadata"]["name"]
    creation_time = job["metadata"].get("creationTimestamp") or ""
    warnings = _list_messages_since(jobs.list_warnings(name), creation_time)
    newest_warning = warnings[-1] if warnings else ""
    pods = jobs.list_pods(name)
    for pod in pods:
        image_obstacle = _find_image_obstacle(pod, warnings)
        if image_obstacle:
            return image_obstacle
    if "violates PodSecurity" in newest_warning:  # Kubernetes does not create such a pod, so only an event shows it
        return Obstacle(shorten(newest_warning), is_permanent=True)

    status = job.get("status") or {}
    cluster_status = status.get("rayClusterStatus") or {}
    worker_count = cluster_status.get("desiredWorkerReplicas") or 0
    some_have_node = any(pod.spec.node_name for pod in pods)
    unschedulable_pods = [pod for pod in pods if _explain_unschedulable(pod)]
    if unschedulable_pods:
        description = _describe_unschedulable(unschedulable_pods, worker_count)
        return Obstacle(description, is_partly_scheduled=some_have_node)
    if newest_warning:
        existing_workers = [pod for pod in pods if _read_node_type(pod) == "worker"]
        some_are_missing = len(existing_workers) < worker_count  # for example, a quota prevents their creation
        return Obstacle(shorten(newest_warning), is_partly_scheduled=some_have_node and some_are_missing)
    return None


def find_out_of_memory(jobs: RayJobs, name: str) -> str:
    """Return which container of a job exceeded its memory limit and which setting to raise, or "" if none did."""
    for pod in jobs.list_pods(name):
        for status in pod.status.container_statuses or []:
            for state in (status.state, status.last_state):  # the container may have restarted
                terminated = state and state.terminated
                if terminated and terminated.reason == "OOMKilled":
                    return _describe_out_of_memory(pod, status.name, terminated.exit_code)
    return ""


def _describe_out_of_memory(pod: Any, container_name: str, exit_code: int) -> str:
    """Describe the container, its memory limit, and the setting that raises the limit."""
    limits = {container.name: (container.resources.limits or {}) for container in pod.spec.containers}
    limit = limits.get(container_name, {}).get("memory", "unknown")
    setting = "ray.head_memory" if _read_node_type(pod) == "head" else "pool.memory (for text processing, steps.memory)"
    return (
        f"{_read_node_type(pod)} {pod.metadata.name} needed more than its {limit} of memory (OOMKilled, exit code "
        f"{exit_code}): raise {setting}"
    )


def _read_node_type(pod: Any) -> str:
    """Return the role of a pod: head, worker or submitter."""
    return str((pod.metadata.labels or {}).get(_NODE_TYPE, "submitter"))


def _explain_unschedulable(pod: Any) -> str:
    """Return why the scheduler finds no node for a pod, or "" if it has found one or has not tried yet."""
    for condition in pod.status.conditions or []:
        if condition.type == "PodScheduled" and condition.reason == "Unschedulable":
            # The rest of the message explains why no other pod can be preempted. It does not help the user.
            reason, _, _ = (condition.message or "no node fits").partition(" preemption:")
            return reason
    return ""


def _describe_unschedulable(pods: list[Any], worker_count: int) -> str:
    """Describe the pods that the scheduler cannot place, with the reason for the first pod."""
    first_pod = pods[0]
    waiting = f"the {_read_node_type(first_pod)}"
    if _read_node_type(first_pod) == "worker":
        waiting_workers = sum(_read_node_type(pod) == "worker" for pod in pods)
        waiting = f"{waiting_workers} of {max(worker_count, waiting_workers)} workers"
    return shorten(f"{waiting} cannot be scheduled: pod {first_pod.metadata.name}: {_explain_unschedulable(first_pod)}")


def _find_image_obstacle(pod: Any, warnings: list[str]) -> Obstacle | None:
    """Return why a pod cannot pull its image, or None if the pod does not wait for an image.

    The obstacle is permanent if the image name is invalid or the registry refuses access.

    Args:
        pod: pod from the Kubernetes API.
        warnings: messages of the job's Warning events.
    """
    init_containers = pod.status.init_container_statuses or []
    containers = pod.status.container_statuses or []
    for container in init_containers + containers:
        waiting = container.state and container.state.waiting
        if not waiting or waiting.reason not in _IMAGE_ERRORS:
            continue
        message = waiting.message or ""
        # While the kubelet pauses between two attempts, the registry's answer may be only in an earlier event.
        pull_warnings = [warning for warning in warnings if "pull image" in warning]
        is_refused = any(_REGISTRY_REFUSAL.search(text) for text in [message, *pull_warnings])
        description = f"{waiting.reason} in pod {pod.metadata.name}: {message}"
        return Obstacle(shorten(description), is_permanent=is_refused or waiting.reason in _INVALID_IMAGE)
    return None


def _list_messages_since(events: list[Any], creation_time: str) -> list[str]:
    """Return the messages of events since a job's creation, oldest first.

    Earlier events concern an earlier job of the same name. An event without a time is kept, because it may be new.
    """
    start = creation_time[:_TIMESTAMP_LENGTH]
    job_events = [event for event in events if not _read_time(event) or _read_time(event) >= start]
    job_events.sort(key=_read_time)
    return [event.message for event in job_events]


def _read_time(event: Any) -> str:
    """Return the time of an event, such as 2026-01-31T12:00:00, or "" if it has none."""
    # Events of the newer API, such as the scheduler's, have only `event_time`.
    return str(event.last_timestamp or event.event_time or "").replace(" ", "T")[:_TIMESTAMP_LENGTH]

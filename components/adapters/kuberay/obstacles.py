"""Find the reason why a RayJob does not run, or which of its containers ran out of memory, from pods and events."""

import logging
import re
import time
from typing import Any, NamedTuple

from components.adapters.kuberay.api import Job, RayJobs, Unavailable
from infoxlm_core.errors import InputError, shorten

logger = logging.getLogger(__name__)

_POLL_SECONDS = 30.0  # between two checks
_INVALID_IMAGE = ("InvalidImageName", "ErrImageNeverPull")
_IMAGE_ERRORS = (*_INVALID_IMAGE, "ErrImagePull", "ImagePullBackOff")
_REGISTRY_REFUSES = re.compile(r"not found|manifest unknown|unauthorized|denied|no match for platform", re.IGNORECASE)
"""Messages of a registry that denies us an image for good; any other failure may be temporary."""
_NODE_TYPE = "ray.io/node-type"
"""Label of the pods of a RayCluster: head or worker."""


class Obstacle(NamedTuple):
    """What keeps the pods of a job from running."""

    message: str
    is_permanent: bool = False
    """Whether waiting does not help, because a person must change a setting or an image."""
    is_partly_scheduled: bool = False
    """Whether some pods of the job have a node, whose resources no other job can use, while others have none."""


class ObstacleWatch:
    """Checks a job every `_POLL_SECONDS`, and logs why it does not run whenever the reason changes."""

    def __init__(self, jobs: RayJobs) -> None:
        self._jobs = jobs
        self._last_check = time.monotonic()
        self._obstacle: Obstacle | None = None
        self._consecutive_permanent = 0  # checks in a row that found a permanent obstacle
        self._partly_scheduled_since: float | None = None

    def update(self, job: Job) -> None:
        """Check the job, unless it was checked within the last `_POLL_SECONDS`."""
        current_time = time.monotonic()
        if current_time - self._last_check <= _POLL_SECONDS:
            return
        self._last_check = current_time
        name = job["metadata"]["name"]
        previous = self._obstacle
        self._obstacle = None
        try:
            self._obstacle = find_obstacle(self._jobs, job)
        except (Unavailable, InputError) as error:  # the job may still start
            logger.debug("cannot find out what keeps rayjob/%s waiting: %s", name, error)
        if self._obstacle and self._obstacle != previous:
            logger.info("rayjob/%s waits: %s", name, self._obstacle.message)
        if self._obstacle and self._obstacle.is_permanent:
            self._consecutive_permanent += 1
        else:
            self._consecutive_permanent = 0
        if not self._obstacle or not self._obstacle.is_partly_scheduled:
            self._partly_scheduled_since = None
        elif self._partly_scheduled_since is None:
            self._partly_scheduled_since = current_time

    def get_permanent(self) -> Obstacle | None:
        """Return the obstacle if two consecutive checks found a permanent one. A single event may be outdated."""
        return self._obstacle if self._consecutive_permanent > 1 else None

    def get_partly_scheduled(self, seconds: float) -> Obstacle | None:
        """Return the obstacle if, for this many seconds, only some pods of the job have had a node."""
        if self._partly_scheduled_since is None or time.monotonic() - self._partly_scheduled_since < seconds:
            return None
        return self._obstacle


def find_obstacle(jobs: RayJobs, job: Job) -> Obstacle | None:
    """Return what keeps a job's pods from running, or None if Kubernetes reports nothing."""
    name = job["metadata"]["name"]
    created = job["metadata"].get("creationTimestamp") or ""
    messages = _list_messages_since(jobs.list_warnings(name), created)
    last_message = messages[-1] if messages else ""
    pods = jobs.list_pods(name)
    for pod in pods:
        image_error = _find_image_error(pod, messages)
        if image_error:
            return image_error
    if "violates PodSecurity" in last_message:
        return Obstacle(shorten(last_message), is_permanent=True)
    status = job.get("status") or {}
    cluster_status = status.get("rayClusterStatus") or {}
    worker_count = cluster_status.get("desiredWorkerReplicas") or 0
    some_have_node = any(pod.spec.node_name for pod in pods)
    unschedulable_pods = [pod for pod in pods if _explain_unschedulable(pod)]
    if unschedulable_pods:
        return Obstacle(_describe_waiting(unschedulable_pods, worker_count), is_partly_scheduled=some_have_node)
    if last_message:
        existing_workers = [pod for pod in pods if _read_node_type(pod) == "worker"]
        some_are_missing = len(existing_workers) < worker_count  # a quota, for instance, prevents their creation
        return Obstacle(shorten(last_message), is_partly_scheduled=some_have_node and some_are_missing)
    return None


def find_out_of_memory(jobs: RayJobs, name: str) -> str:
    """Return which container of a job exceeded its memory limit, with the limit and the setting, or "" if none did."""
    for pod in jobs.list_pods(name):
        for status in pod.status.container_statuses or []:
            for state in (status.state, status.last_state):
                terminated = state and state.terminated
                if terminated and terminated.reason == "OOMKilled":
                    return _describe_out_of_memory(pod, status.name, terminated.exit_code)
    return ""


def _describe_out_of_memory(pod: Any, container_name: str, exit_code: int) -> str:
    """Return which container exceeded which memory limit, and the setting that raises the limit."""
    limits = {container.name: (container.resources.limits or {}) for container in pod.spec.containers}
    limit = limits.get(container_name, {}).get("memory", "unknown")
    setting = "ray.head_memory" if _read_node_type(pod) == "head" else "pool.memory (steps.memory for text)"
    return (
        f"{_read_node_type(pod)} {pod.metadata.name} needed more than its {limit} of memory (OOMKilled, exit code "
        f"{exit_code}): raise {setting}"
    )


def _read_node_type(pod: Any) -> str:
    return str((pod.metadata.labels or {}).get(_NODE_TYPE, "submitter"))


def _explain_unschedulable(pod: Any) -> str:
    """Return why the scheduler finds no node for a pod, or "" if the pod has a node or was not considered yet."""
    for condition in pod.status.conditions or []:
        if condition.type == "PodScheduled" and condition.reason == "Unschedulable":
            nodes, _, _ = (condition.message or "no node fits").partition(" preemption:")
            return nodes
    return ""


def _describe_waiting(pods: list[Any], worker_count: int) -> str:
    """Return which pods wait for a node, and the reason for the first of them."""
    first_pod = pods[0]
    waiting = f"the {_read_node_type(first_pod)}"
    if _read_node_type(first_pod) == "worker":
        waiting_workers = sum(_read_node_type(pod) == "worker" for pod in pods)
        waiting = f"{waiting_workers} of {max(worker_count, waiting_workers)} workers"
    return shorten(f"{waiting} cannot be scheduled: pod {first_pod.metadata.name}: {_explain_unschedulable(first_pod)}")


def _find_image_error(pod: Any, messages: list[str]) -> Obstacle | None:
    """Return why a pod cannot pull its image.

    The obstacle is permanent if the registry refuses access or the image name is invalid.
    """
    init_containers = pod.status.init_container_statuses or []
    containers = pod.status.container_statuses or []
    for container in init_containers + containers:
        waiting = container.state and container.state.waiting
        if waiting and waiting.reason in _IMAGE_ERRORS:
            message = waiting.message or ""
            pull_messages = [event_message for event_message in messages if "pull image" in event_message]
            is_refused = any(_REGISTRY_REFUSES.search(text) for text in [message, *pull_messages])
            description = f"{waiting.reason} in pod {pod.metadata.name}: {message}"
            return Obstacle(shorten(description), is_permanent=is_refused or waiting.reason in _INVALID_IMAGE)
    return None


def _list_messages_since(events: list[Any], start: str) -> list[str]:
    """Return the messages of events since `start`, oldest first. Earlier events belong to another job of this name."""
    timed_messages = []
    for event in events:
        # Compare whole seconds, 2026-01-31T12:00:00, because the formats of the time zone differ.
        event_time = str(event.last_timestamp or event.event_time or "").replace(" ", "T")[:19]
        if not event_time or event_time >= start[:19]:
            timed_messages.append((event_time, event.message))
    timed_messages.sort(key=lambda timed_message: timed_message[0])
    return [message for _, message in timed_messages]

"""Find out from states and events what keeps the pods of a RayJob from running, and whether waiting helps."""

import contextlib
import logging
import re
import time
from typing import Any, NamedTuple

from components.adapters.kuberay.api import Job, NoAnswer, RayJobs, shorten
from infoxlm_core.errors import InputError

logger = logging.getLogger(__name__)

_POLL = 30.0  # seconds between two checks
_INVALID_IMAGE = ("InvalidImageName", "ErrImageNeverPull")
_IMAGE_ERRORS = (*_INVALID_IMAGE, "ErrImagePull", "ImagePullBackOff")
_REGISTRY_REFUSES = re.compile(r"not found|manifest unknown|unauthorized|denied|no match for platform", re.IGNORECASE)
"""Messages of a registry that denies us an image for good; any other failure may be temporary."""
_QUOTA = re.compile(r"exceeded quota: \S+ requested: (\S+), used: \S+ limited: (\S+)")


class Obstacle(NamedTuple):
    """What keeps the pods of a job from running."""

    message: str
    is_permanent: bool
    """Whether waiting does not help, because somebody must change something."""


class ObstacleWatch:
    """Check regularly what keeps a job from running, and log it when it changes."""

    def __init__(self, jobs: RayJobs) -> None:
        self._jobs, self._last_check = jobs, time.monotonic()
        self._message, self._permanent_in_a_row = "", 0

    def permanent(self, job: Job) -> Obstacle | None:
        """Return the obstacle if two consecutive checks found a permanent one."""
        now = time.monotonic()
        if now - self._last_check <= _POLL:
            return None
        self._last_check = now
        name = job["metadata"]["name"]
        try:
            obstacle = find_obstacle(self._jobs, job)
        except (NoAnswer, InputError) as error:  # the job may still start
            logger.debug("cannot find out what keeps rayjob/%s waiting: %s", name, error)
            return None
        if obstacle and obstacle.message != self._message:
            logger.info("rayjob/%s waits: %s", name, obstacle.message)
            self._message = obstacle.message
        if not (obstacle and obstacle.is_permanent):
            self._permanent_in_a_row = 0
            return None
        self._permanent_in_a_row += 1
        return obstacle if self._permanent_in_a_row > 1 else None


def find_obstacle(jobs: RayJobs, job: Job) -> Obstacle | None:
    """Return what keeps a job's pods from running, or None if Kubernetes reports nothing."""
    name, created = job["metadata"]["name"], job["metadata"].get("creationTimestamp") or ""
    digest = name.rpartition("-")[2]  # operators shorten the names of pods from the left
    events = [event for event in jobs.warnings() if digest in (event.involved_object.name or "") and event.message]
    messages = _messages_since(events, created)
    for pod in jobs.ray_pods():
        if digest in pod.metadata.name and (obstacle := _image_error(pod, messages)):
            return obstacle
    if not messages:
        return None
    last = messages[-1]
    return Obstacle(shorten(last), "violates PodSecurity" in last or _exceeds_whole_quota(last))


def _image_error(pod: Any, messages: list[str]) -> Obstacle | None:
    """Return why a pod cannot pull its image; permanent if the registry denies us the image."""
    for container in [*(pod.status.init_container_statuses or []), *(pod.status.container_statuses or [])]:
        waiting = container.state and container.state.waiting
        if waiting and waiting.reason in _IMAGE_ERRORS:
            reports = [waiting.message or "", *(message for message in messages if "pull image" in message)]
            is_refused = any(_REGISTRY_REFUSES.search(report) for report in reports)
            text = f"{waiting.reason} in pod {pod.metadata.name}: {waiting.message or ''}"
            return Obstacle(shorten(text), is_refused or waiting.reason in _INVALID_IMAGE)
    return None


def _messages_since(events: list[Any], start: str) -> list[str]:
    """Return the messages of events since `start`, oldest first; earlier ones belong to another job of this name."""
    messages = []
    for event in events:
        time = str(event.last_timestamp or event.event_time or "").replace(" ", "T")[:19]
        if not time or time >= start[:19]:
            messages.append((time, event.message))
    return [message for _, message in sorted(messages, key=lambda item: item[0])]


def _exceeds_whole_quota(message: str) -> bool:
    """Return whether a pod was refused because it requests more than the whole quota."""
    from kubernetes.utils.quantity import parse_quantity

    if not (match := _QUOTA.search(message)):
        return False
    requested, limits = (dict(item.split("=", 1) for item in group.split(",")) for group in match.groups())
    with contextlib.suppress(ValueError):
        return any(
            parse_quantity(requested[resource]) > parse_quantity(limits[resource])
            for resource in requested.keys() & limits.keys()
        )
    return False

"""The Kubernetes API as the launcher of RayJobs uses it: ten calls, with errors of one line.

Every call has a time limit. What an API server that is busy or away may cost is `NoAnswer`, for the caller to try
again; a refusal is final.
"""

import contextlib
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from infoxlm_core.errors import InputError

logger = logging.getLogger(__name__)

Job = dict[str, Any]

ROLE = "infoxlm-runner"
SUBMITTER = "ray-job-submitter"
_MOUNTED = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_SECONDS = (5, 30)  # to connect, to answer
_LATER = (408, 409, 410, 429)  # time is over, changed meanwhile, too old, too many requests
_NEVER = ("InvalidImageName", "ErrImageNeverPull")
_NO_IMAGE = (*_NEVER, "ErrImagePull", "ImagePullBackOff")
_REFUSED = re.compile(r"not found|manifest unknown|unauthorized|denied|no match for platform", re.IGNORECASE)
"""What a registry says that has no such image for us; all else may be a registry that is away for a moment."""
_QUOTA = re.compile(r"exceeded quota: \S+ requested: (\S+), used: \S+ limited: (\S+)")
_AT = {"group": "ray.io", "version": "v1", "plural": "rayjobs"}


class NoAnswer(Exception):
    """The API server does not answer, or not now: the same call may work in a moment."""


class AlreadyExists(Exception):
    """There is an object of that name."""


def connect() -> "RayJobs":
    """The RayJobs of the namespace in which this process runs.

    Raises:
        InputError: this process runs in no pod.
    """
    from kubernetes import client, config

    try:
        config.load_incluster_config()  # the token in it is read again before it expires
        namespace = (_MOUNTED / "namespace").read_text().strip()
    except (config.ConfigException, OSError) as error:
        raise InputError(
            f"no access to Kubernetes ({error}): a step with `cluster` set runs in a pod, as {ROLE}"
        ) from None
    return RayJobs(client.ApiClient(), namespace)


class RayJobs:
    """The RayJobs of a namespace, the log of their submitters and what the cluster says of their pods."""

    def __init__(self, api: Any, namespace: str) -> None:
        from kubernetes import client

        self.namespace = namespace
        self._at = {**_AT, "namespace": namespace}
        self._client, self._custom, self._core = api, client.CustomObjectsApi(api), client.CoreV1Api(api)

    def create(self, body: Job) -> None:
        """Create a job; raises AlreadyExists."""
        body = {**body, "metadata": {**body["metadata"], "namespace": self.namespace}}
        with self._answering("create"):
            self._custom.create_namespaced_custom_object(**self._at, body=body, _request_timeout=_SECONDS)

    def get(self, name: str) -> Job | None:
        """The job as it is now, if there is one."""
        with self._answering("get", missing_is_fine=True):
            return self._custom.get_namespaced_custom_object(**self._at, name=name, _request_timeout=_SECONDS)
        return None

    def watch(self, name: str, seconds: int) -> Iterator[Job]:
        """The job whenever it changes, for so many seconds or until it is deleted."""
        from kubernetes import watch

        with self._answering("watch"):
            events = watch.Watch().stream(
                self._custom.list_namespaced_custom_object,
                **self._at,
                field_selector=f"metadata.name={name}",
                timeout_seconds=seconds,
                _request_timeout=(_SECONDS[0], seconds + 15),  # a connection may die without a word
            )
            for event in events:
                if event["type"] == "DELETED":
                    return
                yield event["object"]

    def workflow(self) -> Job | None:
        """An owner reference to Argo's Workflow, which the pod of this process belongs to.

        What the Workflow owns goes with it; it stays when the pod is evicted or its node is drained.
        """
        if not (pod := os.environ.get("KFP_POD_NAME")):
            return None
        with self._answering("get", "pods", missing_is_fine=True):
            found = self._core.read_namespaced_pod(pod, self.namespace, _request_timeout=_SECONDS)
            for owner in found.metadata.owner_references or []:
                if owner.controller:
                    known = {"apiVersion": owner.api_version, "kind": owner.kind, "name": owner.name, "uid": owner.uid}
                    return {**known, "controller": False, "blockOwnerDeletion": False}
        return None

    def is_under_way(self, owner: Job) -> bool:
        """Whether the workflow of an owner reference is there, has not ended, and was not terminated."""
        group, _, version = owner["apiVersion"].partition("/")
        at = {"group": group, "version": version, "plural": "workflows", "namespace": self.namespace}
        with self._answering("get", "workflows", missing_is_fine=True):
            found = self._custom.get_namespaced_custom_object(**at, name=owner["name"], _request_timeout=_SECONDS)
            spec, metadata = found.get("spec") or {}, found["metadata"]
            terminated = spec.get("activeDeadlineSeconds") == 0  # by Kubeflow; `shutdown` is Argo's own
            ended = (found.get("status") or {}).get("phase") in ("Succeeded", "Failed", "Error")
            leaving = terminated or spec.get("shutdown") or metadata.get("deletionTimestamp")
            return metadata.get("uid") == owner["uid"] and not ended and not leaving
        return False

    def adopt(self, job: Job, owners: list[Job]) -> None:
        """Set the owners of a job: it goes when the last has gone. NoAnswer if it has changed since it was read."""
        path = "/apis/{group}/{version}/namespaces/{namespace}/{plural}/".format(**self._at) + job["metadata"]["name"]
        version = job["metadata"].get("resourceVersion")  # another run may adopt it, too: neither must drop the other
        with self._answering("patch"):  # the client's own method sends a kind of patch that custom objects refuse
            self._client.call_api(
                path,
                "PATCH",
                header_params={"Content-Type": "application/merge-patch+json", "Accept": "application/json"},
                body={"metadata": {"ownerReferences": owners, "resourceVersion": version}},
                auth_settings=["BearerToken"],
                response_type="object",
                _return_http_data_only=True,
                _request_timeout=_SECONDS,
            )

    def delete(self, name: str, wait_for_pods: bool = True) -> None:
        """Delete a job, and, if asked to, the job only after its pods; it may be gone already."""
        from kubernetes import client

        with self._answering("delete", missing_is_fine=True):
            self._custom.delete_namespaced_custom_object(
                **self._at,
                name=name,
                body=client.V1DeleteOptions(propagation_policy="Foreground" if wait_for_pods else "Background"),
                _request_timeout=(5, 10),  # whoever stops has little time
            )

    def submitters(self, name: str) -> list[Any]:
        """Pods that have submitted a job or follow its log, oldest first."""
        with self._answering("list", "pods"):
            found = self._core.list_namespaced_pod(
                self.namespace, label_selector=f"job-name={name}", _request_timeout=_SECONDS
            )
            return sorted(found.items, key=lambda pod: pod.metadata.creation_timestamp)

    def log(self, pod: str, since_seconds: int | None) -> Iterator[str]:
        """Lines of a submitter's log as they come, each behind its time stamp."""
        limit = {} if since_seconds is None else {"since_seconds": since_seconds}
        with self._answering("get", "pods/log", missing_is_fine=True):
            lines = self._core.read_namespaced_pod_log(
                pod, self.namespace, container=SUBMITTER, follow=True, timestamps=True, **limit,
                _preload_content=False, _request_timeout=(_SECONDS[0], 60),
            )  # fmt: skip
            try:
                for line in lines:
                    yield line.decode("utf-8", "replace").rstrip("\r\n")
            finally:
                lines.close()

    def why_waiting(self, name: str, since: str = "") -> tuple[str, bool]:
        """What keeps a job's pods from running, and whether they would wait for ever; nothing known is ("", False).

        Args:
            name: of the job.
            since: when it was created; what was said before that was said of another job of this name.
        """
        mark = name.rpartition("-")[2]  # the digest in its name; operators shorten names from the left
        with self._answering("list", "pods"):
            pods = self._core.list_namespaced_pod(
                self.namespace, label_selector="ray.io/is-ray-node=yes", _request_timeout=_SECONDS
            ).items
        with self._answering("list", "events"):
            events = self._core.list_namespaced_event(
                self.namespace, field_selector="type=Warning", limit=500, _request_timeout=_SECONDS
            ).items
        about = [event for event in events if mark in (event.involved_object.name or "") and event.message]
        messages = _messages_since(about, since)
        for pod in pods:
            states = [*(pod.status.init_container_statuses or []), *(pod.status.container_statuses or [])]
            for waiting in [one.state.waiting for one in states if one.state and one.state.waiting]:
                if mark in pod.metadata.name and waiting.reason in _NO_IMAGE:
                    text = _short(f"{waiting.reason} in pod {pod.metadata.name}: {waiting.message or ''}")
                    told = [waiting.message or "", *(one for one in messages if "pull image" in one)]
                    return text, waiting.reason in _NEVER or any(_REFUSED.search(one) for one in told)
        if not messages:
            return "", False
        return _short(messages[-1]), "violates PodSecurity" in messages[-1] or _is_beyond_quota(messages[-1])

    @contextlib.contextmanager
    def _answering(self, verb: str, resource: str = "rayjobs", missing_is_fine: bool = False) -> Iterator[None]:
        """Errors of the API as ours, one line each."""
        import urllib3
        from kubernetes.client import ApiException

        what = f"{verb} {resource} in namespace {self.namespace}"
        try:
            yield
        except ApiException as error:
            said = " ".join(f"{error.status} {error.reason} {_message(error)}".split())[:300]
            if error.status == 404 and missing_is_fine:
                return
            if error.status == 409 and verb == "create":
                raise AlreadyExists from None
            if error.status in (401, 403):
                raise InputError(f"Kubernetes refuses to {what} ({said}): check Role {ROLE} and its binding") from None
            starting = error.status == 400 and resource == "pods/log"  # the container is not there yet
            if error.status and 400 <= error.status < 500 and error.status not in _LATER and not starting:
                raise InputError(
                    f"Kubernetes cannot {what} ({said}): check KubeRay's version and the settings"
                ) from None
            raise NoAnswer(said) from None
        except (urllib3.exceptions.HTTPError, ValueError, OSError) as error:  # also half a line of JSON
            raise NoAnswer(" ".join(str(error).split())[:300]) from None


def _messages_since(events: list[Any], since: str) -> list[str]:
    """What events say, the oldest first; of those that have a time, only from `since` on."""
    timed = [(str(one.last_timestamp or one.event_time or "").replace(" ", "T"), one.message) for one in events]
    new = [(at, message) for at, message in timed if not (at and since) or at[:19] >= since[:19]]
    return [message for _, message in sorted(new, key=lambda one: one[0])]


def _short(text: str) -> str:
    return " ".join(text.split())[:300]


def _is_beyond_quota(message: str) -> bool:
    """Whether a pod was refused that asks for more than its quota holds when it is empty."""
    from kubernetes.utils.quantity import parse_quantity

    if not (found := _QUOTA.search(message)):
        return False
    asked, limited = (dict(part.split("=", 1) for part in text.split(",") if "=" in part) for text in found.groups())
    with contextlib.suppress(ValueError):
        return any(parse_quantity(asked[what]) > parse_quantity(limited[what]) for what in asked if what in limited)
    return False


def _message(error: Any) -> str:
    """What the API server explains, out of the JSON that it answers with."""
    import json

    try:
        return str(json.loads(error.body)["message"])
    except (ValueError, KeyError, TypeError):
        return ""

"""Kubernetes API calls that launch and follow a RayJob. Every call has a time limit and raises one-line errors."""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from infoxlm_core.errors import InputError, one_line, shorten

Job = dict[str, Any]
"""A RayJob as the API describes it."""
OwnerReference = dict[str, Any]
"""An entry of an object's `ownerReferences`. Kubernetes deletes the object when its owner is deleted."""

ROLE = "infoxlm-runner"
SUBMITTER = "ray-job-submitter"
_SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")  # exists in a pod that may call the API
_TIMEOUT = (5, 30)  # seconds to connect, seconds to answer
_LOG_TIMEOUT = (5, 60)  # longer, because training may print nothing for a minute
_DELETION_TIMEOUT = (5, 10)  # shorter, because a process that is being stopped has little time
_TRANSIENT_STATUSES = (408, 409, 410, 429)  # timeout, conflict, expired version, too many requests
_RAYJOBS = {"group": "ray.io", "version": "v1", "plural": "rayjobs"}


class Unavailable(Exception):
    """The API server fails or does not answer. The same call may succeed later."""


class AlreadyExists(Exception):
    """An object with this name already exists."""


def connect() -> "RayJobs":
    """Connect to the RayJobs of this pod's namespace.

    Raises:
        InputError: this process does not run in a pod.
    """
    from kubernetes import client, config

    try:
        config.load_incluster_config()  # the client reads the token again before it expires
        namespace = (_SERVICE_ACCOUNT / "namespace").read_text().strip()
    except (config.ConfigException, OSError) as error:
        raise InputError(
            f"no access to Kubernetes ({error}): a step with `cluster` set needs a pod with service account {ROLE}"
        ) from None
    return RayJobs(client.ApiClient(), namespace)


class RayJobs:
    """The RayJobs of a namespace, and their workflows, pods, events and logs."""

    def __init__(self, api: Any, namespace: str) -> None:
        from kubernetes import client

        self.namespace = namespace
        self._rayjobs = {**_RAYJOBS, "namespace": namespace}
        self._client = api
        self._custom = client.CustomObjectsApi(api)
        self._core = client.CoreV1Api(api)

    def create(self, body: Job) -> None:
        """Create a job. Raise AlreadyExists if its name is taken."""
        body = {**body, "metadata": {**body["metadata"], "namespace": self.namespace}}
        with self._translate_errors("create"):
            self._custom.create_namespaced_custom_object(**self._rayjobs, body=body, _request_timeout=_TIMEOUT)

    def get(self, name: str) -> Job | None:
        """Return the current state of a job, or None if the job does not exist."""
        with self._translate_errors("get", ignore_missing=True):
            return self._custom.get_namespaced_custom_object(**self._rayjobs, name=name, _request_timeout=_TIMEOUT)
        return None

    def find_workflow(self) -> OwnerReference | None:
        """Return an owner reference to this step's Argo Workflow, or None outside a workflow.

        Kubernetes deletes a job with its workflow. The job survives this pod, for example if the pod's node is drained.
        """
        pod_name = os.environ.get("KFP_POD_NAME")
        if not pod_name:
            return None
        with self._translate_errors("get", "pods", ignore_missing=True):
            pod = self._core.read_namespaced_pod(pod_name, self.namespace, _request_timeout=_TIMEOUT)
            # Kubernetes allows an object at most one controller.
            controllers = [owner for owner in pod.metadata.owner_references or [] if owner.controller]
            if controllers:
                workflow = controllers[0]
                return {
                    "apiVersion": workflow.api_version,
                    "kind": workflow.kind,
                    "name": workflow.name,
                    "uid": workflow.uid,
                    "controller": False,  # the workflow does not manage the job
                    "blockOwnerDeletion": False,
                }
        return None

    def is_workflow_running(self, reference: OwnerReference) -> bool:
        """Return whether a workflow exists and has neither ended nor been stopped."""
        group, _, version = reference["apiVersion"].partition("/")
        workflows = {"group": group, "version": version, "plural": "workflows", "namespace": self.namespace}
        with self._translate_errors("get", "workflows", ignore_missing=True):
            workflow = self._custom.get_namespaced_custom_object(
                **workflows, name=reference["name"], _request_timeout=_TIMEOUT
            )
            metadata = workflow["metadata"]
            if metadata.get("uid") != reference["uid"]:  # a different workflow with the same name
                return False
            spec = workflow.get("spec") or {}
            has_ended = (workflow.get("status") or {}).get("phase") in ("Succeeded", "Failed", "Error")
            is_stopped_by_kubeflow = spec.get("activeDeadlineSeconds") == 0
            is_stopped_by_argo = bool(spec.get("shutdown"))
            is_deleted = bool(metadata.get("deletionTimestamp"))
            return not (has_ended or is_stopped_by_kubeflow or is_stopped_by_argo or is_deleted)
        return False

    def delete(self, name: str, propagation_policy: str = "Foreground") -> None:
        """Delete a job if it exists.

        Args:
            name: name of the job.
            propagation_policy: deletion mode. "Foreground" removes the job after its pods have ended and released
                their GPUs. "Background" removes the job at once.
        """
        from kubernetes import client

        options = client.V1DeleteOptions(propagation_policy=propagation_policy)
        with self._translate_errors("delete", ignore_missing=True):
            self._custom.delete_namespaced_custom_object(
                **self._rayjobs, name=name, body=options, _request_timeout=_DELETION_TIMEOUT
            )

    def list_submitters(self, name: str) -> list[Any]:
        """Return the submitter pods of a job, oldest first."""
        # KubeRay submits a RayJob through a Kubernetes Job of the same name, whose pods have this label.
        return sorted(self._list_labeled(f"job-name={name}"), key=lambda pod: pod.metadata.creation_timestamp)

    def read_log(self, pod: str, since_seconds: int | None) -> Iterator[str]:
        """Yield the lines of a submitter's log as they arrive, since `since_seconds` ago or (None) since the start."""
        start = {} if since_seconds is None else {"since_seconds": since_seconds}
        with self._translate_errors("get", "pods/log", ignore_missing=True):
            # Without `_preload_content=False`, the call would return only when the log ends.
            response = self._core.read_namespaced_pod_log(
                pod, self.namespace, container=SUBMITTER, follow=True, **start,
                _preload_content=False, _request_timeout=_LOG_TIMEOUT,
            )  # fmt: skip
            try:
                for line in response:
                    yield line.decode("utf-8", "replace").rstrip("\r\n")
            finally:
                response.close()

    def list_pods(self, name: str) -> list[Any]:
        """Return a job's pods: submitters, and the RayCluster's head and workers."""
        digest = name.rpartition("-")[2]  # remains in every pod name, because operators shorten names from the left
        ray_pods = [pod for pod in self._list_labeled("ray.io/is-ray-node=yes") if digest in pod.metadata.name]
        return self.list_submitters(name) + ray_pods

    def _list_labeled(self, label: str) -> list[Any]:
        """Return the namespace's pods that have a label, given as NAME=VALUE."""
        with self._translate_errors("list", "pods"):
            pods = self._core.list_namespaced_pod(self.namespace, label_selector=label, _request_timeout=_TIMEOUT)
            return list(pods.items)

    def list_warnings(self, name: str) -> list[Any]:
        """Return the Warning events of a job and its pods, among at most 500 of the namespace."""
        digest = name.rpartition("-")[2]  # part of every name: job, RayCluster and pods
        with self._translate_errors("list", "events"):
            events = self._core.list_namespaced_event(
                self.namespace, field_selector="type=Warning", limit=500, _request_timeout=_TIMEOUT
            )
            return [event for event in events.items if digest in (event.involved_object.name or "") and event.message]

    @contextlib.contextmanager
    def _translate_errors(self, verb: str, resource: str = "rayjobs", ignore_missing: bool = False) -> Iterator[None]:
        """Convert errors of the Kubernetes client to one-line errors.

        Args:
            verb: API verb, such as "get".
            resource: API resource, such as "pods".
            ignore_missing: whether to suppress the error if the object does not exist.

        Raises:
            AlreadyExists: the object to create already exists.
            InputError: Kubernetes refuses the call, so retrying would not help.
            Unavailable: Kubernetes does not answer or fails temporarily.
        """
        import urllib3
        from kubernetes.client import ApiException

        try:
            yield
        except ApiException as error:
            status = error.status or 0  # 0 if there was no HTTP response, for example after a TLS error
            if status == 404 and ignore_missing:
                return
            if status == 409 and verb == "create":
                raise AlreadyExists from None
            reason = shorten(f"{status} {error.reason} {_read_explanation(error)}")
            call = f"{verb} {resource} in namespace {self.namespace}"
            if status in (401, 403):
                remedy = f"check Role {ROLE} and its binding"
                raise InputError(f"Kubernetes refuses to {call} ({reason}): {remedy}") from None
            has_no_log_yet = status == 400 and resource == "pods/log"  # the container is still starting
            is_transient = status in _TRANSIENT_STATUSES or has_no_log_yet
            if 400 <= status < 500 and not is_transient:
                remedy = "check KubeRay's version and the settings"
                raise InputError(f"Kubernetes cannot {call} ({reason}): {remedy}") from None
            raise Unavailable(f"Kubernetes failed to {call} ({reason})") from None
        except (urllib3.exceptions.HTTPError, ValueError, OSError) as error:  # a truncated answer raises ValueError
            raise Unavailable(f"Kubernetes does not answer ({one_line(error)})") from None


def _read_explanation(error: Any) -> str:
    """Return the message in the JSON body of an API error."""
    try:
        return str(json.loads(error.body)["message"])
    except (ValueError, KeyError, TypeError):
        return ""

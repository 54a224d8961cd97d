"""The manifest of a RayJob: a head pod that runs the driver, worker pods, and a pod that submits the entrypoint.

All pods meet the Pod Security standard "restricted": no root, no Kubernetes token, and only scratch directories are
writable. To add a pod field, add a setting to components/settings/cluster.py and a line here.
"""

import hashlib
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from components.settings.cluster import ClusterConfig
from components.settings.environment import MLFLOW_SAFETY, RAY, is_login_for_other_server, is_secret, unprefixed_name
from infoxlm_core.errors import InputError

Manifest = dict[str, Any]

QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
USER = 10001  # user id of the image
HOME = "/home/app"

_CONSTANTS = {
    "HOME": HOME,
    "PYTHONUNBUFFERED": "1",
    "RAY_AUTH_MODE": "token",  # only these pods get the token from the operator
    **MLFLOW_SAFETY,
}
_JOB_MODULE = "components.platform.job"
_INHERITED_PREFIXES = ("INFOXLM_TRACKER", "MLFLOW_", "AWS_ENDPOINT_URL", "AWS_REGION", "AWS_DEFAULT_REGION")
_STEP_ONLY_PREFIXES = ("KFP_", "KUBERNETES_", "ARGO_")  # these variables identify the step's pod
_RAY_END_SECONDS = 15  # part of the grace period in which Ray itself shuts down
_SUBMITTER_VARIABLES = ("HOME", "RAY_AUTH_MODE", "RAY_USAGE_STATS_ENABLED")  # it reads neither the store nor MLflow
_SUBMITTER_RESOURCES = {
    "requests": {"cpu": "50m", "memory": "256Mi"},  # small, so that the job does not wait for this pod
    "limits": {"cpu": "1", "memory": "1Gi"},
}
_SCRATCH_DIRECTORIES = {"tmp": "/tmp", "home": HOME}  # noqa: S108 - a volume of the pod
"""Mapping from volume name to path of the writable directories of every pod. Each directory is an empty volume."""


def make_job_name(stem: str, store: str, key: str) -> str:
    """Return the name of an artifact's job, which is the same in every pipeline run.

    The name is a DNS-1035 label of at most 47 characters, KubeRay's limit.

    Args:
        stem: readable part of the name.
        store: URI of the artifact's store.
        key: kind and name of the artifact.
    """
    digest = hashlib.sha256(f"{store}/{key}".encode()).hexdigest()[:10]
    # The prefix is there because a label must begin with a letter.
    readable_name = re.sub(r"[^a-z0-9]+", "-", f"j-{stem}".lower())[:36].strip("-")
    return f"{readable_name}-{digest}"


def render(
    name: str,
    spec_url: str,
    cluster: ClusterConfig,
    num_workers: int,
    step_environment: Sequence[Mapping[str, Any]],
    ray_version: str,
    environment: Mapping[str, str] = os.environ,
) -> Manifest:
    """Return the manifest of a RayJob that runs `python -m components.platform.job SPEC_URL`.

    Args:
        name: name of the job, from `make_job_name`.
        spec_url: URL or path of the build spec, the only argument of the entrypoint.
        cluster: settings of the cluster's jobs.
        num_workers: number of training workers, one per GPU.
        step_environment: environment variables of the step's pod, in Kubernetes format.
        ray_version: version of Ray in this process and in the image.
        environment: environment variables of this process.

    Raises:
        InputError: the workers do not fill whole pods, or a shell would change `spec_url`.
    """
    if shlex.quote(spec_url) != spec_url:  # the submitter's and the head's shell parse the entrypoint
        raise InputError(f"{spec_url!r}: a store's name may contain only letters, digits and ./:_-@=+: choose another")
    pod_count, gpus_per_pod = cluster.pool.split_workers(num_workers)
    labels = {"app.kubernetes.io/name": "infoxlm"}
    if cluster.queue:
        labels[QUEUE_LABEL] = cluster.queue
    variables = _make_environment(cluster, step_environment, environment)
    # When the RayJob is deleted, KubeRay stops the job, and Ray kills the driver after this time.
    variables.append({"name": "RAY_JOB_STOP_WAIT_TIME_S", "value": _compute_saving_seconds(cluster)})
    workers = {
        "groupName": "workers",
        "replicas": pod_count,
        "minReplicas": pod_count,
        "maxReplicas": pod_count,
        "rayStartParams": {},
        "template": _make_worker_template(cluster, spec_url, variables, num_workers, gpus_per_pod),
    }
    ray_cluster = {
        "rayVersion": ray_version,
        "authOptions": {"mode": "token"},
        "headGroupSpec": {
            "rayStartParams": {"num-cpus": "0", "dashboard-host": "0.0.0.0"},  # noqa: S104 - the pod's; no training on it
            "template": _make_head_template(cluster, spec_url, variables),
        },
        "workerGroupSpecs": [workers],
    }
    spec = {
        "entrypoint": f"python -m {_JOB_MODULE} {spec_url}",
        "submissionMode": "K8sJobMode",
        # A retried submitter finds the running job. A head that replaces a lost head does not know the job, so the
        # submitter submits the job again. This is harmless: a training run holds a lease and resumes its checkpoint.
        "submitterConfig": {"backoffLimit": 10},
        "submitterPodTemplate": _make_submitter_template(cluster),
        "backoffLimit": 0,  # the launcher restarts the job, because it knows which errors are transient
        "preRunningDeadlineSeconds": cluster.start_seconds,
        "activeDeadlineSeconds": cluster.start_seconds + cluster.run_seconds,
        "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": 60,  # only needed if the launcher has died and cannot delete the job
        "rayClusterSpec": ray_cluster,
    }
    if cluster.queue:
        spec["suspend"] = True  # until Kueue admits the job
    metadata = {"name": name, "labels": labels}
    return {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": metadata, "spec": spec}


def _make_environment(
    cluster: ClusterConfig, step_environment: Sequence[Mapping[str, Any]], environment: Mapping[str, str]
) -> list[Manifest]:
    """Return the environment variables of the Ray pods.

    Sources in ascending precedence: this process, the manifest of the step's pod, defaults for Ray, the config,
    constants. As an exception, a prefixed variable of the step's pod does not replace a variable of this process.
    """
    variables: dict[str, Manifest] = {}
    for name, value in sorted(environment.items()):
        if name.startswith(_INHERITED_PREFIXES) and not is_secret(name):  # a manifest would expose a secret
            variables[name] = {"value": value}
    for variable in step_environment:
        name = unprefixed_name(variable["name"])
        if name.startswith(_STEP_ONLY_PREFIXES):
            continue
        # Our value has a prefix if Kubeflow may set the same variable. Kubeflow's value takes precedence, and our login
        # must not be sent to Kubeflow's MLflow server.
        has_prefix = name != variable["name"]
        if has_prefix and (name in variables or is_login_for_other_server(name, environment)):
            continue
        copied_value = _copy_value(variable, environment.get(name))
        if copied_value:
            variables[name] = copied_value
    for name, value in {**RAY, **cluster.environment, **_CONSTANTS}.items():
        variables[name] = {"value": value}
    return [{"name": name, **value} for name, value in variables.items()]


def _copy_value(variable: Mapping[str, Any], current_value: str | None) -> Manifest | None:
    """Return the value of an environment variable of the step's pod in a form that other pods can use.

    A reference to a secret is kept. A reference to a field of the step's pod is replaced by its value in this process,
    because every pod has its own fields. Return None if this process does not have the variable.
    """
    reference = variable.get("valueFrom")
    if not reference:
        return {"value": variable.get("value", "")}
    if "fieldRef" not in reference and "resourceFieldRef" not in reference:
        return {"valueFrom": reference}
    return None if current_value is None else {"value": current_value}


def _make_head_template(cluster: ClusterConfig, spec_url: str, variables: list[Manifest]) -> Manifest:
    """Return the pod template of the head, which runs the job's driver."""
    resources = _make_resources(cluster.head_cpu, cluster.head_memory)
    head = _make_ray_template(cluster, "ray-head", spec_url, resources, variables)
    head["spec"]["nodeSelector"] = cluster.head_node_selector
    return head


def _make_worker_template(
    cluster: ClusterConfig, spec_url: str, variables: list[Manifest], num_workers: int, gpus: int
) -> Manifest:
    """Return the pod template of the training workers, with `gpus` GPUs per pod."""
    pool = cluster.pool
    devices = {}
    if gpus:
        device_counts = {pool.accelerator: gpus, **cluster.devices}
        devices = {name: str(count) for name, count in device_counts.items()}
    resources = _make_resources(pool.cpu, pool.memory, **devices)
    worker = _make_ray_template(cluster, "ray-worker", spec_url, resources, variables, cluster.shared_memory)
    worker["spec"]["nodeSelector"] = pool.node_selector
    worker["spec"]["tolerations"] = [toleration.model_dump(exclude_none=True) for toleration in pool.tolerations]
    if 0 < cluster.min_workers < num_workers:
        # The other workers continue without an evicted worker, so its `preStop` hook must not ask them to stop.
        del worker["spec"]["containers"][0]["lifecycle"]
    return worker


def _make_ray_template(
    cluster: ClusterConfig,
    container: str,
    spec_url: str,
    resources: Manifest,
    variables: list[Manifest],
    shared_memory: str = "",
) -> Manifest:
    """Return the pod template of a head or worker, without node selector and tolerations.

    Args:
        cluster: settings of all Ray pods.
        container: name of the container.
        spec_url: URL of the build spec. The `preStop` hook passes the URL to a command that asks the training to save.
        resources: requests and limits of the container.
        variables: environment variables of the container.
        shared_memory: size of /dev/shm; by default the container's memory limit.
    """
    if cluster.disk:
        resources = {kind: {**amounts, "ephemeral-storage": cluster.disk} for kind, amounts in resources.items()}
    spec = _make_restricted_pod(cluster, container, resources, variables)
    spec["terminationGracePeriodSeconds"] = cluster.grace_seconds
    if cluster.priority_class:
        spec["priorityClassName"] = cluster.priority_class

    # Ray keeps its objects in /dev/shm, where a container has only 64 MiB by default.
    shared_memory = shared_memory or resources["limits"]["memory"]
    spec["volumes"].append({"name": "dev-shm", "emptyDir": {"medium": "Memory", "sizeLimit": shared_memory}})
    (ray_container,) = spec["containers"]
    ray_container["volumeMounts"].append({"name": "dev-shm", "mountPath": "/dev/shm"})  # noqa: S108 - a volume of the pod
    save_command = ["python", "-m", _JOB_MODULE, "--leave", spec_url, _compute_saving_seconds(cluster)]
    # If the pod is evicted or its node is drained, the training saves before the pod ends.
    ray_container["lifecycle"] = {"preStop": {"exec": {"command": save_command}}}
    if cluster.environment_from:
        ray_container["envFrom"] = [{"secretRef": {"name": name}} for name in cluster.environment_from]
    # KubeRay itself sets the label app.kubernetes.io/name to select the head.
    return {"metadata": {"labels": {"app.kubernetes.io/component": "training"}}, "spec": spec}


def _make_submitter_template(cluster: ClusterConfig) -> Manifest:
    """Return the template of the pod that submits the job and prints its log. The operator adds the command."""
    variables = [{"name": name, "value": (RAY | _CONSTANTS)[name]} for name in _SUBMITTER_VARIABLES]
    spec = _make_restricted_pod(cluster, "ray-job-submitter", _SUBMITTER_RESOURCES, variables)
    return {"metadata": {"labels": _make_labels("submitter")}, "spec": {**spec, "restartPolicy": "Never"}}


def _make_labels(component: str) -> dict[str, str]:
    """Return the labels of a pod."""
    return {
        "app.kubernetes.io/name": "infoxlm",
        "app.kubernetes.io/component": component,
        "sidecar.istio.io/inject": "false",  # a sidecar could not reach Istio and violates "restricted"
    }


def _make_resources(cpu: str, memory: str, **devices: str) -> dict[str, dict[str, str]]:
    """Return the resources of a container, with requests equal to limits."""
    amounts = {"cpu": cpu, "memory": memory, **devices}
    return {"limits": dict(amounts), "requests": dict(amounts)}


def _compute_saving_seconds(cluster: ClusterConfig) -> str:
    """Return how many seconds of the grace period the training has to save."""
    return str(max(cluster.grace_seconds - _RAY_END_SECONDS, 1))


def _make_restricted_pod(
    cluster: ClusterConfig, container: str, resources: Manifest, variables: list[Manifest]
) -> Manifest:
    """Return the spec of a pod with one container that meets the Pod Security standard "restricted".

    The pod has no token for the Kubernetes API, and only its scratch directories are writable.
    """
    return {
        "serviceAccountName": cluster.service_account,
        "automountServiceAccountToken": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "volumes": [{"name": name, "emptyDir": {}} for name in _SCRATCH_DIRECTORIES],
        "containers": [
            {
                "name": container,
                "image": cluster.image,
                "env": variables,
                "resources": resources,
                "securityContext": {
                    "allowPrivilegeEscalation": False,
                    "readOnlyRootFilesystem": True,
                    "capabilities": {"drop": ["ALL"]},
                },
                "volumeMounts": [{"name": name, "mountPath": path} for name, path in _SCRATCH_DIRECTORIES.items()],
            }
        ],
    }

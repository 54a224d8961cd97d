"""The RayJob of a training, as Kubernetes is asked for it: a head that steers, pods of GPUs that train, a submitter.

All three meet the Pod Security standard "restricted": no root, no rights, nothing writable but three scratch folders.
"""

import hashlib
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from components.settings.cluster import ClusterConfig
from components.settings.environment import MLFLOW_SAFETY, RAY, is_for_another, is_secret, usual_name
from infoxlm_core.errors import InputError

Manifest = dict[str, Any]

QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
USER = 10001  # of the image
HOME = "/home/app"

_CONSTANT = {
    "HOME": HOME,
    "PYTHONUNBUFFERED": "1",
    "RAY_AUTH_MODE": "token",  # nobody runs a job without the token, which the operator hands to these pods
    **MLFLOW_SAFETY,
}
_JOB = "components.platform.job"
_PASSED_ON = ("INFOXLM_TRACKER", "MLFLOW_", "AWS_ENDPOINT_URL", "AWS_REGION", "AWS_DEFAULT_REGION")
_OF_THE_STEP = ("KFP_", "KUBERNETES_", "ARGO_")
_AFTER_SAVING = 15  # of the grace, for Ray to end
_OF_SUBMITTER = ("HOME", "RAY_AUTH_MODE", "RAY_USAGE_STATS_ENABLED")
_SUBMITTER = {"cpu": "500m", "memory": "1Gi"}


def job_name(stem: str, store: str, key: str) -> str:
    """The name that whoever wants the same work finds again: at most 47 characters, a DNS-1035 label.

    Args:
        stem: what it is, for the reader's eye.
        store: where it is kept.
        key: what tells it from other work there; another pipeline run that wants the same has the same.
    """
    digest = hashlib.sha256(f"{store}/{key}".encode()).hexdigest()[:10]
    return re.sub(r"[^a-z0-9]+", "-", f"j-{stem}".lower())[:36].strip("-") + f"-{digest}"


def render(
    name: str,
    work: str,
    cluster: ClusterConfig,
    num_workers: int,
    step_environment: Sequence[Mapping[str, Any]],
    ray_version: str,
    environment: Mapping[str, str] = os.environ,
) -> Manifest:
    """The RayJob that runs `python -m components.platform.job WORK`.

    Args:
        name: of the job, by `job_name`.
        work: URL or path of the work, the entrypoint's only argument.
        cluster: where and how jobs run.
        num_workers: training workers, one a GPU.
        step_environment: environment variables of the step's pod, as Kubernetes describes them.
        ray_version: that of this process, which the image has too.
        environment: of this process.

    Raises:
        InputError: the workers do not fill whole pods, or a shell would change `work`.
    """
    if shlex.quote(work) != work:  # it passes through two shells, the submitter's and the head's
        raise InputError(f"{work!r}: a store's name has letters, digits and ./:_-@=+ only: choose another")
    pool = cluster.pool
    pods, gpus = pool.split(num_workers)
    variables = _environment(cluster, step_environment, environment)
    head = _pod(cluster, "ray-head", work, _both(cpu=cluster.head_cpu, memory=cluster.head_memory), variables)
    head["spec"]["nodeSelector"] = cluster.head_node_selector
    # whoever deletes the RayJob makes KubeRay stop the job first, and Ray kills a driver that has not ended by then
    head["spec"]["containers"][0]["env"].append({"name": "RAY_JOB_STOP_WAIT_TIME_S", "value": _saving(cluster)})
    devices = {pool.accelerator: gpus, **cluster.devices} if gpus else {}
    resources = _both(cpu=pool.cpu, memory=pool.memory, **{name: str(count) for name, count in devices.items()})
    worker = _pod(cluster, "ray-worker", work, resources, variables, cluster.shared_memory)
    worker["spec"]["nodeSelector"] = pool.node_selector
    worker["spec"]["tolerations"] = [toleration.model_dump(exclude_none=True) for toleration in pool.tolerations]
    if 0 < cluster.min_workers < num_workers:  # the others go on without it: it must not ask them to save and end
        del worker["spec"]["containers"][0]["lifecycle"]
    labels = {"app.kubernetes.io/name": "infoxlm", **({QUEUE_LABEL: cluster.queue} if cluster.queue else {})}
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "entrypoint": f"python -m {_JOB} {work}",
            "submissionMode": "K8sJobMode",
            # a retried submitter finds the job again; a head that was lost knows of none, and is given it anew, which
            # the lease makes harmless: the training is one, and goes on from its checkpoint
            "submitterConfig": {"backoffLimit": 10},
            "submitterPodTemplate": _submitter(cluster),
            "backoffLimit": 0,  # the launcher starts it again: it can tell "try again" from an error that stays
            "preRunningDeadlineSeconds": cluster.start_seconds,
            "activeDeadlineSeconds": cluster.start_seconds + cluster.run_seconds,
            "shutdownAfterJobFinishes": True,
            "ttlSecondsAfterFinished": 60,  # the launcher deletes the job when it ends; this is for one that is gone
            **({"suspend": True} if cluster.queue else {}),  # until Kueue admits it
            "rayClusterSpec": {
                "rayVersion": ray_version,
                "authOptions": {"mode": "token"},
                "headGroupSpec": {
                    "rayStartParams": {"num-cpus": "0", "dashboard-host": "0.0.0.0"},  # noqa: S104 - a pod's; no training worker there
                    "template": head,
                },
                "workerGroupSpecs": [
                    {
                        "groupName": "workers",
                        "replicas": pods,
                        "minReplicas": pods,
                        "maxReplicas": pods,
                        "rayStartParams": {},
                        "template": worker,
                    }
                ],
            },
        },
    }


def _both(**amounts: str) -> dict[str, dict[str, str]]:
    return {"limits": dict(amounts), "requests": dict(amounts)}


def _environment(
    cluster: ClusterConfig, step_environment: Sequence[Mapping[str, Any]], environment: Mapping[str, str]
) -> list[Manifest]:
    """Environment of the Ray pods: of this process what they need too, of the step, of the config, ours.

    What a field of the step's pod would be in another pod is replaced by what it is here. Secrets stay references:
    a value that might be one is not passed on.
    """
    known: dict[str, Manifest] = {}
    for name, value in sorted(environment.items()):
        if name.startswith(_PASSED_ON) and not is_secret(name):
            known[name] = {"value": value}
    for entry in step_environment:
        name, source = usual_name(entry["name"]), entry.get("valueFrom") or {}
        ours = name != entry["name"]  # Kubeflow's goes before it
        if name.startswith(_OF_THE_STEP) or (ours and (name in known or is_for_another(name, environment))):
            continue
        if "fieldRef" in source or "resourceFieldRef" in source:
            if name in environment:
                known[name] = {"value": environment[name]}
        else:
            known[name] = {"valueFrom": source} if source else {"value": entry.get("value", "")}
    for name, value in {**RAY, **cluster.environment, **_CONSTANT}.items():
        known[name] = {"value": value}
    return [{"name": name, **value} for name, value in known.items()]


def _pod(
    cluster: ClusterConfig,
    container: str,
    work: str,
    resources: Manifest,
    variables: list[Manifest],
    shared_memory: str = "",
) -> Manifest:
    """Template of the head's or a worker's pod."""
    scratch = _scratch()
    shared = "/dev/shm"  # noqa: S108 - a volume of the pod alone
    scratch["dev-shm"] = (shared, {"medium": "Memory", "sizeLimit": shared_memory or resources["limits"]["memory"]})
    if cluster.disk:
        resources = {kind: {**amounts, "ephemeral-storage": cluster.disk} for kind, amounts in resources.items()}
    spec = _restricted(cluster, container, resources, variables, scratch)
    spec["terminationGracePeriodSeconds"] = cluster.grace_seconds
    # evicted, deleted, or its node drained: save first
    leave = ["python", "-m", _JOB, "--leave", work, _saving(cluster)]
    spec["containers"][0]["lifecycle"] = {"preStop": {"exec": {"command": leave}}}
    if cluster.priority_class:
        spec["priorityClassName"] = cluster.priority_class
    if cluster.environment_from:
        spec["containers"][0]["envFrom"] = [{"secretRef": {"name": name}} for name in cluster.environment_from]
    # app.kubernetes.io/name is KubeRay's here: by it the service of the job finds the head
    return {"metadata": {"labels": {"app.kubernetes.io/component": "training"}}, "spec": spec}


def _saving(cluster: ClusterConfig) -> str:
    """Seconds of the grace in which the training may save."""
    return str(max(cluster.grace_seconds - _AFTER_SAVING, 1))


def _submitter(cluster: ClusterConfig) -> Manifest:
    """Template of the pod that submits the entrypoint to the head and prints its log; the operator adds the command."""
    spec = _restricted(
        cluster, "ray-job-submitter", {"limits": dict(_SUBMITTER), "requests": dict(_SUBMITTER)},
        [{"name": name, "value": (RAY | _CONSTANT)[name]} for name in _OF_SUBMITTER],
        _scratch(),
    )  # fmt: skip
    return {"metadata": {"labels": _labels("submitter")}, "spec": {**spec, "restartPolicy": "Never"}}


def _labels(component: str) -> dict[str, str]:
    labels = {"app.kubernetes.io/name": "infoxlm", "app.kubernetes.io/component": component}
    return labels | {"sidecar.istio.io/inject": "false"}  # it could not reach its control plane, nor is it restricted


def _scratch() -> dict[str, tuple[str, Manifest]]:
    """Volume -> where it is mounted, what it is: the folders in which a pod may write."""
    return {"tmp": ("/tmp", {}), "home": (HOME, {})}  # noqa: S108 - a volume of the pod alone


def _restricted(
    cluster: ClusterConfig,
    container: str,
    resources: Manifest,
    variables: list[Manifest],
    scratch: dict[str, tuple[str, Manifest]],
) -> Manifest:
    """A pod of one container that meets "restricted" and has no access to the Kubernetes API."""
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
        "volumes": [{"name": name, "emptyDir": kind} for name, (_, kind) in scratch.items()],
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
                "volumeMounts": [{"name": name, "mountPath": path} for name, (path, _) in scratch.items()],
            }
        ],
    }

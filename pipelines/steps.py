"""Settings of steps on a cluster: image, environment, resources, retries. A local run ignores them.

A compiled pipeline has constant resources, and `submit.read_for` replaces them by those of the cluster file. They are
not parameters, because Kubeflow 2.17 silently drops the GPUs of a pod if their number is a parameter.
"""

import functools
import inspect
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from kfp import dsl, kubernetes
from kfp.dsl import pipeline_task

from components.settings.cluster import Pool, Steps
from components.settings.environment import REGISTRY_VARIABLES, prefixed_name

# Each time a task is configured, KFP reads the source files of all callers to name one in an error message. Without
# their source lines, building a pipeline is 2 times faster, and 10 times faster if torch is imported.
pipeline_task.inspect = SimpleNamespace(stack=functools.partial(inspect.stack, context=0))

ENVIRONMENT = "infoxlm-environment"
"""Name of the ConfigMap with the addresses of S3 and MLflow."""
STORE_KEYS, MLFLOW_LOGIN, REGISTRY_LOGIN = "infoxlm-store", "infoxlm-mlflow", "infoxlm-registry"
"""Names of optional Secrets; pods with a web identity need none of them."""

_SETTINGS = (
    *("AWS_ENDPOINT_URL", "AWS_DEFAULT_REGION", "AWS_CA_BUNDLE", "MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"),
    *("INFOXLM_TRACKER", "INFOXLM_SIGNING_KEY", "INFOXLM_VERIFYING_KEY", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"),
    "INFOXLM_MLFLOW_PAGES",
)


LONGEST = 30 * 86_400
"""Limit on the run time of a pipeline, in seconds."""
_WEEK = 7 * 86_400
LIMITS = dsl.PipelineConfig(
    active_deadline_seconds=LONGEST,
    ttl_seconds_after_finished=_WEEK,
    # Kubeflow's default of an hour for these two would override the line above
    ttl_seconds_after_success=_WEEK,
    ttl_seconds_after_failure=_WEEK,
)
"""When Kubeflow terminates a run, and when it deletes the pods of a finished run. Results are kept after both."""


def configure(image: Any, steps: Mapping[str, dsl.PipelineTask]) -> None:
    """Set the display name, image, environment, user and retries of each step.

    The environment is not part of KFP's cache key, because it does not change results.

    Args:
        image: container image, or the pipeline parameter that names it.
        steps: maps display names to steps.
    """
    for name, task in steps.items():
        task.set_display_name(name).set_container_image(image)
        kubernetes.use_field_path_as_env(task, "RUN_ID", "metadata.labels['pipeline/runid']")
        kubernetes.use_field_path_as_env(task, "SERVICE_ACCOUNT", "spec.serviceAccountName")
        variables = {name: prefixed_name(name) for name in _SETTINGS}
        kubernetes.use_config_map_as_env(task, ENVIRONMENT, variables, optional=True)
        _use(task, STORE_KEYS, "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
        _use(task, MLFLOW_LOGIN, "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD")
        kubernetes.set_security_context(task, run_as_user=10001, run_as_group=10001, run_as_non_root=True)
        # Argo stops retrying this long after the start of the first attempt; the default is an hour
        task.set_retry(2, backoff_duration="60s", backoff_factor=2.0, backoff_max_duration=f"{LONGEST}s")


def trust(*tasks: dsl.PipelineTask) -> None:
    """Give steps the MLflow account that may register and promote, and the signing keys, if they exist."""
    for task in tasks:
        kubernetes.use_secret_as_env(task, REGISTRY_LOGIN, REGISTRY_VARIABLES, optional=True)
        for name in ("signing", "verifying"):
            kubernetes.use_secret_as_volume(task, f"infoxlm-{name}", mount_path=f"/etc/infoxlm/{name}", optional=True)


def size(*tasks: dsl.PipelineTask) -> None:
    """Request the default CPU and memory for steps that process data; other steps get the namespace's defaults."""
    for task in tasks:
        _request(task, Steps())


def give_gpus(task: dsl.PipelineTask) -> None:
    """Request the default pool's GPUs, CPU and memory for a step that trains in its own pod."""
    pool = Pool()
    _request(task, pool)
    task.set_accelerator_type(pool.accelerator).set_accelerator_limit(pool.gpus)
    # NCCL needs a /dev/shm of more than the usual 64 MB
    kubernetes.empty_dir_mount(task, "dev-shm", "/dev/shm", medium="Memory", size_limit="8Gi")  # noqa: S108 - the pod's own


def _request(task: dsl.PipelineTask, amounts: Pool | Steps) -> None:
    task.set_cpu_request(amounts.cpu).set_cpu_limit(amounts.cpu)
    task.set_memory_request(amounts.memory).set_memory_limit(amounts.memory)


def _use(task: dsl.PipelineTask, secret: str, *names: str) -> None:
    kubernetes.use_secret_as_env(task, secret, {name: prefixed_name(name) for name in names}, optional=True)

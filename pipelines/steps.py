"""Settings of steps on a cluster: image, environment, resources, retries. A local run ignores these settings.

A compiled pipeline has constant resources. `submit.read_compiled_for_cluster` replaces them with the cluster file's
resources. They are not parameters, because Kubeflow 2.17 silently drops a pod's GPUs if their number is a parameter.
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

# KFP reads the source files of all callers for each setting of a task, only to name a line in an error message. Without
# source lines, building a pipeline is 2 times faster, and 10 times faster if torch is imported.
pipeline_task.inspect = SimpleNamespace(stack=functools.partial(inspect.stack, context=0))

ENVIRONMENT = "infoxlm-environment"
"""Name of the ConfigMap with the S3 and MLflow addresses."""
# Names of optional Secrets, which pods with a web identity do not need.
STORE_KEYS = "infoxlm-store"
MLFLOW_LOGIN = "infoxlm-mlflow"
REGISTRY_LOGIN = "infoxlm-registry"

# Keys of the ConfigMap, which become environment variables.
_CONFIG_VARIABLES = (
    "AWS_ENDPOINT_URL",
    "AWS_DEFAULT_REGION",
    "AWS_CA_BUNDLE",
    "MLFLOW_TRACKING_URI",
    "MLFLOW_EXPERIMENT_NAME",
    "INFOXLM_TRACKER",
    "INFOXLM_SIGNING_KEY",
    "INFOXLM_VERIFYING_KEY",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "NO_PROXY",
    "INFOXLM_MLFLOW_PAGES",
)

PARALLEL_TRIALS = 2
"""Number of trials (or batches of trials) that a sweep runs at the same time."""
MAX_RUN_SECONDS = 30 * 86_400
"""Limit on a pipeline's run time."""
_WEEK_SECONDS = 7 * 86_400
LIMITS = dsl.PipelineConfig(
    active_deadline_seconds=MAX_RUN_SECONDS,
    ttl_seconds_after_finished=_WEEK_SECONDS,
    # The defaults of these two fields, an hour, would override the line above.
    ttl_seconds_after_success=_WEEK_SECONDS,
    ttl_seconds_after_failure=_WEEK_SECONDS,
)
"""Limits after which Kubeflow terminates a run or deletes a finished run's pods. The results are kept."""


def configure_steps(image: Any, steps: Mapping[str, dsl.PipelineTask]) -> None:
    """Set the display name, image, environment, user and retries of each step.

    KFP's cache ignores environment variables. Ours do not change results, so cached results stay valid.

    Args:
        image: container image, or a pipeline parameter with its name.
        steps: mapping from display name to step.
    """
    for name, task in steps.items():
        task.set_display_name(name).set_container_image(image)
        # A step stores its outcome under the run's id, and a promotion records the account that promoted.
        kubernetes.use_field_path_as_env(task, "RUN_ID", "metadata.labels['pipeline/runid']")
        kubernetes.use_field_path_as_env(task, "SERVICE_ACCOUNT", "spec.serviceAccountName")
        # Kubeflow may set some of the same variables; `apply_prefixed_variables` decides between the two in the pod.
        variables = {key: prefixed_name(key) for key in _CONFIG_VARIABLES}
        kubernetes.use_config_map_as_env(task, ENVIRONMENT, variables, optional=True)
        _use_secret(task, STORE_KEYS, "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
        _use_secret(task, MLFLOW_LOGIN, "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD")
        # Set the image's user by number, because Kubernetes cannot verify that a user name is not root.
        kubernetes.set_security_context(task, run_as_user=10001, run_as_group=10001, run_as_non_root=True)
        # Argo retries only within `backoff_max_duration` of the first attempt; the default is an hour.
        task.set_retry(2, backoff_duration="60s", backoff_factor=2.0, backoff_max_duration=f"{MAX_RUN_SECONDS}s")


def disable_cache(*tasks: dsl.PipelineTask) -> None:
    """Make Kubeflow run these steps even if their inputs have not changed."""
    for task in tasks:
        task.set_caching_options(False)


def give_registry_access(*tasks: dsl.PipelineTask) -> None:
    """Give steps the MLflow account for registering and promoting, and the signing keys, if the Secrets exist.

    All other steps have only the MLflow account of trainings and no keys.
    """
    for task in tasks:
        kubernetes.use_secret_as_env(task, REGISTRY_LOGIN, REGISTRY_VARIABLES, optional=True)
        for name in ("signing", "verifying"):
            kubernetes.use_secret_as_volume(task, f"infoxlm-{name}", mount_path=f"/etc/infoxlm/{name}", optional=True)


def request_default_resources(*tasks: dsl.PipelineTask) -> None:
    """Request the default CPU and memory for steps that process data. Other steps get the namespace's defaults."""
    for task in tasks:  # `submit.read_compiled_for_cluster` replaces the defaults with the cluster file's values
        _request_cpu_and_memory(task, Steps())


def give_gpus(task: dsl.PipelineTask) -> None:
    """Request the default pool's GPUs, CPU and memory for a step that trains in its own pod."""
    pool = Pool()
    _request_cpu_and_memory(task, pool)
    task.set_accelerator_type(pool.accelerator).set_accelerator_limit(pool.gpus)
    # NCCL needs more shared memory than the usual 64 MB.
    kubernetes.empty_dir_mount(task, "dev-shm", "/dev/shm", medium="Memory", size_limit="8Gi")  # noqa: S108 - the pod's own


def _request_cpu_and_memory(task: dsl.PipelineTask, amounts: Pool | Steps) -> None:
    task.set_cpu_request(amounts.cpu).set_cpu_limit(amounts.cpu)
    task.set_memory_request(amounts.memory).set_memory_limit(amounts.memory)


def _use_secret(task: dsl.PipelineTask, secret: str, *keys: str) -> None:
    """Set an environment variable from each key of an optional Secret."""
    variables = {key: prefixed_name(key) for key in keys}
    kubernetes.use_secret_as_env(task, secret, variables, optional=True)

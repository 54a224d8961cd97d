"""Environment variables of Ray and MLflow, on this machine and in pods, and which variables hold secrets."""

import os
import re
from collections.abc import Mapping, MutableMapping
from pathlib import Path

ALLOCATOR = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
"""For all training processes, because batches of different sizes would fragment the GPU memory."""
RAY = {
    **ALLOCATOR,
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_COLOR_PREFIX": "0",  # escape codes are unreadable in the log of a pod
    "RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S": "300",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "1800",  # a new node may take long to start; the default is a minute
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "THP_MEM_ALLOC_ENABLE": "1",  # huge pages for large tensors
}
"""Defaults for all processes that start or join Ray."""
MLFLOW_SAFETY = {"MLFLOW_ALLOW_PICKLE_DESERIALIZATION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
"""For all processes that use MLflow; users cannot override these values."""
MLFLOW = {
    **MLFLOW_SAFETY,
    "HF_HUB_OFFLINE": "1",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3",  # about 15 s if the server is down; the default of 7 takes 4 minutes
    "MLFLOW_SKIP_PIP_REQUIREMENTS_CHECK": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
"""For all processes that use MLflow."""

OF_KUBEFLOW = (
    *("MLFLOW_TRACKING_URI", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD"),
    *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"),
)
"""Variables that Kubeflow may set in a step, by its MLflow plugin or because its API server uses a proxy.

A pod with two entries of one name is invalid, so our values have the prefix INFOXLM_ until the step starts.
"""
_LOGIN = ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD")
_OURS = "INFOXLM_"
OF_REGISTRY = {
    "MLFLOW_TRACKING_USERNAME": "INFOXLM_REGISTRY_USERNAME",
    "MLFLOW_TRACKING_PASSWORD": "INFOXLM_REGISTRY_PASSWORD",
}
"""Maps MLflow's login variables to those of the account that may register and promote.

In the two steps that do so, this account replaces any other.
"""

_SECRET = re.compile(r"SECRET|TOKEN|PASSWORD|ACCESS_KEY|CREDENTIAL", re.IGNORECASE)


def cache() -> Path:
    """Return the directory for local copies on this machine."""
    default = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "infoxlm"
    return Path(os.environ.get("INFOXLM_CACHE") or default).absolute()


def is_secret(variable: str) -> bool:
    """Return whether the name suggests a secret, which must not be written into a manifest."""
    return bool(_SECRET.search(variable))


def own_name(variable: str) -> str:
    """Return the name of a variable in the pod of a step, before `take_ours` renames it."""
    return _OURS + variable if variable in OF_KUBEFLOW else variable


def usual_name(variable: str) -> str:
    """Return the original name of a variable: the inverse of `own_name`."""
    bare = variable.removeprefix(_OURS)
    return bare if bare in OF_KUBEFLOW else variable


def is_for_another(variable: str, environment: Mapping[str, str]) -> bool:
    """Return whether the variable is a login, and Kubeflow's plugin set another MLflow server than ours."""
    ours, theirs = environment.get(own_name("MLFLOW_TRACKING_URI")), environment.get("MLFLOW_TRACKING_URI")
    return variable in _LOGIN and bool(ours and theirs) and str(ours).rstrip("/") != str(theirs).rstrip("/")


def take_ours(environment: MutableMapping[str, str]) -> None:
    """Rename our prefixed variables unless Kubeflow set them; never pass our login to another server."""
    for variable, of_registry in OF_REGISTRY.items():
        if (value := environment.get(of_registry)) and not is_for_another(variable, environment):
            environment[variable] = value
    for variable in OF_KUBEFLOW:
        if (value := environment.get(own_name(variable))) and not is_for_another(variable, environment):
            environment.setdefault(variable, value)

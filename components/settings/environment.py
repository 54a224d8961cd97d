"""Environment variables of Ray and MLflow, on this machine and in pods, and which variables hold secrets."""

import os
import re
from collections.abc import Mapping, MutableMapping
from pathlib import Path

ALLOCATOR = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
"""For all processes that train: batches differ in size, which would fragment the memory of a GPU."""
RAY = {
    **ALLOCATOR,
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S": "300",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "1800",  # a new node may take long to come; the default is a minute
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "THP_MEM_ALLOC_ENABLE": "1",  # large pages for large tensors
}
"""For all processes that start or join Ray, unless the user sets other values."""
MLFLOW_SAFETY = {"MLFLOW_ALLOW_PICKLE_DESERIALIZATION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
"""For all processes that use MLflow; users cannot override these values."""
MLFLOW = {
    **MLFLOW_SAFETY,
    "HF_HUB_OFFLINE": "1",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3",  # some 15 s of a server that is gone; the default of 7 means four minutes
    "MLFLOW_SKIP_PIP_REQUIREMENTS_CHECK": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
"""For all processes that use MLflow."""

OF_KUBEFLOW = (
    *("MLFLOW_TRACKING_URI", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD"),
    *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"),
)
"""Variables that Kubeflow itself sets in a step, by its MLflow plugin or because its API server uses a proxy.

A second entry of the same name would make the pod invalid, so our values have a prefix until the step begins."""
_LOGIN = ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD")
_OURS = "INFOXLM_"
OF_REGISTRY = {
    "MLFLOW_TRACKING_USERNAME": "INFOXLM_REGISTRY_USERNAME",
    "MLFLOW_TRACKING_PASSWORD": "INFOXLM_REGISTRY_PASSWORD",
}
"""The account that may register and promote. In the two steps that do so, it replaces any other account."""

_SECRET = re.compile(r"SECRET|TOKEN|PASSWORD|ACCESS_KEY|CREDENTIAL", re.IGNORECASE)


def cache() -> Path:
    """Return the directory of this machine for local copies."""
    default = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "infoxlm"
    return Path(os.environ.get("INFOXLM_CACHE") or default).absolute()


def is_secret(variable: str) -> bool:
    """Return whether a variable of this name holds a secret, which must not stand in a manifest."""
    return bool(_SECRET.search(variable))


def own_name(variable: str) -> str:
    """Return the name that a variable has in the pod of a step until `take_ours`."""
    return _OURS + variable if variable in OF_KUBEFLOW else variable


def usual_name(variable: str) -> str:
    """Return the usual name of a variable that `own_name` has renamed."""
    bare = variable.removeprefix(_OURS)
    return bare if bare in OF_KUBEFLOW else variable


def is_for_another(variable: str, environment: Mapping[str, str]) -> bool:
    """Return whether our value is a login for another MLflow than the one that Kubeflow's plugin has set."""
    ours, theirs = environment.get(own_name("MLFLOW_TRACKING_URI")), environment.get("MLFLOW_TRACKING_URI")
    return variable in _LOGIN and bool(ours and theirs) and str(ours).rstrip("/") != str(theirs).rstrip("/")


def take_ours(environment: MutableMapping[str, str]) -> None:
    """Give our values their usual names where Kubeflow has set none; never send a password to another server."""
    for variable, of_registry in OF_REGISTRY.items():
        if (value := environment.get(of_registry)) and not is_for_another(variable, environment):
            environment[variable] = value
    for variable in OF_KUBEFLOW:
        if (value := environment.get(own_name(variable))) and not is_for_another(variable, environment):
            environment.setdefault(variable, value)

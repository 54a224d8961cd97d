"""Environment variables for Ray and MLflow on this machine and in pods. Detection of secrets by variable name."""

import os
import re
from collections.abc import Mapping, MutableMapping
from pathlib import Path

ALLOCATOR = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
"""Variables for all training processes. Without them, batches of different sizes would fragment the GPU memory."""
RAY = {
    **ALLOCATOR,
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_COLOR_PREFIX": "0",  # escape codes are unreadable in the log of a pod
    "RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S": "300",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "1800",  # a new node starts slowly; the default is a minute
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # keep CUDA_VISIBLE_DEVICES in processes that reserve no GPU
    "THP_MEM_ALLOC_ENABLE": "1",  # huge pages for large tensors
}
"""Defaults for all processes that start or join Ray."""
MLFLOW_SAFETY = {"MLFLOW_ALLOW_PICKLE_DESERIALIZATION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
"""Variables for all processes that use MLflow. Users cannot override them."""
MLFLOW = {
    **MLFLOW_SAFETY,
    "HF_HUB_OFFLINE": "1",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3",  # about 15 s if the server is down; the default of 7 takes 4 minutes
    "MLFLOW_SKIP_PIP_REQUIREMENTS_CHECK": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
"""Variables for all processes that use MLflow."""

_LOGIN = ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD")
SHARED_WITH_KUBEFLOW = ("MLFLOW_TRACKING_URI", *_LOGIN, "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
"""Variables that Kubeflow may set in a step. Its MLflow plugin sets the server and login, its API server the proxy.

A pod must not set a variable twice. Our own values therefore have the prefix INFOXLM_ until the step starts.
"""
_PREFIX = "INFOXLM_"
REGISTRY_VARIABLES = {
    "MLFLOW_TRACKING_USERNAME": "INFOXLM_REGISTRY_USERNAME",
    "MLFLOW_TRACKING_PASSWORD": "INFOXLM_REGISTRY_PASSWORD",
}
"""Mapping from MLflow's login variables to the variables of the account that may register and promote models.

Only the steps `register` and `promote` have this account. There it replaces any other account.
"""

_SECRET = re.compile(r"SECRET|TOKEN|PASSWORD|ACCESS_KEY|CREDENTIAL", re.IGNORECASE)


def cache() -> Path:
    """Return this machine's cache directory for copies of stores and for wheels."""
    default = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "infoxlm"
    return Path(os.environ.get("INFOXLM_CACHE") or default).absolute()


def is_secret(variable: str) -> bool:
    """Return whether a variable's name suggests a secret, which must not be written to a manifest."""
    return bool(_SECRET.search(variable))


def prefixed_name(variable: str) -> str:
    """Return a variable's name in a step's pod before `apply_prefixed_variables` renames the variable."""
    return _PREFIX + variable if variable in SHARED_WITH_KUBEFLOW else variable


def unprefixed_name(variable: str) -> str:
    """Return a variable's original name. This is the inverse of `prefixed_name`."""
    original = variable.removeprefix(_PREFIX)
    return original if original in SHARED_WITH_KUBEFLOW else variable


def is_login_for_other_server(variable: str, environment: Mapping[str, str]) -> bool:
    """Return whether a variable would send our login to a different MLflow server, set by Kubeflow's plugin."""
    our_server = environment.get(prefixed_name("MLFLOW_TRACKING_URI"), "").rstrip("/")
    plugin_server = environment.get("MLFLOW_TRACKING_URI", "").rstrip("/")
    return variable in _LOGIN and bool(our_server and plugin_server) and our_server != plugin_server


def apply_prefixed_variables(environment: MutableMapping[str, str]) -> None:
    """Copy our prefixed variables to their original names, unless Kubeflow has already set these names.

    The account in `REGISTRY_VARIABLES` replaces any other. No login is copied if Kubeflow has set a different server.

    Args:
        environment: environment variables of this process, changed in place.
    """
    for variable, registry_variable in REGISTRY_VARIABLES.items():
        account_value = environment.get(registry_variable)
        if account_value and not is_login_for_other_server(variable, environment):
            environment[variable] = account_value
    for variable in SHARED_WITH_KUBEFLOW:
        our_value = environment.get(prefixed_name(variable))
        if our_value and not is_login_for_other_server(variable, environment):
            environment.setdefault(variable, our_value)

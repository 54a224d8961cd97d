"""Environment variables that we set for Ray and MLflow, on this machine and in pods; and which ones are secrets."""

import os
import re
from collections.abc import Mapping, MutableMapping
from pathlib import Path

ALLOCATOR = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
"""Of all processes that train: batches change in size, and gaps between blocks would stay empty on a GPU."""
RAY = {
    **ALLOCATOR,
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S": "300",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "1800",  # a new node may take long to come; the default is a minute
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "THP_MEM_ALLOC_ENABLE": "1",  # large pages for large tensors
}
"""Of all processes that start or join Ray, unless the user sets them otherwise."""
MLFLOW_SAFETY = {"MLFLOW_ALLOW_PICKLE_DESERIALIZATION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
"""Nobody may override these."""
MLFLOW = {
    **MLFLOW_SAFETY,
    "HF_HUB_OFFLINE": "1",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3",  # some 15 s of a server that is gone; the default of 7 means four minutes
    "MLFLOW_SKIP_PIP_REQUIREMENTS_CHECK": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
"""Of all processes that speak to MLflow."""

OF_KUBEFLOW = (
    *("MLFLOW_TRACKING_URI", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD"),
    *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"),
)
"""What Kubeflow itself sets in a step, by its MLflow plugin or as its API server has a proxy. It looks for no entry
of the same name: with one of ours beside it the pod is invalid. So ours has a prefix until the step begins."""
_LOGIN = ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD")
_OURS = "INFOXLM_"
OF_REGISTRY = {
    "MLFLOW_TRACKING_USERNAME": "INFOXLM_REGISTRY_USERNAME",
    "MLFLOW_TRACKING_PASSWORD": "INFOXLM_REGISTRY_PASSWORD",
}
"""The account that may register and promote, in the two steps that do; there it goes before any other."""

_SECRET = re.compile(r"SECRET|TOKEN|PASSWORD|ACCESS_KEY|CREDENTIAL", re.IGNORECASE)


def cache() -> Path:
    """Where this machine keeps copies of what is elsewhere."""
    own = os.environ.get("INFOXLM_CACHE")
    return Path(own or Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "infoxlm").absolute()


def is_secret(variable: str) -> bool:
    """Whether an environment variable of this name holds what must not stand in a manifest."""
    return bool(_SECRET.search(variable))


def own_name(variable: str) -> str:
    """The name under which a step's pod is given a variable."""
    return _OURS + variable if variable in OF_KUBEFLOW else variable


def usual_name(variable: str) -> str:
    """The name under which everybody reads what `own_name` has named."""
    bare = variable.removeprefix(_OURS)
    return bare if bare in OF_KUBEFLOW else variable


def is_for_another(variable: str, environment: Mapping[str, str]) -> bool:
    """Whether a value of ours is the login of an MLflow that is not the one which Kubeflow has given the step."""
    ours, theirs = environment.get(own_name("MLFLOW_TRACKING_URI")), environment.get("MLFLOW_TRACKING_URI")
    return variable in _LOGIN and bool(ours and theirs) and str(ours).rstrip("/") != str(theirs).rstrip("/")


def take_ours(environment: MutableMapping[str, str]) -> None:
    """Give our values their usual names, where Kubeflow has not set any; a password goes to no server but its own."""
    for variable, of_registry in OF_REGISTRY.items():
        if (value := environment.get(of_registry)) and not is_for_another(variable, environment):
            environment[variable] = value
    for variable in OF_KUBEFLOW:
        if (value := environment.get(own_name(variable))) and not is_for_another(variable, environment):
            environment.setdefault(variable, value)

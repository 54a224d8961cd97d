"""Create an MLflow user and grant the user permissions. Steps read the user's password from a Secret.

    python -m components.adapters.mlflow.user [--may read|train|promote|register --experiment infoxlm --model infoxlm]

MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD are the new user's name and password. This command itself logs in
as `admin`, with the password in MLFLOW_AUTH_ADMIN_PASSWORD. For an existing user, it updates the password. Users have
all permissions on their own experiments and models. `--may` grants permissions on others, by name or * for all.
"""

import argparse
import os
import sys
from typing import TYPE_CHECKING

from components.adapters.mlflow.errors import ignore_error, translate_errors
from components.settings import environment
from infoxlm_core.errors import InfoXLMError, InputError

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.server.auth.client import AuthServiceClient

PERMISSIONS = {
    "read": ("READ", "READ"),
    "train": ("EDIT", "READ"),
    "promote": ("EDIT", "EDIT"),
    "register": ("EDIT", "MANAGE"),
}
"""Mapping from --may to MLflow's permissions for (experiments, registered models).

`promote` may edit experiments, because it records its decision in the version's run. `register` may manage models,
because it deletes the duplicate version that a repeated request creates.
"""
_ADMIN_VARIABLE = "MLFLOW_AUTH_ADMIN_PASSWORD"


def create_user(server: str, user: str, password: str) -> None:
    """Create a user, or set the password of an existing user.

    MLFLOW_TRACKING_USERNAME must name an administrator.

    Raises:
        InputError: MLflow refuses.
        StorageUnavailable: MLflow does not answer.
    """
    client = _make_client(server)
    with translate_errors(f"{server}: user {user}", _ADMIN_VARIABLE):
        with ignore_error("RESOURCE_ALREADY_EXISTS"):
            client.create_user(user, password)
            return
        client.update_user_password(user, password)  # the user exists


def grant_access(server: str, user: str, experiment: str, model: str, access: str) -> None:
    """Grant a user permissions on an experiment and on a registered model.

    MLFLOW_TRACKING_USERNAME must name an administrator.

    Args:
        server: MLflow's URL.
        user: name of the user.
        experiment: name of the experiment, or `*` for all experiments.
        model: name of the registered model, or `*` for all models.
        access: key of `PERMISSIONS`.

    Raises:
        InputError: MLflow refuses, or the experiment does not exist.
        StorageUnavailable: MLflow does not answer.
    """
    from mlflow import MlflowClient

    registry = MlflowClient(server)
    experiment_permission, model_permission = PERMISSIONS[access]
    with translate_errors(f"{server}: permissions of {user}", _ADMIN_VARIABLE):
        experiment_id = _find_experiment(registry, server, experiment)
        if access == "register" and model != "*":
            # Create the model as administrator. Otherwise, the first registration would create it, and its creator
            # would have all permissions on it.
            with ignore_error("RESOURCE_ALREADY_EXISTS"):
                registry.create_registered_model(model)
        _grant(server, user, "experiment", experiment_id, experiment_permission)
        _grant(server, user, "registered_model", model, model_permission)
        if experiment_permission == "EDIT" and experiment_id == "*":
            # If the answer to a request is lost, MLflow's client creates a pipeline run's MLflow run twice. The stage
            # deletes one of them, for which MLflow demands MANAGE. This covers all runs, so a user of one experiment
            # does not get it.
            _grant(server, user, "run", "*", "MANAGE")


def _find_experiment(registry: "MlflowClient", server: str, name: str) -> str:
    """Return the id of an experiment. Return `*` unchanged."""
    if name == "*":
        return name
    experiment = registry.get_experiment_by_name(name)
    if not experiment:
        raise InputError(f"{server}: MLflow has no experiment {name}: the first run creates it")
    return experiment.experiment_id


def _grant(server: str, user: str, kind: str, resource: str, permission: str) -> None:
    """Replace a user's permission on a resource. MLflow refuses a second permission on the same resource."""
    client = _make_client(server)
    with ignore_error("RESOURCE_DOES_NOT_EXIST"):
        if client.get_user_permission(user, kind, resource).permission == permission:
            return  # even a brief revocation would interrupt the user's work
        client.revoke_user_permission(user, kind, resource)
    client.grant_user_permission(user, kind, resource, permission)


def _make_client(server: str) -> "AuthServiceClient":
    """Return a client for MLflow's user accounts."""
    os.environ.update(environment.MLFLOW)
    from mlflow.server.auth.client import AuthServiceClient

    return AuthServiceClient(server)


def main() -> None:
    """Create the user from the environment, and grant the permissions from the command line."""
    parser = argparse.ArgumentParser(description="Create the MLflow user from the environment, and grant permissions.")
    parser.add_argument("--may", choices=PERMISSIONS, default="read", help="permissions to grant; default: read")
    parser.add_argument("--experiment", help="name of an experiment, or * for all")
    parser.add_argument("--model", nargs="+", help="names of registered models, or * for all")
    arguments = parser.parse_args()
    if bool(arguments.experiment) != bool(arguments.model):
        parser.error("--experiment and --model go together")
    try:
        _check_environment()
        server = os.environ["MLFLOW_TRACKING_URI"]
        user = os.environ["MLFLOW_TRACKING_USERNAME"]
        password = os.environ["MLFLOW_TRACKING_PASSWORD"]
        # From now on, this process calls MLflow as administrator.
        os.environ["MLFLOW_TRACKING_USERNAME"] = "admin"
        os.environ["MLFLOW_TRACKING_PASSWORD"] = os.environ[_ADMIN_VARIABLE]
        create_user(server, user, password)
        for model in arguments.model or ():
            grant_access(server, user, arguments.experiment, model, access=arguments.may)
    except InfoXLMError as error:
        print(f"mlflow user: {type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


def _check_environment() -> None:
    """Raise InputError if a required environment variable is not set."""
    for name in ("MLFLOW_TRACKING_URI", _ADMIN_VARIABLE, "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD"):
        if not os.environ.get(name):
            raise InputError(f"{name} is not set: the Job make-user of k8s/base sets it")


if __name__ == "__main__":
    main()

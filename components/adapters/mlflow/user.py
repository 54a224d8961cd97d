"""Create a user of MLflow, with the password that the steps read from a Secret, and grant permissions.

    python -m components.adapters.mlflow.user [--may read|train|promote|register --experiment infoxlm --model infoxlm]

MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD name the user; the calls are made as `admin`, with the
password in MLFLOW_AUTH_ADMIN_PASSWORD. A second call only updates the password. Users have all permissions on what they
create themselves; `--may` grants permissions on what others create, by name or * for all.
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
"""Value of --may -> MLflow's permissions for experiments and for registered models.

A promotion records its decision in the run that created the version. A registration may have to delete a duplicate
version: if the answer to a request is lost, the request is repeated.
"""
_ADMIN = "MLFLOW_AUTH_ADMIN_PASSWORD"


def create_user(server: str, user: str, password: str) -> None:
    """Create a user, or set the password of the user if it exists.

    This and `grant_access` act as the user whom MLFLOW_TRACKING_USERNAME names: an administrator.

    Raises:
        InputError: MLflow refuses.
        StorageUnavailable: MLflow does not answer.
    """
    client = _make_client(server)
    is_new = False
    with translate_errors(f"{server}: user {user}", _ADMIN):
        with ignore_error("RESOURCE_ALREADY_EXISTS"):
            client.create_user(user, password)
            is_new = True
        if not is_new:
            client.update_user_password(user, password)


def grant_access(server: str, user: str, experiment: str, model: str, access: str) -> None:
    """Grant a user permissions on an experiment and on a registered model. `*` means all experiments or models.

    Args:
        server: URL of MLflow.
        user: name of the account.
        experiment: name of the experiment, or `*`.
        model: name of the registered model, or `*`.
        access: a key of `PERMISSIONS`.

    Raises:
        InputError: MLflow refuses, or has no such experiment.
        StorageUnavailable: MLflow does not answer.
    """
    from mlflow import MlflowClient

    registry = MlflowClient(server)
    experiment_permission, model_permission = PERMISSIONS[access]
    with translate_errors(f"{server}: permissions of {user}", _ADMIN):
        experiment_id = _find_experiment(registry, server, experiment)
        if access == "register" and model != "*":
            # The administrator creates the model. Otherwise, the first registration would create it, and the user who
            # creates a model has all permissions on it.
            with ignore_error("RESOURCE_ALREADY_EXISTS"):
                registry.create_registered_model(model)
        _grant(server, user, "experiment", experiment_id, experiment_permission)
        _grant(server, user, "registered_model", model, model_permission)
        if experiment_permission == "EDIT" and experiment_id == "*":
            # Two stages may create the run of a pipeline run at the same time. One of them then deletes its run.
            _grant(server, user, "run", "*", "MANAGE")


def _find_experiment(registry: "MlflowClient", server: str, name: str) -> str:
    """Return the id of an experiment, or `*` for all experiments."""
    if name == "*":
        return name
    experiment = registry.get_experiment_by_name(name)
    if not experiment:
        raise InputError(f"{server}: MLflow has no experiment {name}: the first run creates it")
    return experiment.experiment_id


def _grant(server: str, user: str, kind: str, resource: str, permission: str) -> None:
    """Replace the permission of a user on a resource."""
    client = _make_client(server)
    with ignore_error("RESOURCE_DOES_NOT_EXIST"):
        if client.get_user_permission(user, kind, resource).permission == permission:
            return  # revoking it, even briefly, would interrupt the user's work
        client.revoke_user_permission(user, kind, resource)
    client.grant_user_permission(user, kind, resource, permission)


def _make_client(server: str) -> "AuthServiceClient":
    """Return a client of MLflow's accounts."""
    os.environ.update(environment.MLFLOW)
    from mlflow.server.auth.client import AuthServiceClient

    return AuthServiceClient(server)


def main() -> None:
    """Create the user that the environment names, and grant the permissions that the command line names."""
    parser = argparse.ArgumentParser(description="Create a user of MLflow; the variables of MLflow name the user.")
    parser.add_argument("--may", choices=PERMISSIONS, default="read", help="on --experiment and --model; default: read")
    parser.add_argument("--experiment", help="by name, or * for all")
    parser.add_argument("--model", nargs="+", help="registered models, by name, or * for all")
    arguments = parser.parse_args()
    if bool(arguments.experiment) != bool(arguments.model):
        parser.error("--experiment and --model go together")
    try:
        _check_environment()
        server = os.environ["MLFLOW_TRACKING_URI"]
        user = os.environ["MLFLOW_TRACKING_USERNAME"]
        password = os.environ["MLFLOW_TRACKING_PASSWORD"]
        # From here on, this process calls MLflow as the administrator.
        os.environ["MLFLOW_TRACKING_USERNAME"] = "admin"
        os.environ["MLFLOW_TRACKING_PASSWORD"] = os.environ[_ADMIN]
        create_user(server, user, password)
        for model in arguments.model or ():
            grant_access(server, user, arguments.experiment, model, access=arguments.may)
    except InfoXLMError as error:
        print(f"mlflow user: {type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


def _check_environment() -> None:
    """Raise InputError if an environment variable that this command reads is not set."""
    for name in ("MLFLOW_TRACKING_URI", _ADMIN, "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD"):
        if not os.environ.get(name):
            raise InputError(f"{name} is not set: the Job make-user of k8s/base sets it")


if __name__ == "__main__":
    main()

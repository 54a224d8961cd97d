"""Let MLflow know the user that the steps of a pipeline are, with the password of the Secret from which they read it.

    python -m components.adapters.mlflow.user

Who it is: MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD. Who says so: admin, MLFLOW_AUTH_ADMIN_PASSWORD. Run
again it changes nothing but a password that is another one now. The user may what it makes itself, and nothing else.

    python -m components.adapters.mlflow.user --experiment infoxlm --model infoxlm [--promote]

A person, who is told what there is: may read the experiment and the model, or, with --promote, change both, too.
"""

import argparse
import base64
import json
import os
import sys
import urllib.error
import urllib.parse
import urllib.request

from infoxlm_core.errors import InfoXLMError, InputError, StorageUnavailable


def ensure(server: str, admin_password: str, user: str, password: str) -> None:
    """Make a user of MLflow, or give the one that is there its password.

    Args:
        server: URL of MLflow.
        admin_password: of the user `admin`.
        user: the name of the user.
        password: the user's, set anew if the user is there.

    Raises:
        InputError: MLflow refuses.
        StorageUnavailable: MLflow does not answer.
    """
    account = {"username": user, "password": password}
    status, said = _call(server, "POST", "2.0/mlflow/users/create", account, admin_password)
    if "RESOURCE_ALREADY_EXISTS" in said:
        status, said = _call(server, "PATCH", "2.0/mlflow/users/update-password", account, admin_password)
    _check(server, status, f"to make the user {user}: check MLFLOW_AUTH_ADMIN_PASSWORD")


def allow(server: str, admin_password: str, user: str, experiment: str, model: str, promote: bool) -> None:
    """Let a user of MLflow read an experiment and a registered model, or promote versions of it.

    Whoever promotes moves an alias of the model, and leaves the decision in the run that made the version.

    Raises:
        InputError: MLflow refuses, or has no such experiment.
        StorageUnavailable: MLflow does not answer.
    """
    name = urllib.parse.urlencode({"experiment_name": experiment})
    status, said = _call(server, "GET", f"2.0/mlflow/experiments/get-by-name?{name}", None, admin_password)
    _check(server, status, f"experiment {experiment}: the first run makes it")
    known = json.loads(said)["experiment"]["experiment_id"]
    for kind, which in (("experiment", known), ("registered_model", model)):
        grant = {"username": user, "resource_type": kind, "resource_id": which}
        right = {"permission": "EDIT" if promote else "READ"}
        status, _ = _call(server, "POST", "3.0/mlflow/users/permissions/grant", grant | right, admin_password)
        _check(server, status, f"to let {user} use {kind} {which}: check MLFLOW_AUTH_ADMIN_PASSWORD")


def _check(server: str, status: int, what: str) -> None:
    if status >= 500:
        raise StorageUnavailable(f"{server}: MLflow answers {status}: run again")
    if status != 200:
        raise InputError(f"{server}: MLflow refuses ({status}) {what}")


def _call(server: str, method: str, path: str, body: dict[str, str] | None, admin_password: str) -> tuple[int, str]:
    login = base64.b64encode(f"admin:{admin_password}".encode()).decode()
    headers = {"Authorization": f"Basic {login}", "Content-Type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{server}/api/{path}", data, headers, method=method)  # noqa: S310 - of the configured server
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310 - of the configured server
            return answer.status, answer.read().decode(errors="replace")
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(errors="replace")
    except OSError as error:
        raise StorageUnavailable(f"{server}: MLflow does not answer ({error}): run again") from error


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a user of MLflow; the variables of MLflow say who it is.")
    parser.add_argument("--experiment", help="that it may read")
    parser.add_argument("--model", help="registered model that it may read")
    parser.add_argument("--promote", action="store_true", help="it may move the model's aliases, too")
    given = parser.parse_args()
    if bool(given.experiment) != bool(given.model) or (given.promote and not given.model):
        parser.error("--experiment and --model go together, --promote with both")
    wanted = "MLFLOW_TRACKING_URI", "MLFLOW_AUTH_ADMIN_PASSWORD", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD"
    try:
        if missing := [name for name in wanted if not os.environ.get(name)]:
            raise InputError(f"{missing[0]} is not set: the Job make-user of k8s/base sets it")
        server, admin_password, user, password = (os.environ[name] for name in wanted)
        ensure(server, admin_password, user, password)
        if given.model:
            allow(server, admin_password, user, given.experiment, given.model, given.promote)
    except InfoXLMError as error:
        print(f"mlflow user: {type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()

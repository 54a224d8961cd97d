"""Let MLflow know a user, with the password of the Secret from which a step reads it, and what it may.

    python -m components.adapters.mlflow.user [--may read|train|promote|register --experiment infoxlm --model infoxlm]

Who it is: MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD. Who says so: admin, MLFLOW_AUTH_ADMIN_PASSWORD. Run
again it changes nothing but a password that is another one now. A user may what it makes itself, in any case; with what
others make, by name or * for all, what `--may` says.
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

RIGHTS = {
    "read": ("READ", "READ"),
    "train": ("EDIT", "READ"),
    "promote": ("EDIT", "EDIT"),
    "register": ("EDIT", "MANAGE"),
}
"""What somebody may -> MLflow's permissions for experiments and for registered models.

Whoever moves an alias leaves the decision in the run that made the version; whoever registers may also delete a version
that a lost answer made twice.
"""
_GRANTS = "3.0/mlflow/users/permissions"


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


def allow(server: str, admin_password: str, user: str, experiment: str, model: str, may: str) -> None:
    """Give a user of MLflow rights on an experiment and on a registered model; `*` stands for all of them.

    The model of who registers is made here: whoever makes one may all of it, and that should be no training.

    Args:
        server: URL of MLflow.
        admin_password: of the user `admin`.
        user: the name of the user.
        experiment: by name.
        model: by name.
        may: one of `RIGHTS`.

    Raises:
        InputError: MLflow refuses, or has no such experiment.
        StorageUnavailable: MLflow does not answer.
    """
    known = experiment
    if experiment != "*":
        name = urllib.parse.urlencode({"experiment_name": experiment})
        status, said = _call(server, "GET", f"2.0/mlflow/experiments/get-by-name?{name}", None, admin_password)
        _check(server, status, f"experiment {experiment}: the first run makes it")
        known = json.loads(said)["experiment"]["experiment_id"]
    if may == "register" and model != "*":
        status, said = _call(server, "POST", "2.0/mlflow/registered-models/create", {"name": model}, admin_password)
        if "RESOURCE_ALREADY_EXISTS" not in said:
            _check(server, status, f"to make the registered model {model}: check MLFLOW_AUTH_ADMIN_PASSWORD")
    of_experiment, of_model = RIGHTS[may]
    rights = [("experiment", known, of_experiment), ("registered_model", model, of_model)]
    if of_experiment == "EDIT" and known == "*":  # of two stages that open a run at once one deletes its own
        rights.append(("run", "*", "MANAGE"))
    for kind, which, permission in rights:
        grant = {"username": user, "resource_type": kind, "resource_id": which}
        status, said = _call(server, "GET", f"{_GRANTS}/get?{urllib.parse.urlencode(grant)}", None, admin_password)
        if status == 200 and json.loads(said)["permission"] == permission:
            continue  # taking it away for a moment would end what this user is doing
        _call(server, "POST", f"{_GRANTS}/revoke", grant, admin_password)  # else another one stays
        status, _ = _call(server, "POST", f"{_GRANTS}/grant", grant | {"permission": permission}, admin_password)
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
    parser.add_argument("--may", choices=RIGHTS, default="read", help="of the following two; read is the default")
    parser.add_argument("--experiment", help="by name, or * for all")
    parser.add_argument("--model", nargs="+", help="registered models, by name, or * for all")
    given = parser.parse_args()
    if bool(given.experiment) != bool(given.model):
        parser.error("--experiment and --model go together")
    wanted = "MLFLOW_TRACKING_URI", "MLFLOW_AUTH_ADMIN_PASSWORD", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD"
    try:
        if missing := [name for name in wanted if not os.environ.get(name)]:
            raise InputError(f"{missing[0]} is not set: the Job make-user of k8s/base sets it")
        server, admin_password, user, password = (os.environ[name] for name in wanted)
        ensure(server, admin_password, user, password)
        for model in given.model or ():
            allow(server, admin_password, user, given.experiment, model, given.may)
    except InfoXLMError as error:
        print(f"mlflow user: {type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()

"""Let MLflow know the user that the steps of a pipeline are, with the password of the Secret from which they read it.

    python -m components.adapters.mlflow.user

Who it is: MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD. Who says so: admin, MLFLOW_AUTH_ADMIN_PASSWORD. Run
again it changes nothing but a password that is another one now. The user may what it makes itself, and nothing else.
"""

import base64
import json
import os
import sys
import urllib.error
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
    status, said = _call(server, "POST", "create", account, admin_password)
    if "RESOURCE_ALREADY_EXISTS" in said:
        status, said = _call(server, "PATCH", "update-password", account, admin_password)
    if status >= 500:
        raise StorageUnavailable(f"{server}: MLflow answers {status}: run again")
    if status != 200:
        raise InputError(
            f"{server}: MLflow refuses ({status}) to make the user {user}: check MLFLOW_AUTH_ADMIN_PASSWORD"
        )


def _call(server: str, method: str, action: str, body: dict[str, str], admin_password: str) -> tuple[int, str]:
    login = base64.b64encode(f"admin:{admin_password}".encode()).decode()
    headers = {"Authorization": f"Basic {login}", "Content-Type": "application/json"}
    url = f"{server}/api/2.0/mlflow/users/{action}"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers, method=method)  # noqa: S310 - of the configured server
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310 - of the configured server
            return answer.status, ""
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(errors="replace")
    except OSError as error:
        raise StorageUnavailable(f"{server}: MLflow does not answer ({error}): run again") from error


def main() -> None:
    wanted = "MLFLOW_TRACKING_URI", "MLFLOW_AUTH_ADMIN_PASSWORD", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD"
    try:
        if missing := [name for name in wanted if not os.environ.get(name)]:
            raise InputError(f"{missing[0]} is not set: the Job make-user of k8s/base sets it")
        ensure(*(os.environ[name] for name in wanted))
    except InfoXLMError as error:
        print(f"mlflow user: {type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()

"""Translate errors of MLflow, its server and its database to InfoXLMErrors."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from infoxlm_core import outside
from infoxlm_core.errors import InfoXLMError, InputError, StorageUnavailable, one_line


@contextmanager
def translate_errors(
    subject: str, account: str = "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
) -> Iterator[None]:
    """Translate errors of MLflow to InfoXLMErrors of one line each.

    Args:
        subject: what the block works on; each message begins with it.
        account: environment variables with the login, to name in messages.

    Raises:
        StorageUnavailable: MLflow does not answer, or answers with a 5xx; or its database is busy.
        StorageFull: there is no space left.
        InputError: MLflow refuses, or its database is damaged.
    """
    from mlflow.exceptions import MlflowException

    try:
        yield
    except InfoXLMError:
        raise
    except Exception as error:
        status = error.get_http_status_code() if isinstance(error, MlflowException) else 0
        translated = outside.translate_error(error, subject) or _of_database(error, subject, status)
        translated = translated or _of_server(error, subject, status, account)
        if not translated:
            raise
        raise translated from error


def _of_database(error: Exception, subject: str, status: int) -> InfoXLMError | None:
    """Translate an error of a database that this process opens itself; return None for any other error."""
    reason = one_line(error)
    if isinstance(error, ImportError):
        return InputError(f"{subject}: {error}: install it, or give the address of a server, https://…")
    if "out-of-date database schema" in reason:
        remedy = "use that one, or back the database up and call `mlflow db upgrade`"
        return InputError(f"{subject}: the tables are those of another version of MLflow ({reason}): {remedy}")
    is_file = os.environ.get("MLFLOW_TRACKING_URI", "").startswith("sqlite")
    if not type(error).__module__.startswith("sqlalchemy") and not (is_file and status >= 500):
        return None
    if "locked" in str(error):
        return StorageUnavailable(f"{subject}: MLflow's database is locked: run the same again")
    if "disk I/O error" in str(error):
        return StorageUnavailable(f"{subject}: the disk of MLflow's database fails: run again when it works")
    return InputError(f"{subject}: MLflow's database cannot be used ({reason}): restore it, or delete a new one")


def _of_server(error: Exception, subject: str, status: int, account: str) -> InfoXLMError | None:
    """Translate an error answer of the server; return None if the error is not MLflow's (status 0)."""
    reason = one_line(error)
    if status >= 500:
        return StorageUnavailable(f"{subject}: MLflow does not answer ({reason}): run the same again")
    if status in (401, 403):
        return InputError(f"{subject}: MLflow refuses this account ({status}): check {account}")
    return InputError(f"{subject}: MLflow refuses ({reason})") if status else None

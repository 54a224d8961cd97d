"""Errors of MLflow, of its server and of its database, as errors of ours."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from infoxlm_core import outside
from infoxlm_core.errors import InfoXLMError, InputError, StorageUnavailable, one_line


@contextmanager
def translate_errors(what: str) -> Iterator[None]:
    """Turn errors of MLflow into ours, one line each.

    Raises:
        StorageUnavailable: MLflow does not answer, or with a 5xx.
        StorageFull: there is no space for it.
        InputError: it answers, and refuses; or its database is damaged.
    """
    from mlflow.exceptions import MlflowException

    try:
        yield
    except InfoXLMError:
        raise
    except Exception as error:
        status = error.get_http_status_code() if isinstance(error, MlflowException) else 0
        said = outside.translate(error, what) or _of_database(error, what, status) or _of_server(error, what, status)
        if not said:
            raise
        raise said from error


def _of_database(error: Exception, what: str, status: int) -> InfoXLMError | None:
    """An error of a database that this process itself opens, a file mostly: another try helps only if it is busy."""
    reason = one_line(error)
    if isinstance(error, ImportError):
        return InputError(f"{what}: {error}: install it, or give the address of a server, https://…")
    if "out-of-date database schema" in reason:
        remedy = "use that one, or back the database up and call `mlflow db upgrade`"
        return InputError(f"{what}: the tables are those of another version of MLflow ({reason}): {remedy}")
    is_file = os.environ.get("MLFLOW_TRACKING_URI", "").startswith("sqlite")
    if not type(error).__module__.startswith("sqlalchemy") and not (is_file and status >= 500):
        return None
    if "locked" in str(error):
        return StorageUnavailable(f"{what}: MLflow's database is locked: run the same again")
    if "disk I/O error" in str(error):
        return StorageUnavailable(f"{what}: the disk of MLflow's database fails: run again when it is well")
    return InputError(f"{what}: MLflow's database cannot be used ({reason}): restore it")


def _of_server(error: Exception, what: str, status: int) -> InfoXLMError | None:
    """What an answer of MLflow's means, or that there is none; no status: it is no error of MLflow."""
    reason = one_line(error)
    if status >= 500:
        return StorageUnavailable(f"{what}: MLflow does not answer ({reason}): run the same again")
    if status in (401, 403):
        account = "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
        return InputError(f"{what}: MLflow refuses this account ({status}): check {account}")
    return InputError(f"{what}: MLflow refuses ({reason})") if status else None

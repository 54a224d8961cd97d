"""Translate errors from MLflow, its server and its database to InfoXLMErrors."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

from infoxlm_core import user_files
from infoxlm_core.errors import InfoXLMError, InputError, StorageUnavailable, last_cause, one_line


@contextmanager
def translate_errors(
    subject: str, account: str = "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
) -> Iterator[None]:
    """Translate MLflow's errors inside the block to InfoXLMErrors with one-line messages.

    Args:
        subject: object that the block reads or changes, for the beginning of each message.
        account: environment variables with the login, for messages about a refused account.

    Raises:
        StorageUnavailable: MLflow does not answer or is not ready, or its database is busy.
        StorageFull: no space is left.
        InputError: MLflow refuses or fails, or its database is damaged.
    """
    from mlflow.exceptions import MlflowException

    try:
        yield
    except InfoXLMError:
        raise
    except Exception as error:
        status = error.get_http_status_code() if isinstance(error, MlflowException) else 0
        # The database comes before the server, because MLflow gives errors of a local database an HTTP status, too.
        translated = (
            user_files.translate_error(error, subject)
            or _translate_database_error(error, subject, status)
            or _translate_server_error(error, subject, status, account)
        )
        if not translated:
            raise
        raise translated from error


@contextmanager
def ignore_error(code: str) -> Iterator[None]:
    """Suppress MLflow errors with this code, such as RESOURCE_ALREADY_EXISTS, inside the block."""
    from mlflow.exceptions import MlflowException

    try:
        yield
    except MlflowException as error:
        if error.error_code != code:
            raise


def _translate_database_error(error: Exception, subject: str, status: int) -> InfoXLMError | None:
    """Translate an error from a database that this process opens itself. Return None for any other error."""
    reason = one_line(error)
    if isinstance(error, ImportError):  # the driver for this type of database is not installed
        return InputError(f"{subject}: {error}: install it, or give the address of a server, https://…")
    if "out-of-date database schema" in reason:
        remedy = "use that version, or back up the database and call `mlflow db upgrade`"
        return InputError(f"{subject}: the tables were created by another version of MLflow ({reason}): {remedy}")
    is_sqlalchemy_error = type(error).__module__.startswith("sqlalchemy")
    uses_file = os.environ.get("MLFLOW_TRACKING_URI", "").startswith("sqlite")
    is_wrapped_by_mlflow = uses_file and status >= 500  # without a server, only the database can fail like this
    if not is_sqlalchemy_error and not is_wrapped_by_mlflow:
        return None
    if "locked" in str(error):
        return StorageUnavailable(f"{subject}: MLflow's database is locked: run again")
    if "disk I/O error" in str(error):
        return StorageUnavailable(f"{subject}: the disk of MLflow's database fails: repair it, then run again")
    return InputError(f"{subject}: MLflow's database cannot be used ({reason}): restore it, or delete it if it is new")


def _translate_server_error(error: Exception, subject: str, status: int, account: str) -> InfoXLMError | None:
    """Translate an error from MLflow's client by its HTTP status. Return None for an error without a status (0)."""
    if not status:
        return None
    reason = one_line(error)
    if status >= 500:
        server_status = _read_server_status(error)
        if not server_status:  # MLflow's client itself has made up the status 500
            return StorageUnavailable(f"{subject}: MLflow does not answer ({reason}): run again")
        # MLflow answers 503 while its database is unavailable, and 500 if the request itself is at fault, in which case
        # a retry would fail too. Artifact requests are an exception: they also fail with 500 while S3 is unavailable.
        is_artifact_request = "/mlflow-artifacts/" in str(error)
        if server_status == 500 and not is_artifact_request:
            return InputError(f"{subject}: MLflow fails with 500 ({reason}): see its log, repair it, then run again")
        return StorageUnavailable(f"{subject}: MLflow is not ready ({reason}): run again")
    if status in (401, 403):
        return InputError(f"{subject}: MLflow refuses this account ({status}): check {account}")
    return InputError(f"{subject}: MLflow refuses ({reason})")


def _read_server_status(error: Exception) -> int:
    """Return the HTTP status of the server's last answer, or 0 if the server did not answer.

    MLflow's client reports 500 in both cases, so the actual status is only in the messages. When the client gives up
    retrying, it discards the answer's body, and the cause is only in the server's log.
    """
    messages = f"{error} {last_cause(error)}"
    match = re.search(r"(?:too many|failed with error code) (\d{3})", messages)
    return int(match[1]) if match else 0

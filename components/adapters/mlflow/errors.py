"""Translate errors of MLflow, its server and its database to InfoXLMErrors."""

import contextlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

from infoxlm_core import outside
from infoxlm_core.errors import InfoXLMError, InputError, StorageUnavailable, last_cause, one_line, shorten

_ANSWER_SECONDS = 10.0


@contextmanager
def translate_errors(
    subject: str, account: str = "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
) -> Iterator[None]:
    """Translate errors of MLflow to InfoXLMErrors of one line each.

    Args:
        subject: what the block works on; each message begins with it.
        account: environment variables with the login, to name in messages.

    Raises:
        StorageUnavailable: MLflow does not answer or is not ready, or its database is busy.
        StorageFull: there is no space left.
        InputError: MLflow refuses or fails, or its database is damaged.
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
    """Translate an error answer of the server; return None if the error is not MLflow's (status 0).

    MLflow answers 503 while its database is away, and 500 if the request itself fails, which repeating does not help.
    The requests for artifacts are an exception: they fail with 500 while S3 is away.
    """
    reason = one_line(error)
    if status >= 500:
        failed_status, body = _failed_answer(error)
        if not failed_status:
            return StorageUnavailable(f"{subject}: MLflow does not answer ({reason}): run the same again")
        answer = shorten(f"{failed_status} {body}" if body else reason)
        if failed_status == 500 and "/mlflow-artifacts/" not in str(error):
            return InputError(f"{subject}: MLflow fails with {answer}: see its log, repair it, then run again")
        return StorageUnavailable(f"{subject}: MLflow is not ready ({answer}): run the same again")
    if status in (401, 403):
        return InputError(f"{subject}: MLflow refuses this account ({status}): check {account}")
    return InputError(f"{subject}: MLflow refuses ({reason})") if status else None


def _failed_answer(error: Exception) -> tuple[int, str]:
    """Return status and body of the server's answer, or 0 and "" if no answer came.

    MLflow's client repeats a request that failed with a 5xx, and discards the bodies of the answers. The request is
    therefore sent once more.
    """
    import requests
    from urllib3.exceptions import ResponseError

    cause = last_cause(error)
    match = re.search(r"too many (\d{3}) error responses|failed with error code (\d{3})", f"{error} {cause}")
    if not match:
        return 0, ""
    request = getattr(error.__context__, "request", None)
    is_repeatable = isinstance(request, requests.PreparedRequest) and isinstance(request.body, str | bytes | None)
    if isinstance(cause, ResponseError) and is_repeatable:  # the body of an upload is a file, which is closed
        with contextlib.suppress(requests.RequestException), requests.Session() as session:
            answer = session.send(request, timeout=_ANSWER_SECONDS, allow_redirects=False)
            if answer.status_code >= 500:
                return answer.status_code, answer.text
    return int(match[1] or match[2]), ""

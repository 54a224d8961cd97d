"""The connection to MLflow: a server, or a SQLite file in the local store.

The platform sets MLFLOW_TRACKING_URI, which is never a pipeline parameter. Without this variable, MLflow uses a SQLite
file in the local store. MLflow takes seconds to import, so functions import it where they use it.
"""

import functools
import logging
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from components.adapters.mlflow.errors import translate_errors
from components.settings import environment
from infoxlm_core import locks, user_files
from infoxlm_core.errors import InputError, StorageUnavailable, without_password

if TYPE_CHECKING:
    from mlflow import MlflowClient

ARTIFACTS = "mlartifacts"
"""Artifact directory beside the SQLite file."""
_SQLITE_FILE_URI = re.compile(r"sqlite:///(?!:memory:)[^?]+(\?.*)?")
_ANSWER_SECONDS = 60.0  # an overloaded server may answer late


def tracking_uri(store: Path) -> str:
    """Return MLFLOW_TRACKING_URI, or the URI of the SQLite file in the directory `store`.

    Raises:
        InputError: the store's path contains %, ? or #, which have a meaning in a URI.
    """
    uri_from_environment = os.environ.get("MLFLOW_TRACKING_URI")
    if uri_from_environment:
        return uri_from_environment
    database = store.resolve() / "mlflow.db"
    if any(character in str(database) for character in "%?#"):
        raise InputError(f"{store}: the path of MLflow's database must not contain %, ? or #: rename the store")
    return f"sqlite:///{database}"


def public_uri(store: Path) -> str:
    """Return `tracking_uri` without its password."""
    return without_password(tracking_uri(store))


def check_uri(uri: str) -> None:
    """Check a tracking URI, because MLflow itself would wait for minutes or fail with an unclear message.

    Raises:
        InputError: the URI names neither a server nor a possible database file.
        StorageUnavailable: the server accepts the connection but does not answer.
    """
    setting = f"MLFLOW_TRACKING_URI={without_password(uri)}"
    scheme = uri.partition("://")[0] if "://" in uri else ""
    if scheme in ("http", "https"):
        _check_server_answers(uri)
    elif scheme.startswith("sqlite"):
        if not _SQLITE_FILE_URI.fullmatch(uri):
            raise InputError(
                f"{setting} is not a file that later stages can open: set it to sqlite:///…/mlflow.db, or unset it"
            )
        database = _find_sqlite_file(uri)
        if database and database.exists():
            user_files.check_readable(database)
    elif scheme in ("", "file"):
        raise InputError(
            f"{setting} is a directory, which MLflow no longer supports: set it to a server (https://…) or to "
            "sqlite:///…/mlflow.db, or unset it"
        )


@functools.cache
def _check_server_answers(uri: str) -> None:
    """Raise StorageUnavailable if a server accepts connections but does not answer. MLflow would wait for 8 minutes.

    A server that refuses connections may still be starting. In this case, MLflow's own retries apply.
    """
    import requests

    health_url = f"{uri.rstrip('/')}/health"
    try:  # any answer is enough, even an error or a redirect
        requests.get(health_url, timeout=_ANSWER_SECONDS, allow_redirects=False, stream=True).close()
    except requests.Timeout:
        raise StorageUnavailable(
            f"{without_password(uri)}: MLflow accepts connections but does not answer within {_ANSWER_SECONDS:.0f} s: "
            "check the server, then run again"
        ) from None
    except requests.RequestException:
        return  # MLflow will report this error itself


def connect(store: Path) -> "MlflowClient":
    """Connect this process and its child processes to the MLflow server, or to the store's SQLite file.

    Raises:
        InputError, StorageUnavailable: see `check_uri` and `translate_errors`.
    """
    os.environ.update(environment.MLFLOW)  # before the import, because some libraries read the variables only then
    uri = tracking_uri(store)
    check_uri(uri)
    import mlflow

    for logger_name in ("mlflow", "alembic"):  # they log dozens of lines about migrations of a new SQLite file
        logging.getLogger(logger_name).setLevel(logging.WARNING)
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)  # it logs stack traces of translated errors
    mlflow.set_tracking_uri(uri)  # also sets MLFLOW_TRACKING_URI
    database = _find_sqlite_file(uri)
    if not database:
        with translate_errors(without_password(uri)):
            return mlflow.MlflowClient()
    directory = database.resolve().parent
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        known_error = user_files.translate_error(error)
        raise known_error or InputError(f"{directory} cannot be created ({error}): choose another directory") from None
    # The client creates the tables of a new file. Without the lock, two clients would do so at the same time and fail.
    with locks.acquire(directory / ".mlflow.lock"), translate_errors(str(database)):
        return mlflow.MlflowClient()


def connect_existing(store: Path) -> "MlflowClient":
    """Call `connect`, but refuse a store without a database, because the store's name is probably mistyped.

    `connect` would create a database there, without runs or models.

    Raises:
        InputError: the database does not exist.
        InputError, StorageUnavailable: see `connect`.
    """
    database = _find_sqlite_file(tracking_uri(store))
    if database and not database.exists():
        raise InputError(f"{store} has no MLflow database: give the --store of the run, or set MLFLOW_TRACKING_URI")
    return connect(store)


def artifact_root() -> str:
    """Return the root URI of all artifacts, which are beside the SQLite file or behind the server."""
    database = _find_sqlite_file(os.environ["MLFLOW_TRACKING_URI"])
    if database:
        return (database.resolve().parent / ARTIFACTS).as_uri()
    return "mlflow-artifacts:/"


def check_location(location: str) -> None:
    """Raise InputError if an artifact location is not below `artifact_root`, for example after the store was moved.

    Files at other locations are not trusted: whoever creates an experiment or a model in MLflow chooses its location.
    """
    root = artifact_root()
    is_below_root = location == root or location.startswith(root.rstrip("/") + "/")
    if is_below_root and ".." not in location:  # ROOT/../… is not below the root, although it begins with it
        return
    remedy = "use another experiment"
    was_store_moved = root.startswith("file:") and location.startswith("file:") and f"/{ARTIFACTS}" in location
    if was_store_moved:
        remedy = "a store with MLflow's database cannot be moved, so move it back"
    raise InputError(f"MLflow keeps artifacts at {location}, not below {root}: {remedy}")


def quote(value: str) -> str:
    """Return a value in quotation marks for a search filter. MLflow's filters have no escape character.

    Raises:
        InputError: the value contains a backtick, or both single and double quotation marks.
    """
    for quotation_mark in "'\"":
        if quotation_mark not in value and "`" not in value:
            return f"{quotation_mark}{value}{quotation_mark}"
    raise InputError(f"{value!r:.120}: MLflow cannot search for a name with such quotation marks: rename it")


def _find_sqlite_file(uri: str) -> Path | None:
    """Return the path of a SQLite URI's file, or None for a server's URI."""
    if not uri.startswith("sqlite://"):
        return None
    path, _, _ = uri.removeprefix("sqlite:///").partition("?")
    return Path(path)

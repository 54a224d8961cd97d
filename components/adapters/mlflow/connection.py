"""The connection to MLflow: a server, or a SQLite file in the local store.

The platform sets MLFLOW_TRACKING_URI; it is never a pipeline parameter. Without it, everything goes to a SQLite file in
the local store. MLflow takes seconds to import, so functions import it where they use it.
"""

import functools
import logging
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from components.adapters.mlflow.errors import translate_errors
from components.settings import environment
from infoxlm_core import locks, outside
from infoxlm_core.errors import InputError, StorageUnavailable, without_password

if TYPE_CHECKING:
    from mlflow import MlflowClient

ARTIFACTS = "mlartifacts"
"""Folder of the artifacts, beside the SQLite file."""
_ANSWER_SECONDS = 60.0


def tracking_uri(store: Path) -> str:
    """Return MLFLOW_TRACKING_URI, or the URI of the SQLite file in the directory `store`.

    Raises:
        InputError: the path of the store has a character that such a URI cannot contain.
    """
    if uri := os.environ.get("MLFLOW_TRACKING_URI"):
        return uri
    if any(character in str(store.resolve()) for character in "%?#"):
        raise InputError(f"{store}: MLflow's database cannot lie below a name with %, ? or #: rename the store")
    return f"sqlite:///{store.resolve() / 'mlflow.db'}"


def public_uri(store: Path) -> str:
    """Return `tracking_uri` without a password."""
    return without_password(tracking_uri(store))


def check_uri(uri: str) -> None:
    """Refuse a URI with which MLflow would wait for minutes or fail with an unclear message.

    Raises:
        InputError: the URI is neither a server nor a file that is, or may become, MLflow's database.
        StorageUnavailable: the server accepts the connection but does not answer.
    """
    shown = without_password(uri)
    scheme = uri.partition("://")[0] if "://" in uri else ""
    file = _sqlite_file(uri)
    if scheme in ("http", "https"):
        _wait_for_answer(uri)
    elif scheme.startswith("sqlite") and not re.fullmatch(r"sqlite:///(?!:memory:)[^?]+(\?.*)?", uri):
        raise InputError(
            f"MLFLOW_TRACKING_URI={shown}: names no file that the next stage would find: set it to "
            "sqlite:///…/mlflow.db, or not at all"
        )
    elif file:
        if file.exists():
            outside.check_readable(file)
    elif scheme in ("", "file"):
        raise InputError(
            f"MLFLOW_TRACKING_URI={shown}: MLflow keeps no folders of files any more: set it to a server "
            "(https://…), to sqlite:///…/mlflow.db, or not at all"
        )


@functools.cache
def _wait_for_answer(uri: str) -> None:
    """Refuse a server that accepts connections but does not answer, because MLflow would wait for eight minutes.

    A server that refuses connections may be starting, so MLflow's own retries handle it.
    """
    import requests

    try:
        requests.get(f"{uri.rstrip('/')}/health", timeout=_ANSWER_SECONDS, allow_redirects=False, stream=True).close()
    except requests.Timeout:
        raise StorageUnavailable(
            f"{without_password(uri)}: MLflow accepts connections and does not answer within {_ANSWER_SECONDS:.0f} s: "
            "check the server, run again"
        ) from None
    except requests.RequestException:
        return


def connect(store: Path) -> "MlflowClient":
    """Connect this process and its child processes to `tracking_uri(store)`.

    Raises:
        InputError, StorageUnavailable: as `check_uri` and `translate_errors`.
    """
    os.environ.update(environment.MLFLOW)
    uri = tracking_uri(store)
    check_uri(uri)
    import mlflow

    for noisy in ("mlflow", "alembic"):  # creating a SQLite file logs dozens of lines about migrations
        logging.getLogger(noisy).setLevel(logging.WARNING)
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)  # it logs stack traces of errors we translate
    mlflow.set_tracking_uri(uri)  # also sets MLFLOW_TRACKING_URI
    file = _sqlite_file(uri)
    if not file:
        with translate_errors(without_password(uri)):
            return mlflow.MlflowClient()
    directory = file.resolve().parent
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise outside.translate_error(error) or InputError(
            f"{directory} cannot be made ({error}): give another"
        ) from None
    with locks.acquire(directory / ".mlflow.lock"), translate_errors(str(file)):
        return mlflow.MlflowClient()  # creates the tables of a new file, which two processes at once cannot


def connect_existing(store: Path) -> "MlflowClient":
    """Connect to an existing database, so that a mistyped store is refused.

    Raises:
        InputError: there is no database; and as `connect`.
    """
    file = _sqlite_file(tracking_uri(store))
    if file and not file.exists():
        raise InputError(f"{store} has no database of MLflow: give the --store of the run, or set MLFLOW_TRACKING_URI")
    return connect(store)


def artifact_root() -> str:
    """Return the URI below which all artifacts are: beside the SQLite file, or behind the server."""
    file = _sqlite_file(os.environ["MLFLOW_TRACKING_URI"])
    return (file.resolve().parent / ARTIFACTS).as_uri() if file else "mlflow-artifacts:/"


def check_location(location: str) -> None:
    """Refuse artifacts outside of `artifact_root`, because MLflow lets any user point an experiment or model anywhere.

    Raises:
        InputError: the artifacts are elsewhere, for instance because the store was moved.
    """
    root = artifact_root()
    is_below = location == root or location.startswith(root.rstrip("/") + "/")
    if is_below and ".." not in location:
        return
    remedy = "use another experiment"
    if location.startswith("file:") and f"/{ARTIFACTS}" in location and root.startswith("file:"):
        remedy = "a store with MLflow's database does not move, so move it back"
    raise InputError(f"MLflow keeps artifacts at {location}, not below {root}: {remedy}")


def quote(value: str) -> str:
    """Quote a text for a filter of MLflow, which cannot escape quotation marks.

    Raises:
        InputError: the text contains a backtick, or both other kinds of quotation marks.
    """
    for mark in "'\"":
        if mark not in value and "`" not in value:
            return f"{mark}{value}{mark}"
    raise InputError(f"{value!r:.120}: MLflow cannot search for a name with such quotation marks: rename it")


def _sqlite_file(uri: str) -> Path | None:
    return Path(uri.removeprefix("sqlite:///").partition("?")[0]) if uri.startswith("sqlite://") else None

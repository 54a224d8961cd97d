"""The connection to MLflow: a server, or a SQLite file in the local store.

The platform sets MLFLOW_TRACKING_URI; it is never a pipeline parameter. Without it, everything goes to a SQLite file in
the local store. MLflow takes seconds to import, so functions import it where they use it.
"""

import functools
import gc
import logging
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from components.adapters.mlflow import moved, tables
from components.adapters.mlflow.errors import translate_errors
from components.settings import environment
from infoxlm_core import locks, outside
from infoxlm_core.errors import InputError, StorageUnavailable, without_password

if TYPE_CHECKING:
    from mlflow import MlflowClient

_ANSWER_SECONDS = 30.0


def tracking_uri(default: Path) -> str:
    """Say where MLflow is: MLFLOW_TRACKING_URI, else a SQLite file in the directory `default`; InputError if that has a
    name which cannot stand in an address."""
    if given := os.environ.get("MLFLOW_TRACKING_URI"):
        return given
    if any(sign in str(default.resolve()) for sign in "%?#"):
        raise InputError(f"{default}: MLflow's database cannot lie below a name with %, ? or #: rename the store")
    return f"sqlite:///{default.resolve() / 'mlflow.db'}"


def is_missing(default: Path) -> bool:
    """Whether MLflow's database would be made now, empty: for who wants to read what others have written."""
    file = _sqlite_file(tracking_uri(default))
    return file is not None and not file.exists()


def _sqlite_file(uri: str) -> Path | None:
    return Path(uri.removeprefix("sqlite:///").partition("?")[0]) if uri.startswith("sqlite://") else None


@contextmanager
def _importing() -> Iterator[None]:
    """Import MLflow in half the time: its 400,000 objects stay, and garbage collection goes over them for nothing.

    Nor does it later (`freeze`): at its end a process would go over them several times.
    """
    if "mlflow" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def check_uri(uri: str) -> None:
    """Refuse a place where MLflow would fail, or wait, for minutes before it says something else.

    Raises:
        InputError: it is no server and no file that holds, or may become, MLflow's database.
        StorageUnavailable: a server accepts the connection and says nothing.
    """
    shown, kind = without_password(uri), uri.partition("://")[0] if "://" in uri else ""
    if kind in ("http", "https"):
        _wait_for_answer(uri)
    elif kind.startswith("sqlite") and not re.fullmatch(r"sqlite:///(?!:memory:)[^?]+(\?.*)?", uri):
        raise InputError(
            f"MLFLOW_TRACKING_URI={shown}: names no file that the next stage would find: set it to "
            "sqlite:///…/mlflow.db, or not at all"
        )
    elif path := _sqlite_file(uri):
        if path.exists() and outside.look(path).stat().st_size:
            with path.open("rb") as file:
                if not file.read(16).startswith(b"SQLite format 3"):
                    raise InputError(f"{path} is no database of MLflow: move it elsewhere, or restore it")
    elif not kind or kind == "file":
        raise InputError(
            f"MLFLOW_TRACKING_URI={shown}: MLflow keeps no folders of files any more: set it to a server "
            "(https://…), to sqlite:///…/mlflow.db, or not at all"
        )


@functools.cache
def _wait_for_answer(uri: str) -> None:
    """See whether a server answers at all, which MLflow itself would wait for eight minutes: four times two.

    One that refuses the connection is left to MLflow's own tries: it may just be starting.
    """
    import requests

    for last in (False, True):
        try:
            requests.get(
                f"{uri.rstrip('/')}/health", timeout=_ANSWER_SECONDS, allow_redirects=False, stream=True
            ).close()
            return
        except requests.Timeout:
            if last:
                said = f"{without_password(uri)}: MLflow accepts connections and does not answer"
                raise StorageUnavailable(
                    f"{said} (2 x {_ANSWER_SECONDS:.0f} s): see whether it is well, run again"
                ) from None
        except requests.RequestException:
            return


@_importing()
def connect(default_store: Path) -> "MlflowClient":
    """Point this process, and those it starts, to `tracking_uri(default_store)`; raises as `check_uri` and
    `translate_errors` do."""
    os.environ.update(environment.MLFLOW)
    check_uri(tracking_uri(default_store))
    import mlflow

    for noisy in ("mlflow", "alembic"):  # a new SQLite file means dozens of lines about migrations
        logging.getLogger(noisy).setLevel(logging.WARNING)
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)  # of errors, which we translate, whole stacks
    mlflow.set_tracking_uri(tracking_uri(default_store))  # also sets MLFLOW_TRACKING_URI
    if not (file := _sqlite_file(os.environ["MLFLOW_TRACKING_URI"])):
        with translate_errors(without_password(os.environ["MLFLOW_TRACKING_URI"])):
            return mlflow.MlflowClient()
    directory = file.resolve().parent
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise outside.translate(error) or InputError(f"{directory} cannot be made ({error}): give another") from None
    with (
        locks.acquire(directory / ".mlflow.lock"),  # two processes creating the tables at once: one would fail
        translate_errors(str(file)),
    ):
        if not (file.exists() and file.stat().st_size):
            tables.create_file(file.resolve())
        client = mlflow.MlflowClient()
        moved.settle(file)
        return client


def connect_existing(default_store: Path) -> "MlflowClient":
    """`connect` for who reads, or changes, what others have written: a mistyped store is refused, not made.

    Raises:
        InputError: there is no database; and what `connect` raises.
    """
    if is_missing(default_store):
        raise InputError(
            f"{default_store} has no database of MLflow: give the --store of the run, or set MLFLOW_TRACKING_URI"
        )
    return connect(default_store)


def check_location(location: str) -> None:
    """Refuse artifacts outside `_artifact_root`: MLflow lets any user point an experiment or a model anywhere."""
    root = artifact_root()
    below = location == root or location.startswith(root.rstrip("/") + "/")
    if not below or ".." in location:
        raise InputError(f"MLflow keeps artifacts at {location}, not below {root}: use another experiment")


def _sqlite_directory() -> Path | None:
    """Where the SQLite file is; none if MLflow is a server."""
    file = _sqlite_file(os.environ["MLFLOW_TRACKING_URI"])
    return file.resolve().parent if file else None


def artifact_root() -> str:
    """Where all artifacts belong: beside the SQLite file, or behind the server."""
    directory = _sqlite_directory()
    return (directory / moved.FOLDER).as_uri() if directory else "mlflow-artifacts:/"


def quoted(value: str) -> str:
    """A text for MLflow's filters, which know no way to write a quotation mark; InputError if it has both kinds."""
    for mark in "'\"":
        if mark not in value and "`" not in value:
            return f"{mark}{value}{mark}"
    raise InputError(f"{value!r:.120}: MLflow cannot search for a name with such quotation marks: rename it")

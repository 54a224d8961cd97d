"""A store with MLflow's database may be moved, copied, or restored from a backup: what it says of places moves along.

MLflow writes down absolute places, file:///data/runs/mlartifacts/…. In a database of ours they lie beside it, so that
in another folder each of them can be told anew.
"""

import contextlib
import logging
import re
import sqlite3
from pathlib import Path
from urllib.parse import unquote, urlparse

from infoxlm_core.errors import InputError, StorageUnavailable

logger = logging.getLogger(__name__)
FOLDER = "mlartifacts"
_PLACES = (
    ("experiments", "artifact_location"),
    ("runs", "artifact_uri"),
    ("logged_models", "artifact_location"),
    ("model_versions", "source"),
    ("model_versions", "storage_location"),
)


def settle(database: Path) -> None:
    """Let a database on this machine say where its artifacts are now.

    What is still at its old place, and not beside the database, is left as it is.

    Raises:
        StorageUnavailable: somebody else writes the database.
        InputError: it cannot be written.
    """
    root = (database.parent / FOLDER).as_uri()
    if not (database.parent / FOLDER).is_dir():
        return
    try:
        with contextlib.closing(sqlite3.connect(database)) as connection, connection:
            changed = {old for table, column in _PLACES for old in _settle(connection, table, column, root)}
    except sqlite3.Error as error:
        if "locked" in str(error):
            raise StorageUnavailable(f"{database}: MLflow's database is locked: run the same again") from error
        raise InputError(
            f"{database} was moved here, and cannot be told ({error}): change its permissions, or move it back"
        ) from error
    for old in sorted(changed):
        logger.warning("%s was moved: what it says to lie below %s lies below %s now", database, old, root)


def _settle(connection: sqlite3.Connection, table: str, column: str, root: str) -> set[str]:
    """Change the places of one column; return the roots that stood there."""
    if column not in [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]:
        return set()
    foreign = f"SELECT rowid, {column} FROM {table} WHERE {column} LIKE 'file:///%' AND substr({column}, 1, ?) != ?"  # noqa: S608 - names of ours
    found = connection.execute(foreign, (len(root) + 1, f"{root}/")).fetchall()
    old_roots = set()
    for row, place in found:
        parts = re.fullmatch(rf"(file:///.*/{FOLDER})(/.*)?", place)
        if not parts or parts[1] == root or ".." in place:
            continue
        now = root + (parts[2] or "")
        if _path(now).exists() or not _path(place).exists():
            connection.execute(f"UPDATE {table} SET {column} = ? WHERE rowid = ?", (now, row))  # noqa: S608
            old_roots.add(parts[1])
    return old_roots


def _path(uri: str) -> Path:
    return Path(unquote(urlparse(uri).path))

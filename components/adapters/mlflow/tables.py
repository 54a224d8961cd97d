"""Create MLflow's tables, or bring them to this version: those of runs and models, then those of accounts and rights.

    python -m components.adapters.mlflow.tables postgresql+psycopg2:///mlflow

Replicas of the server that start at once take turns by a lock of PostgreSQL: MLflow's migrations take none, and of two
that make the same tables one fails. Done before, it does nothing.
"""

import shutil
import sys
from pathlib import Path

from infoxlm_core import manifests

LOCK = 0x696E666F786C6D
"""The key of the lock, any number that nobody else takes."""


def upgrade(url: str) -> None:
    """Do it in the database of a URL, of which libpq reads from PG* what is missing."""
    import sqlalchemy
    from mlflow.db import upgrade as upgrade_runs
    from mlflow.server.auth.db.cli import upgrade as upgrade_accounts
    from mlflow.store.db.utils import create_sqlalchemy_engine_with_retry

    engine = create_sqlalchemy_engine_with_retry(url)
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as held:  # until its connection is closed
        held.execute(sqlalchemy.text("SELECT pg_advisory_lock(:key)"), {"key": LOCK})
        upgrade_runs.main([url], standalone_mode=False)
        upgrade_accounts.main(["--url", url], standalone_mode=False)
    engine.dispose()


def create_file(file: Path) -> None:
    """Create the tables of runs and models in a SQLite file that is not there yet: all of them, or no file.

    SQLite takes no part of a migration back. Of a process that is killed, or finds the disk full, some of the tables
    would stay, and MLflow could never add the others. The caller sees to it that nobody else does the same at once.
    """
    from mlflow.db import upgrade as upgrade_runs

    partial = file.with_name(f".{file.name}.making")
    shutil.rmtree(partial, ignore_errors=True)  # with the journal, too, of one that was killed
    partial.mkdir()
    try:
        upgrade_runs.callback(f"sqlite:///{partial / file.name}")  # type: ignore[misc]  # as a command it has no Ctrl-C
        manifests.sync_file(partial / file.name)
        (partial / file.name).replace(file)
        manifests.sync_file(file.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


if __name__ == "__main__":
    upgrade(*sys.argv[1:])

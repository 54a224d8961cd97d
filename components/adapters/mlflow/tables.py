"""Create or upgrade MLflow's tables on PostgreSQL: first for runs and models, then for accounts and permissions.

    python -m components.adapters.mlflow.tables postgresql+psycopg2:///mlflow

Several replicas of the server may start at once, and MLflow's migrations take no lock: of two processes that create the
same tables, one fails. A lock of PostgreSQL lets one replica migrate at a time.
"""

import sys

LOCK = 0x696E666F786C6D
"""Key of the lock: an arbitrary number ("infoxlm" in ASCII)."""


def upgrade(url: str) -> None:
    """Upgrade the tables of MLflow and of its accounts in a PostgreSQL database.

    Several servers may call this at the same time: a lock of the database makes them wait for each other.
    """
    import sqlalchemy
    from mlflow.db import upgrade as upgrade_runs
    from mlflow.server.auth.db.cli import upgrade as upgrade_accounts
    from mlflow.store.db.utils import create_sqlalchemy_engine_with_retry

    engine = create_sqlalchemy_engine_with_retry(url)
    # The lock is held until its connection is closed.
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(sqlalchemy.text("SELECT pg_advisory_lock(:key)"), {"key": LOCK})
        upgrade_runs.main([url], standalone_mode=False)
        upgrade_accounts.main(["--url", url], standalone_mode=False)
    engine.dispose()


if __name__ == "__main__":
    upgrade(*sys.argv[1:])

"""Create or upgrade MLflow's PostgreSQL tables for runs and models, and then those for accounts and permissions.

    python -m components.adapters.mlflow.tables postgresql+psycopg2:///mlflow

Several replicas of the server may start at the same time, but MLflow's migrations take no lock and would fail. A
PostgreSQL lock lets one replica migrate at a time.
"""

import sys

LOCK = 0x696E666F786C6D
"""Lock key, an arbitrary number: "infoxlm" in ASCII."""


def upgrade(url: str) -> None:
    """Upgrade all MLflow tables in a PostgreSQL database. Concurrent calls wait for each other."""
    import sqlalchemy
    from mlflow.db import upgrade as upgrade_runs
    from mlflow.server.auth.db.cli import upgrade as upgrade_accounts
    from mlflow.store.db.utils import create_sqlalchemy_engine_with_retry

    engine = create_sqlalchemy_engine_with_retry(url)
    # PostgreSQL releases the lock when the connection is closed. AUTOCOMMIT leaves no transaction open meanwhile.
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(sqlalchemy.text("SELECT pg_advisory_lock(:key)"), {"key": LOCK})
        # In standalone mode, a click command ends the process.
        upgrade_runs.main([url], standalone_mode=False)
        upgrade_accounts.main(["--url", url], standalone_mode=False)
    engine.dispose()


if __name__ == "__main__":
    upgrade(*sys.argv[1:])

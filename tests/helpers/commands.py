"""Run the command `infoxlm` in its own process, kill it, and read what it left in its store."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.servers.processes import until


def infoxlm(*arguments: str, **options) -> subprocess.CompletedProcess:
    """Run the command `infoxlm` and return its output and exit code."""
    command = [str(Path(sys.executable).parent / "infoxlm"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment(), **options)


def environment() -> dict[str, str]:
    """Return the environment of this process without MLflow's variables, and with one thread per process."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_")}
    return variables | {"OMP_NUM_THREADS": "1"}


def processes_on(store: Path) -> list[str]:
    """Return the command lines of the processes that work on a store."""
    commands = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(store) in command and int(process.name) != os.getpid():
            commands.append(command[:200])
    return commands


def kill_in_pretraining(arguments: list[str], store: Path) -> None:
    """Start `infoxlm`, kill its driver after the first checkpoint, and wait until no process works on the store."""
    command = [str(Path(sys.executable).parent / "infoxlm"), *arguments]
    driver = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment())
    while not list(store.glob("runs/pretrained-*/step=*/manifest.json")):
        assert driver.poll() is None, "the run ended before it could be killed"
        time.sleep(0.01)
    driver.kill()
    driver.wait()
    until(lambda: not processes_on(store))  # the steps notice that their parent is gone


def only(store: Path, pattern: str) -> Path:
    """Return the one path that matches a pattern."""
    (path,) = store.glob(pattern)
    return path


def runs_of(store: Path) -> tuple[Any, Any, list[Any]]:
    """Return a client of a store's MLflow, its one parent run, and the runs nested in it."""
    import mlflow

    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{store}/mlflow.db")
    runs = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    (parent,) = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    return client, parent, [run for run in runs if run is not parent]

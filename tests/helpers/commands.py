"""The command `infoxlm` in processes of its own, one of them killed, and what it left in its store."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


def infoxlm(*arguments: str, **options) -> subprocess.CompletedProcess:
    command = [str(Path(sys.executable).parent / "infoxlm"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=400, **options)


def environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith("MLFLOW_")} | {"OMP_NUM_THREADS": "1"}


def alive(store: Path) -> list[str]:
    """Processes that still work on a store."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(store) in command and int(process.name) != os.getpid():
            found.append(command[:200])
    return found


def kill_in_pretraining(arguments: list[str], store: Path, patience: int) -> None:
    """Start `infoxlm`, kill its driver after the first checkpoint; `patience` seconds later nothing may be alive."""
    command = [str(Path(sys.executable).parent / "infoxlm"), *arguments]
    first = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment())
    deadline = time.monotonic() + 240
    while not list(store.glob("runs/pretrained-*/step=*/manifest.json")):
        assert first.poll() is None and time.monotonic() < deadline, "the run ended before it could be killed"
        time.sleep(0.01)
    first.send_signal(signal.SIGKILL)
    first.wait()
    for _ in range(10 * patience):  # its steps notice that nobody waits for them
        if not alive(store):
            break
        time.sleep(0.1)
    assert not alive(store)


def only(store: Path, pattern: str) -> Path:
    (found,) = store.glob(pattern)
    return found


def runs_of(store: Path) -> tuple[Any, Any, list[Any]]:
    """A client of a store's MLflow, the one run that is nested in no other, and those nested in it."""
    import mlflow

    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{store}/mlflow.db")
    runs = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    (parent,) = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    return client, parent, [run for run in runs if run is not parent]

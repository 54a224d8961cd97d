"""What tests of the components share: runs in MLflow, two processes, a killed worker, uploads, Ray."""

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from tests.helpers import workers


def open_run(store: Path, run: str = "r1") -> str:
    """Open the MLflow run of a pipeline run."""
    from components.adapters.mlflow import runs

    return runs.open_run("tests", "demo", {"infoxlm.run": run, "stage": "pretrain"}, store)


def history(run_id: str, key: str) -> list[tuple[int, float]]:
    """Points of a metric, as MLflow has them."""
    from mlflow import MlflowClient

    return [(point.step, point.value) for point in MlflowClient().get_metric_history(run_id, key)]


def two_processes() -> ProcessPoolExecutor:
    """Two processes that have imported all they need and begin their first task at the same time."""
    spawn = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(2, spawn, initializer=_at_the_door, initargs=(spawn.Barrier(2),))


def _at_the_door(both) -> None:
    import mlflow.transformers
    import transformers

    assert mlflow.transformers and transformers.pipeline
    both.wait(timeout=60)


def kill_first_worker(run: Path, instead: bytes = b"", after: int = 10) -> list[str]:
    """Kill the first worker of a training once it has saved `after` a step; the list then holds its process id.

    `instead` of it, one of its siblings may be killed, whose command line begins with this.
    """
    killed: list[str] = []

    def kill() -> None:
        while not (run / f"step={after:010}/manifest.json").exists():
            time.sleep(0.01)
        for process in Path("/proc").iterdir():
            if not process.name.isdigit() or int(process.name) == os.getpid() or killed:
                continue
            with contextlib.suppress(OSError):
                # whoever holds the lock of this very run is its first worker
                if any(file.readlink() == run / "lock" for file in (process / "fd").iterdir()):
                    victim = _sibling(process, instead) if instead else process
                    os.kill(int(victim.name), signal.SIGKILL)
                    killed.append(victim.name)

    threading.Thread(target=kill, daemon=True).start()
    return killed


def _sibling(process: Path, begins: bytes) -> Path:
    """A process, as a folder of /proc, that has the same parent; FileNotFoundError if none begins so."""

    def parent(one: Path) -> str:
        return (one / "stat").read_text().rpartition(")")[2].split()[1]

    for other in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if parent(other) == parent(process) and (other / "cmdline").read_bytes().startswith(begins):
                return other
    raise FileNotFoundError(begins)


def upload(bucket, directory: Path, prefix: str) -> None:
    """Upload all files below a directory."""
    for path in directory.rglob("*"):
        if path.is_file():
            name = f"{prefix}/{path.relative_to(directory)}"
            bucket.upload_file(str(path), name, ExtraArgs={"ChecksumAlgorithm": "SHA256"})


@pytest.fixture(params=["directory", pytest.param("s3", marks=pytest.mark.slow)])
def anywhere(request, tmp_path) -> str:
    """Return the URI of an empty store: a directory, or a prefix on a real S3 server."""
    if request.param == "directory":
        return str(tmp_path / "store")
    request.getfixturevalue("bucket")
    return "s3://models/store"


LONGER = {"optimization": {"steps": 60}, "checkpoints": {"every": 5}}
"""So long that a fault can be put between two checkpoints."""


def losses(points: list[tuple[int, dict]]) -> list[str]:
    """The three losses of each point of a curve, to the last bit."""
    return [values[name].hex() for _, values in points for name in ("loss/mlm", "loss/tlm", "loss/xlco")]


@pytest.fixture(scope="session")
def undisturbed(tiny_shards, tmp_path_factory) -> Path:
    """The run of a training by two workers that nothing disturbs: what disturbed ones, on Ray or not, must equal."""
    base = tmp_path_factory.mktemp("undisturbed")
    workers.start(_pretrain, 2, tiny_shards, base)
    return base / "run"


def _pretrain(rank: int, size: int, port: int, shards: Path, base: Path) -> None:
    """The body of a worker that nobody watches over."""
    from infoxlm_core.stages.pretraining import pretrain
    from tests.toys.pretraining import tiny_config

    workers.join(rank, size, port)
    pretrain(tiny_config(**LONGER), shards, base / "out", base / "run")


@pytest.fixture(scope="session")
def ray_here() -> Iterator[None]:
    """Ray on this machine with four workers, for all tests of the session."""
    import ray

    from components.adapters.ray import train

    train.start(4)
    yield
    ray.shutdown()

"""Helpers and fixtures of the tests of components."""

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
    """Return the steps and values of a metric in MLflow."""
    from mlflow import MlflowClient

    return [(point.step, point.value) for point in MlflowClient().get_metric_history(run_id, key)]


def two_processes() -> ProcessPoolExecutor:
    """Return two processes that have imported all they need and begin their first task at the same time."""
    spawn = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(2, spawn, initializer=_import_and_wait, initargs=(spawn.Barrier(2),))


def _import_and_wait(barrier) -> None:
    import mlflow.transformers
    import transformers

    assert mlflow.transformers
    assert transformers.pipeline
    barrier.wait(timeout=60)


def kill_first_worker(run: Path, instead: bytes = b"", after: int = 10) -> list[str]:
    """Kill the first worker of a training when it has saved a checkpoint.

    Args:
        run: directory of the training's checkpoints.
        instead: kill the sibling of the worker whose command line starts like this.
        after: step of the checkpoint.

    Returns:
        a list that receives the process id when the process is killed.
    """
    killed_ids: list[str] = []

    def kill() -> None:
        while not (run / f"step={after:010}/manifest.json").exists():
            time.sleep(0.01)
        for process in Path("/proc").glob("[0-9]*"):
            if int(process.name) == os.getpid() or killed_ids:
                continue
            with contextlib.suppress(OSError):
                # The first worker is the process that holds the lock of the run.
                is_first_worker = any(file.readlink() == run / "lock" for file in (process / "fd").iterdir())
                if is_first_worker:
                    victim = _find_sibling(process, instead) if instead else process
                    os.kill(int(victim.name), signal.SIGKILL)
                    killed_ids.append(victim.name)

    threading.Thread(target=kill, daemon=True).start()
    return killed_ids


def _find_sibling(process: Path, command: bytes) -> Path:
    """Return the folder in /proc of a process with the same parent whose command line starts with `command`."""

    def read_parent_id(folder: Path) -> str:
        return (folder / "stat").read_text().rpartition(")")[2].split()[1]

    for candidate in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            is_sibling = read_parent_id(candidate) == read_parent_id(process)
            if is_sibling and (candidate / "cmdline").read_bytes().startswith(command):
                return candidate
    raise FileNotFoundError(command)


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
"""Settings of a training that is long enough for a fault between two checkpoints."""


def losses(points: list[tuple[int, dict]]) -> list[str]:
    """Return the three losses of each point of a curve to the last bit."""
    return [values[name].hex() for _, values in points for name in ("loss/mlm", "loss/tlm", "loss/xlco")]


@pytest.fixture(scope="session")
def undisturbed(tiny_shards, tmp_path_factory) -> Path:
    """Return the run of an undisturbed training by two workers, which disturbed trainings must equal."""
    folder = tmp_path_factory.mktemp("undisturbed")
    workers.start(_pretrain, 2, tiny_shards, folder)
    return folder / "run"


def _pretrain(rank: int, size: int, port: int, shards: Path, folder: Path) -> None:
    """Train in a worker without a launcher."""
    from infoxlm_core.stages.pretraining import pretrain
    from tests.toys.pretraining import tiny_config

    workers.join(rank, size, port)
    pretrain(tiny_config(**LONGER), shards, folder / "out", folder / "run")


@pytest.fixture(scope="session")
def ray_here() -> Iterator[None]:
    """Run Ray on this machine with four workers for all tests of the session."""
    import ray

    from components.adapters.ray import train

    train.start_ray(4)
    yield
    ray.shutdown()

"""What every component does while it runs: end clearly, and find or make its artifact in the store by content.

A KFP artifact of ours is a small JSON file that says where in the store the bulk data is: `{"location", "digest"}`.
The store holds each artifact once, under a key of everything that decides its content:

    STORE/corpus/3f2a…/manifest.json     finished: found again by every later run with the same inputs
    STORE/runs/pretrained-77b0…/         checkpoints of a training; an interrupted one continues here
    STORE/outcome.json                   why the last stage failed, if it did: KFP keeps no exit codes
"""

import contextlib
import errno
import json
import logging
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from infoxlm_core import manifests
from infoxlm_core.config import StageConfig
from infoxlm_core.errors import InfoXLMError, InputError, StorageFull

logger = logging.getLogger(__name__)

OUTCOME = "outcome.json"
DRIVER = "INFOXLM_DRIVER_PID"
"""Environment variable of a local run: the process whose end ends every stage."""


@contextlib.contextmanager
def ending_clearly(store: str, name: str) -> Iterator[None]:
    """Run a stage's body; turn what goes wrong into one line, an exit code and `outcome.json`."""
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {name}: %(message)s", datefmt="%H:%M:%S", force=True)
    for chatty in ("httpx", "py4j", "matplotlib", "fontTools", "alembic"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    _end_with_driver()
    try:
        yield
        return
    except InfoXLMError as error:
        failure = error
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            traceback.print_exc()
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        failure = (
            StorageFull(f"{store}: no space left: free some, then run again") if full else InfoXLMError(repr(error))
        )
    except Exception as error:
        traceback.print_exc()
        failure = InfoXLMError(f"{type(error).__name__}: {error}")
    line = " ".join(str(failure).split())
    outcome = {"stage": name, "code": failure.exit_code, "class": type(failure).__name__, "message": line}
    with contextlib.suppress(OSError):  # a full disk must not hide why
        manifests.write_atomically(Path(store) / OUTCOME, json.dumps(outcome, indent=1))
    print(f"{name}: {type(failure).__name__}: {line}", file=sys.stderr, flush=True)
    sys.exit(failure.exit_code)


def _end_with_driver() -> None:
    """Ask this process to stop (SIGTERM) when the driver of a local run is gone: nobody waits for it any more."""
    driver = int(os.environ.get(DRIVER, "0"))

    def watch() -> None:
        while Path(f"/proc/{driver}").exists():
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)

    if driver and Path(f"/proc/{driver}").exists():
        threading.Thread(target=watch, name="driver-watch", daemon=True).start()


def key(kind: str, config: StageConfig, *inputs: str) -> str:
    """Name of an artifact: a digest of its config, the digests of its inputs and the code that makes it."""
    relevant = config.model_dump(mode="json", exclude={"checkpoints", "log_every"})
    return manifests.digest([kind, relevant, inputs, manifests.made_by()]).removeprefix("sha256:")[:16]


def make(store: str, kind: str, name: str, build: Callable[[Path], dict | None]) -> Path:
    """Return the artifact `kind/name` of the store; build it first if it is not there, whole or not at all.

    Args:
        build: fills an empty directory and returns the facts of the manifest.
    """
    final = Path(store) / kind / name
    if (final / manifests.NAME).is_file():
        manifests.read(final, kind, made_with=f"the stage that makes {kind} (remove the directory to make it again)")
        logger.info("found %s, made before from the same inputs", final)
        return final
    partial = final.with_name(f".{name}.{os.getpid()}")
    _sweep(final.parent, name)
    partial.mkdir(parents=True)
    try:
        facts = build(partial)
        manifests.write(partial, kind, facts)
        with contextlib.suppress(FileExistsError, OSError):
            if not final.exists():
                os.replace(partial, final)
        if not (final / manifests.NAME).is_file():
            raise InputError(f"{final} is in the way: it holds no manifest; remove it")
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return final


def _sweep(directory: Path, name: str) -> None:
    """Remove half-made directories of processes that are gone."""
    for path in directory.glob(f".{name}.*"):
        if not Path(f"/proc/{path.suffix[1:]}").exists():
            shutil.rmtree(path, ignore_errors=True)


def publish(artifact: Any, location: Path) -> None:
    """Let a KFP output artifact point to a directory of the store."""
    digest = json.loads((location / manifests.NAME).read_bytes())["digest"]
    Path(artifact.path).parent.mkdir(parents=True, exist_ok=True)
    manifests.write_atomically(Path(artifact.path), json.dumps({"location": str(location), "digest": digest}))
    artifact.metadata["digest"], artifact.metadata["location"] = digest, str(location)


def find(artifact: Any) -> tuple[Path, str]:
    """Where a KFP input artifact points to, and its digest."""
    said = json.loads(Path(artifact.path).read_bytes())
    return Path(said["location"]), said["digest"]


def facts(location: Path, metrics: Any) -> dict[str, float]:
    """The numbers in an artifact's manifest; they also become KFP metrics."""
    numbers = {
        name: value
        for name, value in json.loads((location / manifests.NAME).read_bytes())["facts"].items()
        if isinstance(value, int | float)
    }
    for name, value in numbers.items():
        metrics.log_metric(name.replace("/", "_"), value)
    return numbers


def run_id(store: str) -> str:
    """The MLflow run that all stages of this pipeline run share."""
    from components.adapters import mlflow_runs

    pipeline_run = os.environ.get("RUN_ID", "by-hand")  # set from the pod's label, or by the local runner
    return mlflow_runs.open_run(
        os.environ.get("MLFLOW_EXPERIMENT_NAME", "infoxlm"),
        os.environ.get("RUN_NAME", pipeline_run),
        {mlflow_runs.RUN_TAG: pipeline_run},
        Path(store),
    )

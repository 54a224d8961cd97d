"""What every component does while it runs: end clearly, and find or make its artifact in the store by content.

A KFP artifact of ours is a small JSON file that says where in the store the bulk data is: `{"location", "digest"}`.
The store holds each artifact once, under a key of everything that decides its content:

    STORE/corpus/3f2a…/manifest.json     finished: found again by every later run with the same inputs
    STORE/runs/pretrained-77b0…/         checkpoints of a training; an interrupted one continues here
    STORE/outcome.json                   why the last stage failed, if it did: KFP keeps no exit codes
"""

import contextlib
import fcntl
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from infoxlm_core import manifests
from infoxlm_core.config import StageConfig
from infoxlm_core.data.languages import is_known
from infoxlm_core.errors import InfoXLMError, InputError, StorageFull
from infoxlm_core.model.selection import FILE as SELECTION

logger = logging.getLogger(__name__)

OUTCOME = "outcome.json"
DRIVER = "INFOXLM_DRIVER_PID"
"""Environment variable of a local run: the process whose end ends every stage."""


@contextlib.contextmanager
def ending_clearly(
    store: str, name: str, trial: Mapping[str, Any] | None = None, point: Mapping[str, Any] | None = None
) -> Iterator[None]:
    """Run a stage's body; turn what goes wrong into one line, an exit code and `outcome.json`.

    Args:
        trial: of an ablation, so that every line says which variant speaks.
        point: of a suite, likewise.
    """
    if trial:
        name = f"{name} {trial['variant']} seed {int(trial['seed'])}"
    if point:
        name = f"{name} {point['name']}"
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {name}: %(message)s", datefmt="%H:%M:%S", force=True)
    for chatty in ("httpx", "py4j", "matplotlib", "fontTools", "alembic"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    _end_with_driver()
    try:
        yield
        return
    except InfoXLMError as error:
        failure = error
    except Exception as error:
        if manifests.is_full(error):
            failure = StorageFull(f"{store}: no space left ({error}): free some, then run again")
        else:
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
    made_by = manifests.made_by() if kind in ("scores", "points") else manifests.trained_by()
    return manifests.digest([kind, config.relevant(), inputs, made_by]).removeprefix("sha256:")[:16]


def given(paths: str | Sequence[str] | None) -> list[str]:
    """Digests of what a config names: files, models, folders of data. Their content belongs to the key, not the path.

    A file counts with its name, which often says language and split (`xquad.de.json`), and with that of its folder if
    this is a language's (`fr/dev_2k.tsv`).
    """
    named = [paths] if isinstance(paths, str) else paths or []
    found = [Path(path).absolute() for path in named]
    return [_digest_folder(path) if path.is_dir() else _digest_file(path) for path in found if path.exists()]


def given_as(roles: Mapping[str, Sequence[str]]) -> str:
    """One digest of data by what they are for: a file for training is another input than the same one for a test."""
    return manifests.digest({role: given(paths) for role, paths in roles.items()})


def _digest_file(path: Path) -> str:
    return manifests.digest([_language(path.parent), path.name, manifests.file_sha256(path)])


def _digest_folder(folder: Path) -> str:
    """Names and contents of the files below a folder; of a model only what is loaded, since more may lie beside it."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    if is_model := any(path.parent == folder and path.suffix == ".safetensors" for path in files):
        loaded, places = (".safetensors", ".json", ".model", ".txt"), [folder]
        if (folder / SELECTION).is_file():  # it may have models of single languages below it
            places += (folder / "steps").glob("*")
        files = [path for path in files if path.parent in places and path.suffix in loaded]
    files = [path for path in files if path.name != manifests.NAME]  # it also says which code made them
    content = {str(path.relative_to(folder)): manifests.file_sha256(path) for path in files}
    return manifests.digest(["" if is_model else _language(folder), content])


def _language(folder: Path) -> str:
    """The name of a folder if it is a language's: readers of its files go by it."""
    return folder.name if is_known(folder.name) else ""


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
    if final.exists():
        raise InputError(f"{final} is in the way: it holds no manifest; remove it")
    final.parent.mkdir(parents=True, exist_ok=True)
    _sweep(final.parent)
    partial = Path(tempfile.mkdtemp(prefix=".making-", dir=final.parent))
    try:
        with open(f"{partial}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # held while this process lives: nobody sweeps it away
            (partial / "it").mkdir()
            facts = build(partial / "it")
            manifests.write(partial / "it", kind, facts)
            try:
                os.replace(partial / "it", final)
            except OSError:
                if not (final / manifests.NAME).is_file():  # else somebody made the same meanwhile
                    raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        Path(f"{partial}.lock").unlink(missing_ok=True)
    return final


@contextlib.contextmanager
def alone(store: str, kind: str, name: str) -> Iterator[None]:
    """Wait until nobody else makes an artifact that takes long, and keep others waiting: its second maker finds it."""
    path = Path(store) / kind / f".{name}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as lock:  # it stays: whoever waits for it holds this very file
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("somebody else is making %s/%s: waiting", kind, name)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _sweep(directory: Path) -> None:
    """Remove what processes that are gone have left half-made."""
    for path in directory.glob(".making-*.lock"):
        with open(path) as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            shutil.rmtree(path.with_suffix(""), ignore_errors=True)
            path.unlink(missing_ok=True)


def publish(artifact: Any, location: Path) -> None:
    """Let a KFP output artifact point to a directory of the store."""
    digest = manifests.load(location)["digest"]
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
        name: value for name, value in manifests.load(location)["facts"].items() if isinstance(value, int | float)
    }
    for name, value in numbers.items():
        metrics.log_metric(name.replace("/", "_"), value)
    return numbers


def run_id(store: str, trial: Mapping[str, Any] | None = None, point: Mapping[str, Any] | None = None) -> str:
    """The MLflow run that all stages of this pipeline run share.

    A trial of an ablation, and a point of a suite, has its own, nested in that.
    """
    from components.adapters import mlflow_runs, point_runs, trial_runs

    pipeline_run = os.environ.get("RUN_ID", "by-hand")  # set from the pod's label, or by the local runner
    run = mlflow_runs.open_run(
        os.environ.get("MLFLOW_EXPERIMENT_NAME", "infoxlm"),
        os.environ.get("RUN_NAME", pipeline_run),
        {mlflow_runs.RUN_TAG: pipeline_run},
        Path(store),
    )
    if trial:
        return trial_runs.open_trial(run, pipeline_run, trial)
    return point_runs.open_point(run, pipeline_run, point) if point else run

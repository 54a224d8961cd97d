"""Run a pipeline on this machine, each step in a subprocess."""

import contextlib
import io
import json
import logging
import os
import re
import shutil
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, TextIO

from pydantic import Field
from typing_extensions import TypedDict

from components.adapters.storage import is_remote
from components.platform import artifacts, launchers, parameters, runtime, tracking
from components.platform.runtime import DRIVER, Ending
from components.platform.stage import IMAGE
from components.settings import environment
from infoxlm_core import errors, manifests, outside
from infoxlm_core.run_file import RunConfig

logger = logging.getLogger(__name__)


def run(dag: Any, arguments: Mapping[str, Any], store: str | Path, name: str, launcher: str = "") -> None:
    """Run a pipeline, or resume its unfinished run if the last run in the store had the same arguments.

    Args:
        dag: a function decorated with `dsl.pipeline` that has a parameter `store`.
        arguments: the other parameters of the pipeline, as plain values.
        store: directory or s3://bucket/prefix for artifacts and checkpoints. Without MLFLOW_TRACKING_URI, MLflow's
            SQLite database is in the local directory of the store.
        name: display name of the run.
        launcher: launcher of the workers, see `launchers`; if empty, the environment decides.

    Raises:
        InfoXLMError: the error of the stage that failed.
    """
    if launcher:
        os.environ[launchers.VARIABLE] = launcher
    launchers.local_launcher()  # raises an error for an unknown launcher before anything runs
    tracking.tracker()  # the same for an unknown tracker
    directory = artifacts.local_directory(str(store).rstrip("/")).resolve()
    directory.mkdir(parents=True, exist_ok=True)
    store = str(store).rstrip("/") if is_remote(store) else str(directory)
    identity = _identity(dag.name, arguments, directory, name)
    runtime.forget_failures(store, identity["run"])
    os.environ |= {
        DRIVER: str(os.getpid()),
        "RUN_ID": identity["run"],
        "RUN_NAME": name,
        "PYTHONUNBUFFERED": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "THP_MEM_ALLOC_ENABLE": "1",  # huge pages: allocating the gradient of the embeddings is 5 times faster
        "TOKENIZERS_PARALLELISM": "false",
        **{name: os.environ.get(name, value) for name, value in environment.ALLOCATOR.items()},
    }
    root = directory / "pipeline" / identity["run"]
    try:
        with _interruptible_loops():
            _run_dag(dag, {**parameters.fit(store, arguments), "store": store}, root)
    except RuntimeError as failure:  # KFP does not report the cause, but the stage wrote it to the store
        _end(store, directory, identity, runtime.find_ending(store))
        raise runtime.read_failure(store, identity["run"]) from failure
    except KeyboardInterrupt:
        _end(store, directory, identity, Ending("KILLED", message="the run was interrupted"))
        raise errors.Preempted("interrupted: run the same command again to continue") from None
    _end(store, directory, identity, Ending("FINISHED"))
    shutil.rmtree(root / "workspace", ignore_errors=True)


def sections(config: RunConfig, dag: Any) -> dict[str, Any]:
    """Return the sections of a config that are parameters of a pipeline, as plain values.

    Fields that are None are omitted, because KFP has no None. Parsing sets them to None again.
    """
    values = config.model_dump(mode="json", exclude_none=True)
    return {name: value for name, value in values.items() if name in dag.component_spec.inputs}


def read_summary(store: str | Path) -> str:
    """Return the results of the last run in a store for people; empty if the run has not come to its last step."""
    store = str(store).rstrip("/")
    directory = artifacts.local_directory(store)
    if not (directory / "run.json").is_file():
        return ""
    return runtime.read_summary(store, _last(directory)["run"])


class Identity(TypedDict):
    """The content of run.json, which describes the last run of a store.

    `run` is restricted because it names a folder that is deleted.
    """

    run: Annotated[str, Field(pattern=r"^\w[^/\x00]*$")]
    config: str
    status: str


def _last(store: Path) -> dict[str, Any]:
    return outside.read_json(store / "run.json", Identity, "delete it, then run again", errors.DataCorrupt)


@contextlib.contextmanager
def _interruptible_loops() -> Iterator[None]:
    """Make Ctrl-C and SIGTERM also stop loop items that have not started; KFP would start and await them."""
    path = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"  # KFP starts steps with `python3`

    def stop(*_: object) -> None:
        os.environ["PATH"] = "/nothing"  # no further step can be started
        raise KeyboardInterrupt

    os.environ["PATH"] = path
    signals = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signals.append(signal.SIGHUP)
    previous = {number: signal.signal(number, stop) for number in signals}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        os.environ["PATH"] = path


_NOISE = re.compile(
    r"\[KFP Executor|.*Wrote executor output file|\w+: (Metrics|Dataset|Model|HTML|Markdown|Artifact)\("
    r"|uri=|metadata=\{"
    r"|.*\(TrainController |.*\(PlacementGroupCleaner |.*authentication_token_setup"
    r"|.* - INFO - (Applying|After) expression selector|.* - INFO - Streamed logs:|.* outputs:$|Output: |-+$"
    r"|Loading weights:|\w+: \{'in_store'"
)
_WORKER = re.compile(r"(\x1b\[\d+m)*\(RayTrainWorker [^)]*\)(\x1b\[\d+m)* ?")

_BEFORE_JSON = -1


class QuietOutput(io.TextIOBase):
    """Standard output that shows the lines of our stages, and hides those of KFP and Ray; the log file has all.

    The steps of a loop write at the same time, each from its own thread.
    """

    def __init__(self, console: TextIO, log: Path) -> None:
        self.console = console
        self.log = log.open("a", encoding="utf-8")
        self.thread = threading.local()

    def write(self, text: str) -> int:
        thread = self.thread
        depth = getattr(thread, "depth", 0)  # open braces of the JSON that KFP prints when a step starts
        lines = (getattr(thread, "unfinished", "") + text).split("\n")
        thread.unfinished = lines.pop()
        for line in lines:
            self.log.write(line + "\n")
            plain = line.strip()
            if plain.endswith("Got executor_input:"):
                depth = _BEFORE_JSON
            elif depth:
                depth = max(depth, 0) + plain.count("{") - plain.count("}")
            elif plain and not _NOISE.match(plain):
                self.console.write(_WORKER.sub("", plain) + "\n")
        thread.depth = depth
        self.console.flush()
        self.log.flush()
        return len(text)


def _run_dag(dag: Any, arguments: Mapping[str, Any], root: Path) -> None:
    from kfp import local

    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", message=".* have no effect in the current local runner")
    warnings.filterwarnings("ignore", message="You may be attemping to run a task that uses custom")  # about the image
    workspace = root / "workspace"
    workspace.mkdir(parents=True, exist_ok=True)
    local.init(
        local.SubprocessRunner(use_venv=False),
        pipeline_root=str(root),
        workspace_root=str(workspace),
        enable_caching=False,  # KFP's local cache compares names; our store compares contents
    )
    for handler in logging.getLogger().handlers:  # KFP logs through the root handlers in a loop
        handler.addFilter(lambda record: "/kfp/" not in record.pathname)
    image = {"image": IMAGE} if "image" in dag.pipeline_spec.root.input_definitions.parameters else {}
    with contextlib.redirect_stdout(QuietOutput(sys.stdout, root / "log.txt")), _without_retries(dag.pipeline_spec):
        dag(**{**image, **arguments})


@contextlib.contextmanager
def _without_retries(spec: Any) -> Iterator[None]:
    """Disable retries, so that a failed step ends the local run at once and the user reads the cause."""
    before = spec.SerializeToString()
    for component in (spec.root, *spec.components.values()):
        for task in component.dag.tasks.values():
            task.ClearField("retry_policy")
    try:
        yield
    finally:
        spec.ParseFromString(before)


def _identity(dag: str, arguments: Mapping[str, Any], store: Path, name: str) -> dict[str, Any]:
    """Return the last run of the store if it is unfinished and has the same arguments, else write a new run.json."""
    path = store / "run.json"
    config_digest = manifests.digest([dag, arguments])
    if path.is_file():
        last = _last(store)
        if last["config"] == config_digest and last["status"] != "FINISHED":
            logger.info("continuing run %s", last["run"])
            return last
    identity = {"run": f"{name}-{time.strftime('%Y%m%d-%H%M%S')}", "config": config_digest, "status": "RUNNING"}
    manifests.write_atomically(path, json.dumps(identity))
    return identity


def _end(store: str, directory: Path, identity: dict[str, Any], ending: Ending) -> None:
    """Write how the run ended to run.json and to the tracker."""
    manifests.write_atomically(directory / "run.json", json.dumps(identity | {"status": ending.status}))
    try:
        tracking.end_unfinished(store, ending)
    except errors.InfoXLMError as error:
        logger.warning("the end of the run could not be reported to the tracker: %s", error)

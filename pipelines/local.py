"""Run a pipeline on this machine, each step in a subprocess."""

import contextlib
import io
import json
import logging
import os
import re
import shutil
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
from components.platform.runtime import DRIVER, FinalStatus
from components.platform.stage import IMAGE
from components.settings import environment
from infoxlm_core import errors, manifests, user_files
from infoxlm_core.run_file import RunConfig
from infoxlm_core.training import workers

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
    # Both calls raise ConfigError for an unknown name, before the first step starts.
    launchers.choose_local_launcher()
    tracking.tracker()
    store = str(store).rstrip("/")
    local_store = artifacts.local_directory(store).resolve()
    local_store.mkdir(parents=True, exist_ok=True)
    if not is_remote(store):
        store = str(local_store)  # absolute, because steps have another working directory

    identity = _continue_or_start(dag.name, arguments, local_store, name)
    run_id = identity["run"]
    runtime.delete_outcomes(store, run_id)
    _set_step_environment(run_id, name)
    run_directory = local_store / "pipeline" / run_id
    step_arguments = {**parameters.store_if_large(store, arguments), "store": store}
    try:
        with _interruptible_loops():
            _run_dag(dag, step_arguments, run_directory)
    except RuntimeError as failure:  # KFP does not report the cause, but the stage wrote it to the store
        _end(store, local_store, identity, runtime.find_final_status(store))
        raise runtime.read_failure(store, run_id) from failure
    except KeyboardInterrupt:
        _end(store, local_store, identity, FinalStatus("KILLED", message="the run was interrupted"))
        raise errors.Preempted("The run was interrupted. Run the same command again to continue.") from None
    _end(store, local_store, identity, FinalStatus("FINISHED"))
    shutil.rmtree(run_directory / "workspace", ignore_errors=True)


def _set_step_environment(run_id: str, name: str) -> None:
    """Set the environment variables that the subprocesses of the steps inherit."""
    os.environ |= {
        DRIVER: str(os.getpid()),
        "RUN_ID": run_id,
        "RUN_NAME": name,
        "PYTHONUNBUFFERED": "1",  # log lines appear at once
        "OMP_WAIT_POLICY": "PASSIVE",  # idle threads must not occupy cores that other processes need
        "THP_MEM_ALLOC_ENABLE": "1",  # huge pages: allocating the gradient of the embeddings is 5 times faster
        "TOKENIZERS_PARALLELISM": "false",  # its threads would deadlock in forked processes
    }
    for variable, value in environment.ALLOCATOR.items():
        os.environ.setdefault(variable, value)


def sections(config: RunConfig, dag: Any) -> dict[str, Any]:
    """Return the sections of a config that are parameters of a pipeline, as plain values.

    Fields that are None are omitted, because KFP has no None. When a step parses its section, they are None again.
    """
    values = config.model_dump(mode="json", exclude_none=True)
    return {name: value for name, value in values.items() if name in dag.component_spec.inputs}


def read_summary(store: str | Path) -> str:
    """Return the printable results of the last run in a store, or an empty text if its last step has not run."""
    store = str(store).rstrip("/")
    local_store = artifacts.local_directory(store)
    if not (local_store / "run.json").is_file():
        return ""
    last_run = _read_identity(local_store)
    return runtime.read_summary(store, last_run["run"])


class Identity(TypedDict):
    """The content of run.json, which describes the last run of a store.

    `run` is restricted because it names a folder that is deleted.
    """

    run: Annotated[str, Field(pattern=r"^\w[^/\x00]*$")]
    config: str
    status: str


def _read_identity(store: Path) -> dict[str, Any]:
    return user_files.read_json(store / "run.json", Identity, "delete it, then run again", errors.DataCorrupt)


@contextlib.contextmanager
def _interruptible_loops() -> Iterator[None]:
    """Make Ctrl-C, SIGTERM and SIGHUP stop a loop at once. KFP alone would first run all remaining items."""
    interpreter_directory = Path(sys.executable).parent
    path = f"{interpreter_directory}:{os.environ.get('PATH', '')}"  # KFP starts steps with `python3`

    def stop(*_: object) -> None:
        os.environ["PATH"] = "/nothing"  # no further step can be started
        raise KeyboardInterrupt

    os.environ["PATH"] = path
    try:
        with workers.handling_signals(stop):
            yield
    finally:
        os.environ["PATH"] = path


# Lines that KFP and Ray print about themselves.
_NOISE = re.compile(
    r"\[KFP Executor|.*Wrote executor output file|\w+: (Metrics|Dataset|Model|HTML|Markdown|Artifact)\("
    r"|uri=|metadata=\{"
    r"|.*\(TrainController |.*\(PlacementGroupCleaner |.*authentication_token_setup"
    r"|.* - INFO - (Applying|After) expression selector|.* - INFO - Streamed logs:|.* outputs:$|Output: |-+$"
    r"|Loading weights:|\w+: \{'in_store'"
)
# Ray's prefix of each line that a worker prints, with its colour codes.
_WORKER_PREFIX = re.compile(r"(\x1b\[\d+m)*\(RayTrainWorker [^)]*\)(\x1b\[\d+m)* ?")


class _LineState(threading.local):
    """What a thread has printed so far. The steps of a loop print at the same time, each from its own thread."""

    unfinished_line = ""
    is_in_json = False
    open_braces = 0


class QuietOutput(io.TextIOBase):
    """Standard output that hides lines of KFP and Ray. The log file receives all lines."""

    def __init__(self, console: TextIO, log: Path) -> None:
        self.console = console
        self.log = log.open("a", encoding="utf-8")
        self.state = _LineState()

    def write(self, text: str) -> int:
        """Log all complete lines of the text, and show those that are not noise."""
        lines = (self.state.unfinished_line + text).split("\n")
        self.state.unfinished_line = lines.pop()
        for line in lines:
            self.log.write(line + "\n")
            stripped = line.strip()
            if not self._is_noise(stripped):
                self.console.write(_WORKER_PREFIX.sub("", stripped) + "\n")
        self.console.flush()
        self.log.flush()
        return len(text)

    def _is_noise(self, line: str) -> bool:
        """Return whether a line is empty, or is one that KFP or Ray prints about itself."""
        state = self.state
        # When a step starts, KFP prints a line of announcement and its input as JSON of several lines.
        if line.endswith("Got executor_input:"):
            state.is_in_json = True
            state.open_braces = 0
            return True
        if state.is_in_json:
            state.open_braces += line.count("{") - line.count("}")
            state.is_in_json = state.open_braces != 0
            return True
        return not line or _NOISE.match(line) is not None


def _run_dag(dag: Any, arguments: Mapping[str, Any], run_directory: Path) -> None:
    """Run a pipeline with KFP's local runner, which starts a subprocess for each step.

    Raises:
        RuntimeError: a step failed.
    """
    from kfp import local

    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", message=".* have no effect in the current local runner")
    warnings.filterwarnings("ignore", message="You may be attemping to run a task that uses custom")  # about the image
    workspace = run_directory / "workspace"
    workspace.mkdir(parents=True, exist_ok=True)
    local.init(
        local.SubprocessRunner(use_venv=False),
        pipeline_root=str(run_directory),
        workspace_root=str(workspace),
        enable_caching=False,  # KFP's local cache compares names; our store compares contents
    )
    for handler in logging.getLogger().handlers:  # while a loop runs, KFP logs to the handlers of the root logger
        handler.addFilter(lambda record: "/kfp/" not in record.pathname)
    if "image" in dag.pipeline_spec.root.input_definitions.parameters:
        arguments = {"image": IMAGE, **arguments}
    output = QuietOutput(sys.stdout, run_directory / "log.txt")
    with contextlib.redirect_stdout(output), _without_retries(dag.pipeline_spec):
        dag(**arguments)


@contextlib.contextmanager
def _without_retries(spec: Any) -> Iterator[None]:
    """Disable retries, so that a failed step ends the local run at once and the user reads the cause."""
    original_spec = spec.SerializeToString()  # a protobuf message
    for component in (spec.root, *spec.components.values()):
        for task in component.dag.tasks.values():
            task.ClearField("retry_policy")
    try:
        yield
    finally:
        spec.ParseFromString(original_spec)


def _continue_or_start(pipeline: str, arguments: Mapping[str, Any], store: Path, name: str) -> dict[str, Any]:
    """Return the identity of the last run if it is unfinished and has the same arguments, else that of a new run."""
    path = store / "run.json"
    config_digest = manifests.digest([pipeline, arguments])
    if path.is_file():
        last_run = _read_identity(store)
        if last_run["config"] == config_digest and last_run["status"] != "FINISHED":
            logger.info("continuing run %s", last_run["run"])
            return last_run
    start_time = time.strftime("%Y%m%d-%H%M%S")
    identity = {"run": f"{name}-{start_time}", "config": config_digest, "status": "RUNNING"}
    manifests.write_atomically(path, json.dumps(identity))
    return identity


def _end(store: str, local_store: Path, identity: dict[str, Any], final: FinalStatus) -> None:
    """Write how the run ended to run.json and to the tracker."""
    ended_identity = {**identity, "status": final.status}
    manifests.write_atomically(local_store / "run.json", json.dumps(ended_identity))
    try:
        tracking.end_unfinished(store, final)
    except errors.InfoXLMError as error:
        # Do not raise: the error of the run itself, which the caller raises next, matters more to the user.
        logger.warning("the end of the run could not be reported to the tracker: %s", error)

"""Run a pipeline on this machine, with each step in a subprocess."""

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


def run_pipeline(pipeline: Any, arguments: Mapping[str, Any], store: str | Path, name: str, launcher: str = "") -> None:
    """Run a pipeline, or resume the last run in the store if it is unfinished and has the same arguments.

    Args:
        pipeline: function decorated with `dsl.pipeline` that has a parameter `store`.
        arguments: all other pipeline parameters, as plain values.
        store: directory or s3://bucket/prefix for artifacts and checkpoints. Without MLFLOW_TRACKING_URI, the store's
            local directory also contains MLflow's SQLite database.
        name: display name of the run.
        launcher: launcher of the workers, see `launchers`; if empty, the environment decides.

    Raises:
        InfoXLMError: the error of the failed stage.
    """
    set_launcher(launcher)
    store = str(store).rstrip("/")
    local_store = artifacts.local_directory(store).resolve()
    local_store.mkdir(parents=True, exist_ok=True)
    if not is_remote(store):
        store = str(local_store)  # absolute, because steps have a different working directory

    record = _resume_or_create_run(pipeline.name, arguments, local_store, name)
    run_id = record["run"]
    runtime.delete_outcomes(store, run_id)  # otherwise, a resumed run would report the error of the previous attempt
    _set_step_environment(run_id, name)
    run_directory = local_store / "pipeline" / run_id
    step_arguments = {**parameters.store_if_large(store, arguments), "store": store}
    try:
        with _stop_loops_on_signals():
            _run_with_kfp(pipeline, step_arguments, run_directory)
    except RuntimeError as failure:  # KFP does not report the cause, but the failed stage wrote it to the store
        _record_end(store, local_store, record, runtime.find_final_status(store))
        raise runtime.read_failure(store, run_id) from failure
    except KeyboardInterrupt:
        _record_end(store, local_store, record, FinalStatus("KILLED", message="the run was interrupted"))
        raise errors.Preempted("The run was interrupted. Run the same command again to continue.") from None
    _record_end(store, local_store, record, FinalStatus("FINISHED"))
    shutil.rmtree(run_directory / "workspace", ignore_errors=True)


def set_launcher(name: str) -> None:
    """Set the launcher of the workers for all steps, and check the names of the launcher and the tracker.

    Args:
        name: name of the launcher, see `launchers`; if empty, the environment decides.

    Raises:
        ConfigError: the launcher, or the tracker that the environment names, does not exist.
    """
    if name:
        os.environ[launchers.VARIABLE] = name
    launchers.choose_local_launcher()
    tracking.get_tracker()


def _set_step_environment(run_id: str, run_name: str) -> None:
    """Set the environment variables that all steps inherit."""
    os.environ |= {
        DRIVER: str(os.getpid()),  # steps end when this process ends
        "RUN_ID": run_id,
        "RUN_NAME": run_name,
        "PYTHONUNBUFFERED": "1",  # show log lines at once
        "OMP_WAIT_POLICY": "PASSIVE",  # keep idle threads from occupying cores
        "THP_MEM_ALLOC_ENABLE": "1",  # huge pages: the gradient of the embeddings is allocated 5 times faster
        "TOKENIZERS_PARALLELISM": "false",  # threads of tokenizers would deadlock in forked processes
    }
    for variable, value in environment.ALLOCATOR.items():  # the user's own values take precedence
        os.environ.setdefault(variable, value)


def select_sections(config: RunConfig, pipeline: Any) -> dict[str, Any]:
    """Return the config sections that are parameters of a pipeline, as plain values.

    Fields that are None are omitted, because KFP has no None. They are None again after a step has parsed the section.
    """
    sections = config.model_dump(mode="json", exclude_none=True)
    return {name: section for name, section in sections.items() if name in pipeline.component_spec.inputs}


def read_summary(store: str | Path) -> str:
    """Return the printable results of a store's last run, or "" if the run's last step has not run."""
    store = str(store).rstrip("/")
    local_store = artifacts.local_directory(store)
    if not (local_store / "run.json").is_file():
        return ""
    return runtime.read_summary(store, _read_run_record(local_store)["run"])


class RunRecord(TypedDict):
    """The content of run.json: id, digest of the arguments, and status of a store's last run.

    The pattern of `run` rejects paths, because a directory with this name is deleted. The name of a config file, with
    which an id begins, may have any other characters.
    """

    run: Annotated[str, Field(pattern=r"^[^/\x00]+-\d{8}-\d{6}$")]
    config: str
    status: str


def _read_run_record(store: Path) -> dict[str, Any]:
    """Return the content of run.json, the record of the last run. Raise DataCorrupt if the file is invalid."""
    return user_files.read_json(store / "run.json", RunRecord, "delete it, then run again", errors.DataCorrupt)


@contextlib.contextmanager
def _stop_loops_on_signals() -> Iterator[None]:
    """Stop a pipeline at once on Ctrl-C, SIGTERM or SIGHUP. KFP alone would first finish all iterations of a loop."""
    interpreter_directory = Path(sys.executable).parent
    search_path = f"{interpreter_directory}:{os.environ.get('PATH', '')}"  # KFP starts steps with `python3`

    def interrupt(*_: object) -> None:
        os.environ["PATH"] = "/nothing"  # no Python can be found, so the threads of a loop cannot start more steps
        raise KeyboardInterrupt

    os.environ["PATH"] = search_path
    try:
        with workers.handle_signals(interrupt):
            yield
    finally:
        os.environ["PATH"] = search_path  # undoes `interrupt`


# Lines that KFP and Ray print about themselves.
_NOISE = re.compile(
    r"\[KFP Executor|.*Wrote executor output file|\w+: (Metrics|Dataset|Model|HTML|Markdown|Artifact)\("
    r"|uri=|metadata=\{"
    r"|.*\(TrainController |.*\(PlacementGroupCleaner |.*authentication_token_setup"
    r"|.* - INFO - (Applying|After) expression selector|.* - INFO - Streamed logs:|.* outputs:$|Output: |-+$"
    r"|Loading weights:|\w+: \{'in_store'"
)
# Ray's prefix of worker output, with colour codes.
_WORKER_PREFIX = re.compile(r"(\x1b\[\d+m)*\(RayTrainWorker [^)]*\)(\x1b\[\d+m)* ?")


class _LineState(threading.local):
    """The output state of one thread. The steps of a loop print at the same time, each from its own thread."""

    unfinished_line = ""
    is_in_json = False
    """Whether the next line is part of the JSON that KFP prints when a step starts."""
    open_braces = 0


class QuietOutput(io.TextIOBase):
    """Standard output that hides lines of KFP and Ray. The log file receives all lines."""

    def __init__(self, console: TextIO, log: Path) -> None:
        self.console = console
        self.log = log.open("a", encoding="utf-8")
        self.state = _LineState()

    def write(self, text: str) -> int:
        """Write all complete lines to the log, and also write to the console those that users need."""
        lines = (self.state.unfinished_line + text).split("\n")
        self.state.unfinished_line = lines.pop()
        for line in lines:
            self.log.write(line + "\n")
            stripped_line = line.strip()
            is_json = self._skip_json(stripped_line)  # call for every line, because it counts braces
            if not is_json and stripped_line and not _NOISE.match(stripped_line):
                self.console.write(_WORKER_PREFIX.sub("", stripped_line) + "\n")
        self.console.flush()
        self.log.flush()
        return len(text)

    def _skip_json(self, line: str) -> bool:
        """Return whether a line is part of the JSON input that KFP prints when a step starts.

        The JSON follows the line "Got executor_input:" and ends with the line that closes the first brace.
        """
        state = self.state
        if line.endswith("Got executor_input:"):
            state.is_in_json = True
            state.open_braces = 0
            return True
        if not state.is_in_json:
            return False
        state.open_braces += line.count("{") - line.count("}")
        state.is_in_json = state.open_braces != 0
        return True


def _run_with_kfp(pipeline: Any, arguments: Mapping[str, Any], run_directory: Path) -> None:
    """Run a pipeline with KFP's local runner, which starts one subprocess per step.

    Raises:
        RuntimeError: a step failed.
    """
    from kfp import local

    # Hide warnings about KFP's own future, and about cluster settings without effect here, such as the image.
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", message=".* have no effect in the current local runner")
    warnings.filterwarnings("ignore", message="You may be attemping to run a task that uses custom")
    workspace = run_directory / "workspace"
    workspace.mkdir(parents=True, exist_ok=True)
    local.init(
        local.SubprocessRunner(use_venv=False),  # steps use this process's environment and install nothing
        pipeline_root=str(run_directory),
        workspace_root=str(workspace),  # by default, KFP makes a temporary directory and leaves it there
        enable_caching=False,  # KFP compares the names of inputs, but our store compares their contents
    )
    for handler in logging.getLogger().handlers:  # KFP logs to the root logger's handlers in a ParallelFor
        handler.addFilter(_is_not_from_kfp)
    # Pipelines require an image, although a local run starts no containers.
    if "image" in pipeline.pipeline_spec.root.input_definitions.parameters:
        arguments = {"image": IMAGE, **arguments}
    output = QuietOutput(sys.stdout, run_directory / "log.txt")
    with contextlib.redirect_stdout(output), _disable_retries(pipeline.pipeline_spec):
        pipeline(**arguments)


def _is_not_from_kfp(record: logging.LogRecord) -> bool:
    """Return whether a log record comes from code other than KFP."""
    return "/kfp/" not in record.pathname


@contextlib.contextmanager
def _disable_retries(spec: Any) -> Iterator[None]:
    """Disable retries of all steps in the block, so that a failed step ends a local run at once.

    Args:
        spec: pipeline specification, a protobuf message that is changed in place and later restored.
    """
    original_spec = spec.SerializeToString()  # the spec belongs to the imported pipeline, so changes would stay
    for component in (spec.root, *spec.components.values()):
        for task in component.dag.tasks.values():
            task.ClearField("retry_policy")
    try:
        yield
    finally:
        spec.ParseFromString(original_spec)


def _resume_or_create_run(pipeline: str, arguments: Mapping[str, Any], store: Path, name: str) -> dict[str, Any]:
    """Return the last run's record if the run is unfinished and has the same arguments. Otherwise create a run.

    Args:
        pipeline: name of the pipeline.
        arguments: arguments of the pipeline.
        store: local directory of the store, with the record of the last run.
        name: display name of a new run. The id of the new run begins with it.
    """
    path = store / "run.json"
    config_digest = manifests.digest([pipeline, arguments])
    if path.is_file():
        last_run = _read_run_record(store)
        if last_run["config"] == config_digest and last_run["status"] != "FINISHED":
            logger.info("continuing run %s", last_run["run"])
            return last_run
    start_time = time.strftime("%Y%m%d-%H%M%S")
    new_run = {"run": f"{name}-{start_time}", "config": config_digest, "status": "RUNNING"}
    manifests.write_atomically(path, json.dumps(new_run))
    return new_run


def _record_end(store: str, local_store: Path, record: dict[str, Any], final: FinalStatus) -> None:
    """Write the final status of a run to run.json and to the tracker."""
    manifests.write_atomically(local_store / "run.json", json.dumps({**record, "status": final.status}))
    try:
        tracking.end_unfinished(store, final)
    except errors.InfoXLMError as error:
        # Do not raise this error: the caller then raises the run's own error, which is more important to the user.
        logger.warning("the end of the run could not be reported to the tracker: %s", error)

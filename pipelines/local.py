"""Run a DAG of ours on this machine: every component in a subprocess, artifacts in a local store, no cluster."""

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
from components.platform.runtime import DRIVER
from components.platform.stage import IMAGE
from components.settings import environment
from infoxlm_core import errors, manifests, outside
from infoxlm_core.run_file import RunConfig

logger = logging.getLogger(__name__)


def run(
    dag: Any, arguments: Mapping[str, Any], store: str | Path, name: str, launcher: str = ""
) -> tracking.Run | None:
    """Run a pipeline; an interrupted run of the same pipeline with the same arguments continues where it was.

    Args:
        dag: a function decorated with `dsl.pipeline` that takes `store`, and as its other parameters `arguments`.
        arguments: everything the stages need, as plain values.
        store: directory for artifacts, checkpoints, and MLflow's SQLite file if MLFLOW_TRACKING_URI names no server; or
            s3://bucket/prefix.
        name: of the run, for people.
        launcher: of workers, see `launchers`; empty: as the environment says.

    Returns:
        what the tracker has of it; None if it does not answer any more. Artifacts are found by `artifact`.

    Raises:
        InfoXLMError: what the failed stage said, with its exit code.
    """
    os.environ |= {launchers.VARIABLE: launcher} if launcher else {}
    launchers.local_launcher()  # a wrong name is found out now
    tracking.tracker()
    here = artifacts.local(str(store).rstrip("/")).resolve()
    here.mkdir(parents=True, exist_ok=True)
    store = str(store).rstrip("/") if is_remote(store) else str(here)
    identity = _identity(dag.name, arguments, here, name)
    runtime.forget_failures(store, identity["run"])
    os.environ |= {
        DRIVER: str(os.getpid()),
        "RUN_ID": identity["run"],
        "RUN_NAME": name,
        "PYTHONUNBUFFERED": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "THP_MEM_ALLOC_ENABLE": "1",  # large pages: a gradient of the vocabulary is made in a fifth of the time
        "TOKENIZERS_PARALLELISM": "false",
        **{name: os.environ.get(name, value) for name, value in environment.ALLOCATOR.items()},
    }
    status = "FAILED"
    try:
        with _stopping_loops():
            _run_dag(dag, {**parameters.fit(store, arguments), "store": store}, here / "pipeline" / identity["run"])
        status = "FINISHED"
    except RuntimeError as failure:  # KFP says only that a task failed; the stage has left its reason
        raise runtime.read_failure(store, identity["run"]) from failure
    except KeyboardInterrupt:
        status = "KILLED"
        raise errors.Preempted("interrupted: run the same command again to go on") from None
    finally:
        ended = _end(store, here, identity, status)
    return ended


def sections(config: RunConfig, dag: Any) -> dict[str, Any]:
    """The sections of a config that a pipeline has parameters for, as plain values.

    KFP has no word for None: a field that is None is left out, which means the same.
    """
    values = config.model_dump(mode="json", exclude_none=True)
    return {name: value for name, value in values.items() if name in dag.component_spec.inputs}


def artifact(store: str | Path, task: str, output: str) -> Path | None:
    """Where on this machine an output of the last run here is, if its last attempt has made it."""
    here = artifacts.local(str(store).rstrip("/")).resolve()
    if not (here / "run.json").is_file():
        return None
    root = here / "pipeline" / _last(here)["run"]
    attempts = sorted(path for path in root.glob("infoxlm*") if path.is_dir())
    pointer = attempts[-1] / task / output if attempts else root
    if not pointer.is_file():
        return None
    said = outside.read_json(pointer, artifacts.Pointer, "run the same command again", errors.DataCorrupt)
    return artifacts.locate(said["location"], hashed=False)


class Identity(TypedDict):
    """What run.json of a store says of its last run. Its name becomes that of a folder, which is deleted in time."""

    run: Annotated[str, Field(pattern=r"^\w[^/\x00]*$")]
    config: str
    status: str


def _last(store: Path) -> dict[str, Any]:
    return outside.read_json(store / "run.json", Identity, "delete it, then run again", errors.DataCorrupt)


@contextlib.contextmanager
def _stopping_loops() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM also stop what a loop has not begun: KFP would start it all the same, and wait."""
    path = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"  # steps run `python3`

    def stop(*_: object) -> None:
        os.environ["PATH"] = "/nothing"  # no step can be started any more
        raise KeyboardInterrupt

    os.environ["PATH"] = path
    asking = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        asking.append(signal.SIGHUP)
    before = {number: signal.signal(number, stop) for number in asking}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        os.environ["PATH"] = path


_NOISE = re.compile(
    r"\[KFP Executor|.*Wrote executor output file|\w+: (Metrics|Dataset|Model|HTML|Markdown|Artifact)\("
    r"|uri=|metadata=\{"
    r"|.*\(TrainController |.*\(PlacementGroupCleaner |.*authentication_token_setup"
    r"|.* - INFO - (Applying|After) expression selector|.* - INFO - Streamed logs:|.* outputs:$|Output: |-+$"
    r"|Loading weights:"
)
_WORKER = re.compile(r"(\x1b\[\d+m)*\(RayTrainWorker [^)]*\)(\x1b\[\d+m)* ?")

_ABOUT_TO_OPEN = -1


class Readable(io.TextIOBase):
    """What our stages say, without what KFP and Ray say of themselves; all of it goes into a log file.

    The tasks of a loop speak at the same time, each from a thread of its own.
    """

    def __init__(self, console: TextIO, log: Path) -> None:
        self.console = console
        self.log = log.open("a", encoding="utf-8")
        self.speaker = threading.local()

    def write(self, text: str) -> int:
        speaker = self.speaker
        depth = getattr(speaker, "depth", 0)  # of the JSON that KFP shows at the beginning of a task
        *lines, speaker.begun = (getattr(speaker, "begun", "") + text).split("\n")
        for line in lines:
            self.log.write(line + "\n")
            plain = line.strip()
            if plain.endswith("Got executor_input:"):
                depth = _ABOUT_TO_OPEN
            elif depth:
                depth = (0 if depth == _ABOUT_TO_OPEN else depth) + plain.count("{") - plain.count("}")
            elif plain and not _NOISE.match(plain):
                self.console.write(_WORKER.sub("", plain) + "\n")
        speaker.depth = depth
        self.console.flush()
        self.log.flush()
        return len(text)


def _run_dag(dag: Any, arguments: Mapping[str, Any], root: Path) -> None:
    from kfp import local

    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", message=".* have no effect in the current local runner")
    warnings.filterwarnings("ignore", message="You may be attemping to run a task that uses custom")  # our image, here
    workspace = root / "workspace"
    workspace.mkdir(parents=True, exist_ok=True)
    local.init(
        local.SubprocessRunner(use_venv=False),
        pipeline_root=str(root),
        workspace_root=str(workspace),
        enable_caching=False,  # our store finds by content what KFP's local cache only finds by name
    )
    for handler in logging.getLogger().handlers:  # in a loop KFP also talks to them
        handler.addFilter(lambda record: "/kfp/" not in record.pathname)
    with contextlib.redirect_stdout(Readable(sys.stdout, root / "log.txt")), _without_retries(dag.pipeline_spec):
        here = {"image": IMAGE} if "image" in dag.pipeline_spec.root.input_definitions.parameters else {}
        dag(**{**here, **arguments})


@contextlib.contextmanager
def _without_retries(spec: Any) -> Iterator[None]:
    """Let a stage that fails fail at once: on a cluster it is tried again, here somebody reads why and mends it."""
    before = spec.SerializeToString()
    for part in (spec.root, *spec.components.values()):
        for task in part.dag.tasks.values():
            task.ClearField("retry_policy")
    try:
        yield
    finally:
        spec.ParseFromString(before)


def _identity(dag: str, arguments: Mapping[str, Any], store: Path, name: str) -> dict[str, Any]:
    """The run's id: that of the last run here if it was the same and did not finish, else a new one."""
    path = store / "run.json"
    wanted = manifests.digest([dag, arguments])
    if path.is_file():
        last = _last(store)
        if last["config"] == wanted and last["status"] != "FINISHED":
            logger.info("going on with run %s", last["run"])
            return last
    identity = {"run": f"{name}-{time.strftime('%Y%m%d-%H%M%S')}", "config": wanted, "status": "RUNNING"}
    manifests.write_atomically(path, json.dumps(identity))
    return identity


def _end(store: str, here: Path, identity: dict[str, Any], status: str) -> tracking.Run | None:
    """Write down how the run ended, here and for its tracker; return what that has of it."""
    manifests.write_atomically(here / "run.json", json.dumps(identity | {"status": status}))
    try:
        run = tracking.open_run(store)
        run.end(status)
    except errors.InfoXLMError as error:
        logger.warning("its tracker does not know how the run ended: %s", error)
        return None
    if status == "FINISHED":
        shutil.rmtree(here / "pipeline" / identity["run"] / "workspace", ignore_errors=True)
    return run

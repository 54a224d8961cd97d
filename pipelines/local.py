"""Run the same DAG on this machine: every component in a subprocess, artifacts in a local store, no cluster."""

import contextlib
import io
import json
import logging
import os
import re
import shutil
import sys
import time
import warnings
from pathlib import Path
from typing import TextIO

from components.adapters import mlflow_runs
from components.runtime import DRIVER, OUTCOME
from infoxlm_core import errors, manifests
from infoxlm_core.run_file import RunConfig

logger = logging.getLogger(__name__)
SECTIONS = ("preparation", "tokenization", "pretraining", "finetuning", "evaluation", "registration")


def run(config: RunConfig, store: Path, name: str) -> dict:
    """Run the pipeline; an interrupted run of the same config continues where it was.

    Args:
        config: everything the stages need.
        store: directory for artifacts, checkpoints, and MLflow's SQLite file if MLFLOW_TRACKING_URI names no server.
        name: of the run in MLflow.

    Returns:
        where to look: `store`, `scores` (directory with report.html), `mlflow` (tracking URI), `run_id`.

    Raises:
        InfoXLMError: what the failed stage said, with its exit code.
    """
    store = store.resolve()
    store.mkdir(parents=True, exist_ok=True)
    (store / OUTCOME).unlink(missing_ok=True)
    identity = _identity(config, store, name)
    os.environ |= {
        DRIVER: str(os.getpid()),
        "RUN_ID": identity["run"],
        "RUN_NAME": name,
        "PYTHONUNBUFFERED": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
    }
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"  # steps run `python3`
    root = store / "pipeline" / identity["run"]
    status = "FAILED"
    try:
        _run_dag(config, store, root)
        status = "FINISHED"
    except RuntimeError as failure:  # KFP says only that a task failed; the stage has left its reason
        raise _reason(store) from failure
    except KeyboardInterrupt:
        status = "KILLED"
        raise errors.Preempted("interrupted: run the same command again to go on") from None
    finally:
        run_id = _end(store, identity, status)
    return {
        "store": str(store),
        "scores": str(_scores(root)),
        "mlflow": mlflow_runs.tracking_uri(store),
        "run_id": run_id,
    }


_NOISE = re.compile(
    r"\[KFP Executor|.*Wrote executor output file|\w+: (Metrics|Dataset|Model|HTML|Artifact)\(|uri=|metadata=\{"
    r"|.*\(TrainController |.*\(PlacementGroupCleaner |.*authentication_token_setup"
)
_WORKER = re.compile(r"(\x1b\[\d+m)*\(RayTrainWorker [^)]*\)(\x1b\[\d+m)* ?")


class Readable(io.TextIOBase):
    """What our stages say, without what KFP and Ray say of themselves; all of it goes into a log file."""

    def __init__(self, console: TextIO, log: Path) -> None:
        self.console = console
        self.log = log.open("a", encoding="utf-8")
        self.line, self.dumping = "", False

    def write(self, text: str) -> int:
        self.log.write(text)
        *lines, self.line = (self.line + text).split("\n")
        for line in lines:
            plain = line.strip()
            self.dumping = self.dumping or plain.endswith("Got executor_input:")
            if plain and not self.dumping and not _NOISE.match(plain):
                self.console.write(_WORKER.sub("", plain) + "\n")
            self.dumping = self.dumping and line.rstrip() not in ("}", "    }")  # the runner may indent
        self.console.flush()
        self.log.flush()
        return len(text)


def _run_dag(config: RunConfig, store: Path, root: Path) -> None:
    from kfp import local

    from pipelines.infoxlm import infoxlm

    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", message=".* have no effect in the current local runner")
    workspace = root / "workspace"
    workspace.mkdir(parents=True, exist_ok=True)
    local.init(
        local.SubprocessRunner(use_venv=False),
        pipeline_root=str(root),
        workspace_root=str(workspace),
        enable_caching=False,  # our store finds by content what KFP's local cache only finds by name
    )
    # KFP has no word for None: a field that is None is left out, which means the same
    sections = {name: getattr(config, name).model_dump(mode="json", exclude_none=True) for name in SECTIONS}
    with contextlib.redirect_stdout(Readable(sys.stdout, root / "log.txt")):
        infoxlm(**sections, store=str(store), num_workers=config.num_workers)


def _identity(config: RunConfig, store: Path, name: str) -> dict:
    """The run's id: that of the last run here if it had the same config and did not finish, else a new one."""
    path = store / "run.json"
    wanted = manifests.digest(config.model_dump(mode="json"))
    if path.is_file():
        last = json.loads(path.read_bytes())
        if last["config"] == wanted and last["status"] != "FINISHED":
            logger.info("going on with run %s", last["run"])
            return last
    identity = {"run": f"{name}-{time.strftime('%Y%m%d-%H%M%S')}", "config": wanted, "status": "RUNNING"}
    manifests.write_atomically(path, json.dumps(identity))
    return identity


def _end(store: Path, identity: dict, status: str) -> str:
    """Write down how the run ended, here and in MLflow; return MLflow's id of it."""
    from components import runtime

    manifests.write_atomically(store / "run.json", json.dumps(identity | {"status": status}))
    try:
        run_id = runtime.run_id(str(store))
        mlflow_runs.end_run(run_id, status)
    except errors.InfoXLMError as error:
        logger.warning("MLflow does not know how the run ended: %s", error)
        return ""
    if status == "FINISHED":
        shutil.rmtree(store / "pipeline" / identity["run"] / "workspace", ignore_errors=True)
    return run_id


def _scores(root: Path) -> Path:
    """Where in the store the scores and the HTML report are, which KFP's artifact of the run points to."""
    pointers = sorted(root.glob("*/evaluate/scores"), key=lambda path: path.parent.parent.name)
    return Path(json.loads(pointers[-1].read_bytes())["location"])


def _reason(store: Path) -> errors.InfoXLMError:
    """What the failed stage wrote down."""
    try:
        outcome = json.loads((store / OUTCOME).read_bytes())
    except (OSError, ValueError):
        return errors.WorkerLost("a stage ended without a word (killed?): run the same command again to go on")
    return getattr(errors, outcome["class"], errors.InfoXLMError)(f"{outcome['stage']}: {outcome['message']}")

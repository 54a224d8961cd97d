"""Report the failure of a stage as one line, an exit code and an outcome in the store.

STORE/outcome/PIPELINE_RUN/STAGE.json    the failure of a stage: {"stage", "code", "class", "message", "run"}
STORE/outcome/PIPELINE_RUN/summary.txt   printable results of the run, which its last step writes
STORE/outcome/jobs/JOB.json              the failure of a RayJob
"""

import contextlib
import json
import logging
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from components.adapters import storage
from components.platform import artifacts
from components.settings import environment
from infoxlm_core import errors, user_files
from infoxlm_core.errors import InfoXLMError, InputError
from infoxlm_core.results.trials import Trial

logger = logging.getLogger(__name__)

DRIVER = "INFOXLM_DRIVER_PID"
"""Environment variable of a local run with the process id of its driver. Stages end when the driver ends."""
_NO_MESSAGE = "ended without an error message (killed, evicted or out of memory?)"
_VERBOSE_LIBRARIES = ("httpx", "py4j", "matplotlib", "fontTools", "alembic", "botocore")

Outcome = TypedDict(
    "Outcome", {"stage": str, "code": int, "class": str, "message": str, "run": NotRequired[str]}, total=True
)


@dataclass(frozen=True)
class FinalStatus:
    """How a pipeline run ended."""

    status: Literal["FINISHED", "FAILED", "KILLED"]
    failed_stage: str = ""
    """The stage that failed, if it is known."""
    message: str = ""
    """Why the run failed or was cancelled."""


@contextlib.contextmanager
def report_failure(store: str, stage: str, trial: Mapping[str, Any] | None = None, job: str = "") -> Iterator[None]:
    """Run the body of a stage. If it fails, print the error in one line, store it as an outcome, and exit.

    Args:
        store: directory, or s3://bucket/prefix.
        stage: name of the stage.
        trial: a trial of an ablation or a suite, whose name begins every log line.
        job: name of the RayJob that this process drives. The outcome is then stored under the name of the job, because
            another pipeline run may follow the same job.

    Raises:
        SystemExit: the body failed; the exit code is that of the error.
    """
    environment.apply_prefixed_variables(os.environ)
    if trial:
        stage = f"{stage} {Trial.parse(trial).name}"
    _configure_logging(stage)
    _terminate_with_driver()
    try:
        read_run_id()  # raises an error before any work is done if Kubeflow is too old
        if storage.is_remote(store) and store.endswith("/"):
            raise InputError(f"store {store}: remove the slash at its end")
        yield
    except BaseException as error:
        is_failure = isinstance(error, Exception) or user_files.is_panic(error)  # a Rust panic is no Exception
        if not is_failure:
            raise
        failure = _translate(error, store)
        message = " ".join(str(failure).split())
        _write_outcome(store, stage, job, failure, message)
        print(f"{stage}: {type(failure).__name__}: {message}", file=sys.stderr, flush=True)
        sys.exit(failure.exit_code)


def _configure_logging(stage: str) -> None:
    """Begin every log line with the time and the name of the stage, and silence libraries that log a lot."""
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {stage}: %(message)s", datefmt="%H:%M:%S", force=True)
    for library in _VERBOSE_LIBRARIES:
        logging.getLogger(library).setLevel(logging.WARNING)


def _write_outcome(store: str, stage: str, job: str, failure: InfoXLMError, message: str) -> None:
    """Write the failure of a stage, or of a RayJob if `job` names one, to the store.

    Errors of the store are ignored, because neither a full disk nor an outdated Kubeflow may hide the failure, which is
    also printed.
    """
    with contextlib.suppress(OSError, InfoXLMError):
        outcome = {
            "stage": stage,
            "code": failure.exit_code,
            "class": type(failure).__name__,
            "message": message,
            "run": read_run_id(),
        }
        path = outcome_path(job, "jobs") if job else outcome_path(stage)
        artifacts.write(store, path, json.dumps(outcome, indent=1))


def read_run_id() -> str:
    """Return the id of this pipeline run from RUN_ID, or `by-hand` outside of a pipeline.

    Raises:
        InputError: this Kubeflow is too old to set RUN_ID in its pods.
    """
    if not os.environ.get("RUN_ID") and os.environ.get("KFP_POD_NAME"):
        raise InputError("RUN_ID is not set: Kubeflow Pipelines is too old (backend before 2.17): update it, run again")
    return os.environ.get("RUN_ID") or "by-hand"


def outcome_path(name: str, run: str = "") -> str:
    """Return the path in the store for the outcome of a stage of a run (default: this run), or of a RayJob."""
    file_name = re.sub(r"[^\w.-]+", "-", name)
    return f"outcome/{run or read_run_id()}/{file_name}.json"


def read_outcome(store: str, path: str) -> dict[str, Any] | None:
    """Return the outcome of a stage or a job, or None if it is missing or malformed."""
    content = artifacts.read(store, path)
    if not content:
        return None
    try:
        return user_files.parse_json(content, Outcome, path, "read the log instead")
    except InputError as error:
        logger.warning("%s", error)
        return None


def read_failure(store: str, run: str) -> InfoXLMError:
    """Return the error of the stage of a pipeline run that failed last.

    Raises:
        InputError, StorageUnavailable: the store refuses, or does not answer.
    """
    outcome = _read_last_outcome(store, run)
    if outcome:
        return errors.from_name(outcome["class"], f"{outcome['stage']}: {outcome['message']}")
    return errors.WorkerLost(f"a stage of run {run} {_NO_MESSAGE}: run it again to continue")


def find_final_status(store: str) -> FinalStatus:
    """Return how this unsuccessful pipeline run ended: it was cancelled, or a stage of it failed.

    Raises:
        InputError, StorageUnavailable: the store refuses, or does not answer.
    """
    if _is_cancelled():
        return FinalStatus("KILLED", message="the run was cancelled")
    outcome = _read_last_outcome(store, read_run_id())
    if outcome:
        return FinalStatus("FAILED", outcome["stage"], outcome["message"])
    return FinalStatus("FAILED", message=f"a stage {_NO_MESSAGE}")


def _read_last_outcome(store: str, run: str) -> dict[str, Any] | None:
    """Return the newest outcome of a pipeline run, or None if no stage wrote one."""
    folder = f"{store}/outcome/{run}"
    files = [entry for entry in storage.open(folder).entries() if entry.name.endswith(".json")]
    files.sort(key=lambda entry: (entry.modified, entry.name))
    for file in reversed(files):
        outcome = read_outcome(folder, file.name)
        if outcome:
            return outcome
    return None


def _is_cancelled() -> bool:
    """Return whether the Argo workflow of this step was terminated; outside of a workflow, return False."""
    if not os.environ.get("KFP_POD_NAME"):
        return False
    from components.adapters.kuberay import api

    try:
        jobs = api.connect()
        workflow = jobs.find_workflow()
        return workflow is not None and not jobs.is_workflow_running(workflow)
    except (api.Unavailable, InputError) as error:
        logger.warning("cannot find out from Kubernetes whether the run was cancelled: %s", error)
        return False


def write_summary(store: str, text: str) -> None:
    """Write the printable results of this pipeline run, which `infoxlm run` and `infoxlm submit` print at its end."""
    artifacts.write(store, _summary_path(read_run_id()), text)


def read_summary(store: str, run: str) -> str:
    """Return the printable results of a pipeline run, or "" if the run has not written them.

    Raises:
        InputError, StorageUnavailable: the store refuses, or does not answer.
    """
    return (artifacts.read(store, _summary_path(run)) or b"").decode()


def _summary_path(run: str) -> str:
    """Return the path in the store for the printable results of a pipeline run."""
    return f"outcome/{run}/summary.txt"


def delete_outcomes(store: str, run: str) -> None:
    """Delete the outcomes and the summary of a pipeline run before the run is repeated."""
    folder = storage.open(f"{store}/outcome/{run}")
    names = [stored_file.name for stored_file in folder.entries()]
    folder.delete(*names)


def _translate(error: BaseException, store: str) -> InfoXLMError:
    """Return the InfoXLMError for any error. Print the traceback of an unexpected error."""
    if isinstance(error, InfoXLMError):
        return error
    translated = user_files.translate_error(error, store)
    if translated:
        return translated
    traceback.print_exc()
    return InfoXLMError(f"{type(error).__name__}: {error}")


def _terminate_with_driver() -> None:
    """Send SIGTERM to this process when the driver of a local run ends, because then nobody waits for the stage."""
    driver_process = Path("/proc", os.environ.get(DRIVER) or "none")
    if driver_process.exists():
        threading.Thread(target=_wait_and_terminate, args=(driver_process,), name="driver-watch", daemon=True).start()


def _wait_and_terminate(driver_process: Path) -> None:
    """Wait until a process has ended, whose folder in /proc is given, and send SIGTERM to this process."""
    while driver_process.exists():
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGTERM)

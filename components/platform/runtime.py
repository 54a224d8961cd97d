"""Report a stage's failure as one line on standard error, an exit code, and an outcome in the store.

STORE/outcome/PIPELINE_RUN/STAGE.json    failure of a stage: {"stage", "code", "class", "message", "run"}
STORE/outcome/PIPELINE_RUN/summary.txt   printable results of the run, written by its last step
STORE/outcome/jobs/JOB.json              failure of a RayJob
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
"""Environment variable with the process id of a local run's driver. The stages end when the driver ends."""
_ENDED_SILENTLY = "ended without an error message (killed, evicted or out of memory?)"
_VERBOSE_LIBRARIES = ("httpx", "py4j", "matplotlib", "fontTools", "alembic", "botocore")

Outcome = TypedDict("Outcome", {"stage": str, "code": int, "class": str, "message": str, "run": NotRequired[str]})


@dataclass(frozen=True)
class FinalStatus:
    """Final status of a pipeline run."""

    status: Literal["FINISHED", "FAILED", "KILLED"]
    failed_stage: str = ""
    """Name of the failed stage; empty if unknown."""
    message: str = ""
    """Reason for the failure or the cancellation."""


@contextlib.contextmanager
def report_failure(store: str, stage: str, trial: Mapping[str, Any] | None = None, job: str = "") -> Iterator[None]:
    """Run the block, which is the body of a stage. If it fails, print the error in one line, store it, and exit.

    The stored error is called an outcome. Later steps and the user's command read it.

    Args:
        store: directory, or s3://bucket/prefix.
        stage: name of the stage.
        trial: trial of an ablation or a suite, whose name appears in every log line.
        job: name of the RayJob that this process drives, if any. The outcome is then stored under the job's name,
            because several pipeline runs may follow the same job.

    Raises:
        SystemExit: the block failed; the exit code is the error's exit code.
    """
    # A prefix has kept our variables apart from Kubeflow's, because a pod must not set a variable twice.
    environment.apply_prefixed_variables(os.environ)
    if trial:
        stage = f"{stage} {Trial.parse(trial).name}"
    _configure_logging(stage)
    _terminate_with_driver()
    try:
        read_run_id()  # if Kubeflow is too old, fail before doing any work
        # For S3, `prefix//corpus` and `prefix/corpus` are different names.
        if storage.is_remote(store) and store.endswith("/"):
            raise InputError(f"store {store}: remove the slash at its end")
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and not user_files.is_panic(error):  # a Rust panic is not an Exception
            raise
        failure = _translate(error, store)
        message = " ".join(str(failure).split())  # without line breaks
        _write_outcome(store, stage, job, failure, message)
        print(f"{stage}: {type(failure).__name__}: {message}", file=sys.stderr, flush=True)
        sys.exit(failure.exit_code)


def _configure_logging(stage: str) -> None:
    """Begin every log line with the time and the stage's name. Log only warnings of verbose libraries."""
    # `force` replaces the handler of KFP's executor.
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {stage}: %(message)s", datefmt="%H:%M:%S", force=True)
    for library in _VERBOSE_LIBRARIES:
        logging.getLogger(library).setLevel(logging.WARNING)


def _write_outcome(store: str, stage: str, job: str, failure: InfoXLMError, message: str) -> None:
    """Write the failure of a stage, or of the RayJob `job`, to the store.

    Errors of the disk, of the store and of `read_run_id` are ignored, so that they do not hide the original failure.
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
    """Return the store path for the outcome of a stage (default: in this run). For a RayJob, `run` is `jobs`."""
    file_name = re.sub(r"[^\w.-]+", "-", name)
    return f"outcome/{run or read_run_id()}/{file_name}.json"


def read_outcome(store: str, path: str) -> dict[str, Any] | None:
    """Return the outcome of a stage or a job, or None if it is missing or malformed."""
    content = artifacts.read(store, path)
    if not content:
        return None
    try:
        return user_files.parse_json(content, Outcome, path, "read the log instead")
    except InputError as error:  # a damaged report of a failure must not become another failure
        logger.warning("%s", error)
        return None


def read_failure(store: str, run: str) -> InfoXLMError:
    """Return the error of the last failed stage in a pipeline run.

    Raises:
        InputError, StorageUnavailable: the store refuses, or does not answer.
    """
    outcome = _read_last_outcome(store, run)
    if outcome:
        return errors.from_name(outcome["class"], f"{outcome['stage']}: {outcome['message']}")
    return errors.WorkerLost(f"a stage of run {run} {_ENDED_SILENTLY}: run it again to continue")


def find_final_status(store: str) -> FinalStatus:
    """Find out whether this unsuccessful pipeline run was cancelled or which stage failed. Return its final status.

    Raises:
        InputError, StorageUnavailable: the store refuses, or does not answer.
    """
    if _is_cancelled():
        return FinalStatus("KILLED", message="the run was cancelled")
    outcome = _read_last_outcome(store, read_run_id())
    if outcome:
        return FinalStatus("FAILED", outcome["stage"], outcome["message"])
    return FinalStatus("FAILED", message=f"a stage {_ENDED_SILENTLY}")


def _read_last_outcome(store: str, run: str) -> dict[str, Any] | None:
    """Return a pipeline run's newest readable outcome, or None if no stage has stored an outcome."""
    directory = f"{store}/outcome/{run}"
    files = [entry for entry in storage.open(directory).entries() if entry.name.endswith(".json")]
    # S3 has only whole seconds, so times may be equal.
    files.sort(key=lambda entry: (entry.modified, entry.name))
    for file in reversed(files):
        outcome = read_outcome(directory, file.name)
        if outcome:
            return outcome
    return None


def _is_cancelled() -> bool:
    """Return whether this step's Argo workflow was terminated. Outside a workflow, return False."""
    if not os.environ.get("KFP_POD_NAME"):
        return False
    from components.adapters.kuberay import api

    try:
        jobs = api.connect()
        workflow = jobs.find_workflow()
        return workflow is not None and not jobs.is_workflow_running(workflow)
    except (api.Unavailable, InputError) as error:  # treat the run as failed instead of cancelled
        logger.warning("cannot find out from Kubernetes whether the run was cancelled: %s", error)
        return False


def write_summary(store: str, text: str) -> None:
    """Write the printable results of this pipeline run. `infoxlm run` and `infoxlm submit` print them after the run."""
    artifacts.write(store, _summary_path(read_run_id()), text)


def read_summary(store: str, run: str) -> str:
    """Return the printable results of a pipeline run, or "" if the run has written no results.

    Raises:
        InputError, StorageUnavailable: the store refuses, or does not answer.
    """
    return (artifacts.read(store, _summary_path(run)) or b"").decode()


def _summary_path(run: str) -> str:
    """Return the store path for a pipeline run's printable results."""
    return f"outcome/{run}/summary.txt"


def delete_outcomes(store: str, run: str) -> None:
    """Delete a pipeline run's outcomes and summary before the run is repeated."""
    outcome_store = storage.open(f"{store}/outcome/{run}")
    outcome_store.delete(*(file.name for file in outcome_store.entries()))


def _translate(error: BaseException, store: str) -> InfoXLMError:
    """Translate any error to an InfoXLMError. Print the traceback of an unexpected error."""
    if isinstance(error, InfoXLMError):
        return error
    translated = user_files.translate_error(error, store)
    if translated:
        return translated
    traceback.print_exc()
    return InfoXLMError(f"{type(error).__name__}: {error}")


def _terminate_with_driver() -> None:
    """Start a thread that sends SIGTERM to this process when the driver of a local run ends."""
    driver_process = Path("/proc", os.environ.get(DRIVER) or "none")  # a directory of Linux; macOS has no /proc
    if driver_process.exists():
        threading.Thread(target=_wait_and_terminate, args=(driver_process,), name="driver-watch", daemon=True).start()


def _wait_and_terminate(driver_process: Path) -> None:
    """Wait until the driver's directory in /proc disappears, and send SIGTERM to this process."""
    while driver_process.exists():
        time.sleep(0.5)
    # On SIGTERM, a training run saves a checkpoint first.
    os.kill(os.getpid(), signal.SIGTERM)

"""The driver of a RayJob, which builds the artifact that a file of the store describes, and records a failure.

    python -m components.platform.job s3://bucket/store/work/j-pretrain-3f2a9c01de.json
    python -m components.platform.job --leave s3://… 100    a pod of the job is being stopped: save within 100 s

A step that is asked to stop deletes its job. A killed step cannot, so a job ends itself when no step follows it.
"""

import logging
import os
import sys
import threading
import time

from components.adapters import lease, storage
from components.platform import artifacts, launchers, runtime
from components.platform.builds import BuildSpec
from infoxlm_core import user_files
from infoxlm_core.errors import InfoXLMError, InputError, Preempted

logger = logging.getLogger(__name__)

HEARTBEAT_TIMEOUT_SECONDS = 900.0
"""The job ends itself after this time without a heartbeat of its step; a retried step may take minutes to start."""
_HEARTBEAT_POLL_SECONDS = 30.0
_STOP_POLL_SECONDS = 1.0
_SAVE_TIMEOUT_SECONDS = 600.0  # to write and upload the last checkpoint
_EXIT_TIMEOUT_SECONDS = 60.0  # for a training run that has saved to end this process by itself


def main(url: str) -> None:
    """Build the artifact that a file of the store describes. If that fails, exit with the code of the error.

    Args:
        url: location of the file, STORE/work/JOB.json, which contains a `BuildSpec`.
    """
    store, _, file = url.rpartition("/work/")
    name = file.removesuffix(".json")
    with runtime.report_failure(store, "job", job=name):
        spec = _read_spec(url)
        os.environ["RUN_ID"] = spec.pipeline_run
        storage.open(store).delete(runtime.outcome_path(name, "jobs"))  # of an earlier attempt
        for watch in (_end_without_heartbeat, _forward_stop_request):
            threading.Thread(target=watch, args=(spec,), name=watch.__name__, daemon=True).start()
        launchers.run_locally(spec)


def request_stop(url: str, timeout_seconds: float) -> None:
    """Ask the training run of a job to save and stop, and wait until it has done so.

    Args:
        url: location of the job's description in the store.
        timeout_seconds: longest time to wait.
    """
    spec = _read_spec(url)
    deadline = time.monotonic() + timeout_seconds
    if not _holds_lease(spec):
        return
    artifacts.write(spec.store, f"runs/{spec.run}/stop", spec.job)
    while _holds_lease(spec) and time.monotonic() < deadline:  # the training run releases its lease after it has saved
        time.sleep(1)


def _holds_lease(spec: BuildSpec) -> bool:
    """Return whether a job holds the lease of its training run. A job that prepares text has no training run."""
    if not spec.run:
        return False
    lease_state, _ = lease.read(f"{spec.store}/runs/{spec.run}/lease.json")
    return lease_state["holder"] == spec.job


def _end_without_heartbeat(spec: BuildSpec) -> None:
    """Save a checkpoint and end this process when the step has written no heartbeat for a long time."""
    last_heartbeat = b""
    last_change_time = time.monotonic()
    while time.monotonic() - last_change_time < HEARTBEAT_TIMEOUT_SECONDS:
        time.sleep(min(_HEARTBEAT_POLL_SECONDS, HEARTBEAT_TIMEOUT_SECONDS / 10))  # tests set a short timeout
        try:
            heartbeat = artifacts.read(spec.store, launchers.heartbeat_path(spec.job)) or b""
        except InfoXLMError:  # without the storage, nobody can tell whether the step is alive
            last_change_time = time.monotonic()
            continue
        if heartbeat != last_heartbeat:
            last_heartbeat = heartbeat
            last_change_time = time.monotonic()
    message = "no step has followed %s for %.0f s: saving a checkpoint and ending the job"
    logger.error(message, spec.job, HEARTBEAT_TIMEOUT_SECONDS)
    try:
        request_stop(f"{spec.store}/work/{spec.job}.json", _SAVE_TIMEOUT_SECONDS)
        time.sleep(_EXIT_TIMEOUT_SECONDS)
    finally:
        os._exit(Preempted.exit_code)


def _forward_stop_request(spec: BuildSpec) -> None:
    """Forward a request to stop, which only this process has received, to the workers in other pods.

    When KubeRay deletes the job, Ray sends SIGTERM only to the driver, whose handler writes a file to this pod's disk.
    """
    if not spec.run:
        return
    request_file = artifacts.local_directory(spec.store) / "runs" / spec.run / "stop"
    is_forwarded = False
    while not is_forwarded:
        time.sleep(_STOP_POLL_SECONDS)
        if not request_file.exists():
            continue
        try:
            request_stop(f"{spec.store}/work/{spec.job}.json", timeout_seconds=0)
            is_forwarded = True
        except InfoXLMError as error:
            logger.warning("the request to stop could not be sent to the workers: %s", error)


def _read_spec(url: str) -> BuildSpec:
    """Return the description of an artifact to build from a file of the store.

    Raises:
        InputError: the file is missing or malformed.
    """
    file = storage.open(url).get()
    if file is None:
        raise InputError(f"{url} does not exist: submit the pipeline again")
    content, _ = file
    return user_files.parse_json(content, BuildSpec, url, "submit the pipeline again")


if __name__ == "__main__":
    if sys.argv[1] == "--leave":
        request_stop(sys.argv[2], float(sys.argv[3]))
    else:
        main(sys.argv[1])

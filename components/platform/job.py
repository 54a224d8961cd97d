"""The driver of a RayJob. It builds an artifact from a build spec in the store, and records a failure in the store.

    python -m components.platform.job s3://bucket/store/work/j-pretrain-3f2a9c01de.json
    python -m components.platform.job --leave s3://… 100    a pod of the job is being stopped: save within 100 s

A step that is asked to stop deletes its job. A killed step cannot do so. Therefore, a job without a step ends itself.
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
"""Time without a heartbeat from the step after which a job ends itself. A retried step may take minutes to start."""
_HEARTBEAT_POLL_SECONDS = 30.0
_STOP_POLL_SECONDS = 1.0  # short, because the grace period of a deleted pod is running
_SAVE_TIMEOUT_SECONDS = 600.0  # time to write and upload the last checkpoint
_EXIT_TIMEOUT_SECONDS = 60.0  # after its last checkpoint, a training run has this time to end the process


def main(url: str) -> None:
    """Build an artifact from its build spec. If the build fails, exit with the error's exit code.

    Args:
        url: location of the build spec, STORE/work/JOB.json.
    """
    store, _, file = url.rpartition("/work/")
    name = file.removesuffix(".json")
    with runtime.report_failure(store, "job", job=name):
        spec = _read_spec(url)
        os.environ["RUN_ID"] = spec.pipeline_run  # the costs and the failure of this job belong to the pipeline run
        storage.open(store).delete(runtime.outcome_path(name, "jobs"))  # an earlier attempt may have written it
        for watch in (_end_without_heartbeat, _forward_stop_request):
            threading.Thread(target=watch, args=(spec,), name=watch.__name__, daemon=True).start()
        launchers.run_locally(spec)


def request_stop(spec: BuildSpec, timeout_seconds: float) -> None:
    """Ask a job's training run to save and stop, and wait for the run to stop.

    The lease, the right to write to a training run, tells whether the job still trains.

    Args:
        spec: build spec of the job.
        timeout_seconds: longest time to wait.
    """
    deadline = time.monotonic() + timeout_seconds
    if not _holds_lease(spec):  # the job is not training, so it has nothing to save
        return
    artifacts.write(spec.store, f"runs/{spec.run}/stop", spec.job)
    while _holds_lease(spec) and time.monotonic() < deadline:  # the training run saves before releasing its lease
        time.sleep(1)


def _holds_lease(spec: BuildSpec) -> bool:
    """Return whether a job holds the lease on its training run. A job that processes text has no training run."""
    if not spec.run:
        return False
    lease_state, _ = lease.read(f"{spec.store}/runs/{spec.run}/lease.json")
    return lease_state["holder"] == spec.job


def _end_without_heartbeat(spec: BuildSpec) -> None:
    """Wait until the step stops writing heartbeats. Then save a checkpoint and end this process."""
    last_heartbeat = b""
    last_change_time = time.monotonic()
    while time.monotonic() - last_change_time < HEARTBEAT_TIMEOUT_SECONDS:
        time.sleep(min(_HEARTBEAT_POLL_SECONDS, HEARTBEAT_TIMEOUT_SECONDS / 10))  # tests set shorter timeouts
        try:
            heartbeat = artifacts.read(spec.store, launchers.heartbeat_path(spec.job)) or b""
        except InfoXLMError:  # if the storage is unavailable, the step may still be alive
            last_change_time = time.monotonic()
            continue
        if heartbeat != last_heartbeat:
            last_heartbeat = heartbeat
            last_change_time = time.monotonic()
    message = "no step has followed %s for %.0f s: saving a checkpoint and ending the job"
    logger.error(message, spec.job, HEARTBEAT_TIMEOUT_SECONDS)
    try:
        request_stop(spec, _SAVE_TIMEOUT_SECONDS)
        time.sleep(_EXIT_TIMEOUT_SECONDS)  # the training run usually ends the process itself
    finally:  # even if no checkpoint was saved, because only the end of this process releases the GPUs
        os._exit(Preempted.exit_code)  # `sys.exit` would end only this thread


def _forward_stop_request(spec: BuildSpec) -> None:
    """Forward a request to stop from this process to the workers in other pods.

    When KubeRay deletes the job, Ray sends SIGTERM only to the driver. Its signal handler writes a file to this pod's
    disk, which workers in other pods cannot read.
    """
    if not spec.run:  # text processing saves no checkpoint
        return
    request_file = artifacts.local_directory(spec.store) / "runs" / spec.run / "stop"
    while True:
        time.sleep(_STOP_POLL_SECONDS)
        if not request_file.exists():
            continue
        try:
            request_stop(spec, timeout_seconds=0)
            return
        except InfoXLMError as error:  # the storage may answer at the next attempt
            logger.warning("the request to stop could not be sent to the workers: %s", error)


def _read_spec(url: str) -> BuildSpec:
    """Read a build spec from the store.

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
        request_stop(_read_spec(sys.argv[2]), float(sys.argv[3]))
    else:
        main(sys.argv[1])

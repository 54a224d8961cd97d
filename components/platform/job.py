"""The driver of a RayJob: read a description of the work from the store, do the work, and record a failure.

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
from components.platform.builds import Work
from infoxlm_core import user_files
from infoxlm_core.errors import InfoXLMError, InputError, Preempted

logger = logging.getLogger(__name__)

HEARTBEAT_TIMEOUT_SECONDS = 900.0
"""The job ends itself after this time without a heartbeat of its step; a retried step may take minutes to start."""
_HEARTBEAT_POLL_SECONDS = 30.0
_STOP_POLL_SECONDS = 1.0
_SAVE_TIMEOUT_SECONDS = 600.0
_EXIT_TIMEOUT_SECONDS = 60.0


def main(url: str) -> None:
    """Do the work that a file of the store describes. Exit with the code of the error if the work fails."""
    store, _, file = url.rpartition("/work/")
    name = file.removesuffix(".json")
    with runtime.report_failure(store, "job", job=name):
        work = _read(url)
        os.environ["RUN_ID"] = work.pipeline_run
        storage.open(store).delete(runtime.outcome_path(name, "jobs"))  # of an earlier attempt
        for watch in (_end_without_heartbeat, _forward_stop_request):
            threading.Thread(target=watch, args=(work,), name=watch.__name__, daemon=True).start()
        launchers.run_locally(work)


def request_stop(url: str, timeout_seconds: float) -> None:
    """Ask the training of a job to save and stop. Wait until it has saved and released its lease, or for the timeout.

    Args:
        url: location of the job's description in the store.
        timeout_seconds: longest time to wait.
    """
    work = _read(url)
    lease_url = f"{work.store}/runs/{work.run}/lease.json"
    deadline = time.monotonic() + timeout_seconds

    def is_training() -> bool:
        """Return whether the job holds the lease of a run. A job that prepares text has no run."""
        return bool(work.run) and lease.read(lease_url)[0]["holder"] == work.job

    if is_training():
        artifacts.write(work.store, f"runs/{work.run}/stop", work.job)
        while is_training() and time.monotonic() < deadline:
            time.sleep(1)


def _end_without_heartbeat(work: Work) -> None:
    """Save a checkpoint and end this process when the step has written no heartbeat for a long time."""
    last_heartbeat = b""
    last_change = time.monotonic()
    while time.monotonic() - last_change < HEARTBEAT_TIMEOUT_SECONDS:
        time.sleep(min(_HEARTBEAT_POLL_SECONDS, HEARTBEAT_TIMEOUT_SECONDS / 10))  # tests set a short timeout
        try:
            heartbeat = artifacts.read(work.store, launchers.heartbeat_path(work.job)) or b""
        except InfoXLMError:  # without the storage, nobody can tell whether the step is alive
            last_change = time.monotonic()
            continue
        if heartbeat != last_heartbeat:
            last_heartbeat = heartbeat
            last_change = time.monotonic()
    message = "no step has followed %s for %.0f s: saving a checkpoint and ending the job"
    logger.error(message, work.job, HEARTBEAT_TIMEOUT_SECONDS)
    try:
        request_stop(f"{work.store}/work/{work.job}.json", _SAVE_TIMEOUT_SECONDS)
        time.sleep(_EXIT_TIMEOUT_SECONDS)  # a training run that has saved normally ends this process by itself
    finally:
        os._exit(Preempted.exit_code)


def _forward_stop_request(work: Work) -> None:
    """Forward a request to stop, which only this process has received, to the workers in other pods.

    When KubeRay deletes the job, Ray sends SIGTERM only to the driver, whose handler writes a file to this pod's disk.
    """
    if not work.run:
        return
    request = artifacts.local_directory(work.store) / "runs" / work.run / "stop"
    while True:
        time.sleep(_STOP_POLL_SECONDS)
        if request.exists():
            try:
                request_stop(f"{work.store}/work/{work.job}.json", timeout_seconds=0)
                return
            except InfoXLMError as error:
                logger.warning("the request to stop could not be sent to the workers: %s", error)


def _read(url: str) -> Work:
    """Return the work that a file of the store describes.

    Raises:
        InputError: the file is missing or malformed.
    """
    file = storage.open(url).get()
    if file is None:
        raise InputError(f"{url} does not exist: submit the pipeline again")
    content, _ = file
    return user_files.parse_json(content, Work, url, "submit the pipeline again")


if __name__ == "__main__":
    if sys.argv[1] == "--leave":
        request_stop(sys.argv[2], float(sys.argv[3]))
    else:
        main(sys.argv[1])

"""The driver of a RayJob: reads a description of the work from the store, does the work, and stores a failure.

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
from components.platform.stage_work import Work
from infoxlm_core import outside
from infoxlm_core.errors import InfoXLMError, InputError, Preempted

logger = logging.getLogger(__name__)

UNFOLLOWED = 900.0
"""Seconds without a heartbeat of the step after which the job ends; a retried step may take minutes to start."""
_POLL_SECONDS = 30.0  # between two reads of the heartbeat
_SIGNAL_POLL_SECONDS = 1.0  # between two checks for a request to stop
_SAVING_SECONDS = 600.0  # to wait for a training to save
_ENDING_SECONDS = 60.0  # to wait for a training that has saved to end this process


def main(url: str) -> None:
    """Do the work that a file of the store describes. If it fails, exit with the code of the error."""
    store, _, file = url.rpartition("/work/")
    name = file.removesuffix(".json")
    with runtime.report_failure(store, "job", job=name):
        work = _read(url)
        os.environ["RUN_ID"] = work.pipeline_run
        storage.open(store).delete(runtime.outcome_path(name, "jobs"))  # written by an earlier attempt
        for watch in (_end_if_unfollowed, _pass_on_signals):
            threading.Thread(target=watch, args=(work,), name=watch.__name__, daemon=True).start()
        launchers.run_locally(work)


def leave(url: str, seconds: float) -> None:
    """Ask the training to save and stop, because this pod is being stopped. Wait until it has released its lease."""
    work = _read(url)
    lease_url = f"{work.store}/runs/{work.run}/lease.json"
    deadline = time.monotonic() + seconds

    def is_training() -> bool:
        """Return whether this job holds the lease of the run, or False if it prepares text or has already saved."""
        return bool(work.run) and lease.read(lease_url)[0]["holder"] == work.job

    if is_training():
        artifacts.write(work.store, f"runs/{work.run}/stop", work.job)
        while is_training() and time.monotonic() < deadline:
            time.sleep(1)


def _end_if_unfollowed(work: Work) -> None:
    """Save and end this process when the step has sent no heartbeat for `UNFOLLOWED` seconds."""
    last_beat = b""
    last_seen = time.monotonic()
    while time.monotonic() - last_seen < UNFOLLOWED:
        time.sleep(min(_POLL_SECONDS, UNFOLLOWED / 10))
        try:
            beat = artifacts.read(work.store, launchers.heartbeat_path(work.job)) or b""
        except InfoXLMError:  # without the storage we cannot tell whether the step is alive
            last_seen = time.monotonic()
            continue
        if beat != last_beat:
            last_beat = beat
            last_seen = time.monotonic()
    logger.error("no step has followed %s for %.0f s: saving a checkpoint and ending the job", work.job, UNFOLLOWED)
    try:
        leave(f"{work.store}/work/{work.job}.json", _SAVING_SECONDS)
        time.sleep(_ENDING_SECONDS)  # a training that has saved normally ends this process by itself
    finally:
        os._exit(Preempted.exit_code)


def _pass_on_signals(work: Work) -> None:
    """Pass a request to stop, which this process has received, on to the workers in other pods.

    When KubeRay deletes the job, Ray sends SIGTERM only to the driver, whose handler writes a file to this pod's disk.
    """
    if not work.run:
        return
    request = artifacts.local_directory(work.store) / "runs" / work.run / "stop"
    while True:
        time.sleep(_SIGNAL_POLL_SECONDS)
        if request.exists():
            try:
                leave(f"{work.store}/work/{work.job}.json", 0)
                return
            except InfoXLMError as error:
                logger.warning("the request to stop could not be sent to the workers: %s", error)


def _read(url: str) -> Work:
    file = storage.open(url).get()
    if file is None:
        raise InputError(f"{url} does not exist: submit the pipeline again")
    return outside.parse_json(file[0], Work, url, "submit the pipeline again")


if __name__ == "__main__":
    if sys.argv[1] == "--leave":
        leave(sys.argv[2], float(sys.argv[3]))
    else:
        main(sys.argv[1])

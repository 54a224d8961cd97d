"""The driver of a RayJob: reads its work, does it, and writes the reason into the store if that fails.

    python -m components.platform.job s3://bucket/store/work/j-pretrain-3f2a9c01de.json
    python -m components.platform.job --leave s3://… 100    a pod of the job must go: save, for at most 100 s

A step that is told to stop deletes its job. A step that is killed cannot, so a job that nobody follows ends itself.
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
"""Seconds without a heartbeat of the step after which the job ends; its next attempt may take minutes to begin."""
_POLL, _SAVING, _ENDING, _SIGNAL_POLL = 30.0, 600.0, 60.0, 1.0


def main(url: str) -> None:
    """Do the work that a file of the store describes; exit with the code of the error, if there is one."""
    store, _, file = url.rpartition("/work/")
    name = file.removesuffix(".json")
    with runtime.report_failure(store, "job", job=name):
        work = _read(url)
        os.environ["RUN_ID"] = work.pipeline_run
        storage.open(store).delete(runtime.outcome_path(name, "jobs"))  # of an earlier attempt
        for watch in (_end_if_unfollowed, _pass_on_signals):
            threading.Thread(target=watch, args=(work,), name=watch.__name__, daemon=True).start()
        launchers.run_locally(work)


def leave(url: str, seconds: float) -> None:
    """Ask the training to save and stop, because this pod must go; wait until it has released its lease."""
    work = _read(url)
    lease_url = f"{work.store}/runs/{work.run}/lease.json"
    deadline = time.monotonic() + seconds
    if work.run and lease.read(lease_url)[0]["holder"] == work.job:
        artifacts.write(work.store, f"runs/{work.run}/stop", work.job)
        while lease.read(lease_url)[0]["holder"] == work.job and time.monotonic() < deadline:
            time.sleep(1)


def _end_if_unfollowed(work: Work) -> None:
    """Save and end this process when the step's heartbeat has stopped for long."""
    last_beat, since = b"", time.monotonic()
    while time.monotonic() - since < UNFOLLOWED:
        time.sleep(min(_POLL, UNFOLLOWED / 10))
        try:
            beat = artifacts.read(work.store, launchers.heartbeat_path(work.job)) or b""
        except InfoXLMError:  # a storage in trouble says nothing about the step
            since = time.monotonic()
            continue
        if beat != last_beat:
            last_beat, since = beat, time.monotonic()
    logger.error("nobody has followed %s for %.0f s: saving and ending it", work.job, UNFOLLOWED)
    try:
        leave(f"{work.store}/work/{work.job}.json", _SAVING)
        time.sleep(_ENDING)  # the training has saved, and ends this process by itself
    finally:
        os._exit(Preempted.exit_code)


def _pass_on_signals(work: Work) -> None:
    """Ask the workers of other pods to stop when this process was told to.

    When KubeRay deletes the job, Ray sends SIGTERM to the driver alone, whose handler writes a file on this pod's disk.
    """
    if not work.run:
        return
    request = artifacts.local(work.store) / "runs" / work.run / "stop"
    while True:
        time.sleep(_SIGNAL_POLL)
        if request.exists():
            try:
                leave(f"{work.store}/work/{work.job}.json", 0)
                return
            except InfoXLMError as error:
                logger.warning("the workers cannot be asked to stop: %s", error)


def _read(url: str) -> Work:
    file = storage.open(url).get()
    if file is None:
        raise InputError(f"No work at {url}: submit the pipeline again")
    return outside.parse_json(file[0], Work, url, "submit the pipeline again")


if __name__ == "__main__":
    if sys.argv[1] == "--leave":
        leave(sys.argv[2], float(sys.argv[3]))
    else:
        main(sys.argv[1])

"""The driver of a RayJob: reads what is to be done, does it, and leaves the reason in the store if that fails.

    python -m components.platform.job s3://bucket/store/work/j-pretrain-3f2a9c01de.json
    python -m components.platform.job --leave s3://… 100    a pod of the job must go: save, for at most 100 s

A step that is told to stop deletes its job. One that is killed cannot, so the job ends itself when nobody follows it.
"""

import logging
import os
import sys
import threading
import time

from components.adapters import lease, storage
from components.platform import artifacts, launchers, runtime
from components.platform.work import Work
from infoxlm_core import outside
from infoxlm_core.errors import InfoXLMError, InputError, Preempted

logger = logging.getLogger(__name__)

UNFOLLOWED = 900.0
"""Seconds without a sign of the step; another attempt of it may take some minutes to begin."""
_POLL, _SAVING, _ENDING, _NOTE = 30.0, 600.0, 60.0, 1.0


def main(place: str) -> None:
    """Do what `place` describes; exit with the code that the error has, if there is one."""
    store, _, file = place.rpartition("/work/")
    job = file.removesuffix(".json")
    with runtime.report_failure(store, "job", job=job):
        wanted = _read(place)
        os.environ["RUN_ID"] = wanted.pipeline_run
        storage.open(store).delete(runtime.outcome_path(job, "jobs"))  # of an earlier attempt
        for watch in (_end_when_nobody_follows, _pass_on_signals):
            threading.Thread(target=watch, args=(wanted,), name=watch.__name__, daemon=True).start()
        launchers.run_locally(wanted)


def leave(place: str, seconds: float) -> None:
    """Ask the training to save and stop, because this pod must go; wait until it has let go of its lease."""
    wanted = _read(place)
    url = f"{wanted.store}/runs/{wanted.run}/lease.json"
    deadline = time.monotonic() + seconds
    if wanted.run and lease.read(url)[0]["holder"] == wanted.job:
        artifacts.write(wanted.store, f"runs/{wanted.run}/stop", wanted.job)
        while lease.read(url)[0]["holder"] == wanted.job and time.monotonic() < deadline:
            time.sleep(1)


def _end_when_nobody_follows(wanted: Work) -> None:
    """Save and end this process when the step has given no sign for long: it was killed, and so were its retries."""
    seen, since = b"", time.monotonic()
    while time.monotonic() - since < UNFOLLOWED:
        time.sleep(min(_POLL, UNFOLLOWED / 10))
        try:
            found = artifacts.read(wanted.store, launchers.heartbeat_path(wanted.job)) or b""
        except InfoXLMError:  # S3 is in trouble: that says nothing of the step
            since = time.monotonic()
            continue
        if found != seen:
            seen, since = found, time.monotonic()
    logger.error("nobody has followed %s for %.0f s: saving and ending it", wanted.job, UNFOLLOWED)
    try:
        leave(f"{wanted.store}/work/{wanted.job}.json", _SAVING)
        time.sleep(_ENDING)  # the training has saved, and ends this process by itself
    finally:
        os._exit(Preempted.exit_code)


def _pass_on_signals(wanted: Work) -> None:
    """Tell the workers when this process is told to stop: its handler leaves a note on a disk that other pods lack.

    Ray sends SIGTERM to the driver alone, when KubeRay deletes the job.
    """
    if not wanted.run:
        return  # it trains nothing
    note = artifacts.local(wanted.store) / "runs" / wanted.run / "stop"
    while True:
        time.sleep(_NOTE)
        if note.exists():
            try:
                leave(f"{wanted.store}/work/{wanted.job}.json", 0)
                return
            except InfoXLMError as error:
                logger.warning("the workers cannot be told to stop: %s", error)


def _read(place: str) -> Work:
    found = storage.open(place).get()
    if found is None:
        raise InputError(f"{place}: there is no such work: submit the pipeline again")
    return outside.parse_json(found[0], Work, place, "submit the pipeline again")


if __name__ == "__main__":
    if sys.argv[1] == "--leave":
        leave(sys.argv[2], float(sys.argv[3]))
    else:
        main(sys.argv[1])

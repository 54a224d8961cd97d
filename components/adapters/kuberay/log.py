"""Print the log of a RayJob in the log of the step that waits for the job.

The submitter pod prints the output of the training. After a broken connection, the log is read again from a few seconds
before its last line, so some lines may appear twice. A new submitter prints the log from the start.
"""

import logging
import threading
import time

from components.adapters.kuberay.api import RayJobs, Unavailable
from infoxlm_core.errors import InputError

logger = logging.getLogger(__name__)

_RECONNECT_SECONDS = 2.0  # pause between two connections
_LAST_RECONNECT_SECONDS = 0.5  # shorter, because `finish` waits only a few seconds for the last lines
_OVERLAP_SECONDS = 10  # read again before the last line, so that no line is lost


class JobLog:
    """Prints a job's log in a background thread until `finish` is called."""

    def __init__(self, jobs: RayJobs, name: str) -> None:
        self.last_line_time = time.monotonic()
        self._jobs = jobs
        self._name = name
        self._last_pod = ""  # submitter pod whose lines were printed last
        self._pod_with_complete_log = ""  # submitter pod whose whole log was printed
        self._job_ended = threading.Event()
        self._closed = threading.Event()  # the thread must print no more lines
        self._thread = threading.Thread(target=self._follow, name=f"log of {name}", daemon=True)
        self._thread.start()

    def finish(self, seconds: float) -> None:
        """Wait at most `seconds` until the log of the ended job is complete. Then stop printing."""
        self._job_ended.set()
        self._thread.join(seconds)
        self._closed.set()

    def _follow(self) -> None:
        """Print the log until the job has ended and its log is complete, or until `finish` closes the log."""
        while not self._closed.is_set():
            try:
                is_complete = self._print_newest_log()
                if is_complete and self._job_ended.is_set():
                    return
            except Unavailable as error:
                logger.debug("the log of rayjob/%s cannot be read: %s", self._name, error)
            except InputError as error:  # a missing permission to read logs must not stop the training
                logger.warning("the log of rayjob/%s cannot be shown: %s", self._name, error)
                return
            self._job_ended.wait(_RECONNECT_SECONDS)
            if self._job_ended.is_set():  # from now on, the wait above returns at once, so pause here
                self._closed.wait(_LAST_RECONNECT_SECONDS)

    def _print_newest_log(self) -> bool:
        """Print the log of the newest submitter pod until the connection ends. Return whether the log is complete."""
        pods = self._jobs.list_submitters(self._name)
        if not pods:
            return False
        newest_pod = pods[-1]  # Kubernetes replaces a failed submitter by a new pod
        if newest_pod.status.phase == "Pending":  # its container has no log yet
            return False
        pod_name = newest_pod.metadata.name
        has_ended = newest_pod.status.phase in ("Succeeded", "Failed")
        if has_ended and pod_name == self._pod_with_complete_log:
            return True
        since_seconds = None  # print the whole log of a new submitter
        if pod_name == self._last_pod:  # the connection broke: go back a little, so that no line is lost
            since_seconds = int(time.monotonic() - self.last_line_time) + _OVERLAP_SECONDS
        self._pod_with_complete_log = ""  # set again when the whole log has been read below
        for line in self._jobs.read_log(pod_name, since_seconds):
            if self._closed.is_set():
                return False
            self._last_pod = pod_name
            self.last_line_time = time.monotonic()
            print(line, flush=True)
        self._pod_with_complete_log = pod_name
        return has_ended

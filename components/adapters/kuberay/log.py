"""The log of a RayJob, in the log of the step that waits for it: every line once, in order, while the job runs.

What the training prints is the log of the pod that submitted it. A connection that breaks goes on where it was; a
submitter that comes after another prints everything from the start, of which only the new lines count.
"""

import logging
import re
import threading
import time
from collections import Counter
from datetime import UTC, datetime
from typing import Any

from components.adapters.kuberay.api import NoAnswer, RayJobs
from infoxlm_core.errors import InputError

logger = logging.getLogger(__name__)

_PAUSE = 2.0
_MARGIN = 30  # seconds asked for again after a break; lines known by their time stamps are not printed twice
_REMEMBERED = 500_000  # lines of earlier submitters

_LINE = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)\.?(\d{0,9})(Z|[+-]\d\d:\d\d) ?(.*)")

Stamp = tuple[datetime, str]
"""Seconds, and the digits behind them."""


class JobLog:
    """Follows a job's log in a thread, from its making until `finish`."""

    def __init__(self, jobs: RayJobs, name: str) -> None:
        self.last_line = time.monotonic()
        self._jobs, self._name = jobs, name
        self._printed: Counter[int] = Counter()
        self._ending, self._closed = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._follow, name=f"log of {name}", daemon=True)
        self._thread.start()

    def finish(self, seconds: float) -> None:
        """Print what is still to come, for so many seconds at most, and no line after that."""
        self._ending.set()
        self._thread.join(seconds)
        self._closed.set()

    def _follow(self) -> None:
        read: dict[str, _PodLog] = {}
        while not self._closed.is_set():
            try:
                pods = self._jobs.submitters(self._name)
                if pods and self._read(pods[-1], read) and self._ending.is_set():
                    return
            except NoAnswer as error:
                logger.debug("the log of rayjob/%s: %s", self._name, error)
            except InputError as error:  # no right to read logs: the training itself is not concerned
                logger.warning("the log of rayjob/%s cannot be shown: %s", self._name, error)
                return
            self._ending.wait(_PAUSE)
            if self._ending.is_set():
                self._closed.wait(_PAUSE / 4)

    def _read(self, pod: Any, read: dict[str, "_PodLog"]) -> bool:
        """Print what one connection to a pod brings; return whether there is nothing more to come from it."""
        log = read.setdefault(pod.metadata.name, _PodLog(self._printed))
        if log.complete or pod.status.phase == "Pending":
            return log.complete
        log.reconnect()
        for line in self._jobs.log(pod.metadata.name, log.since()):
            text = log.new(line)
            if self._closed.is_set():
                return False
            if text is not None:
                self._say(text)
        log.complete = pod.status.phase in ("Succeeded", "Failed")
        return log.complete

    def _say(self, text: str) -> None:
        self.last_line = time.monotonic()
        print(text, flush=True)
        if len(self._printed) < _REMEMBERED:
            self._printed[hash(text)] += 1


class _PodLog:
    """Which lines of one pod's log are new: over connections by time stamps, over pods by what they say."""

    def __init__(self, printed: Counter[int]) -> None:
        self.complete = False
        self._of_others = Counter(printed)  # this pod may say them again
        self._last: Stamp = (datetime.min.replace(tzinfo=UTC), "")
        self._at_last = 0  # lines seen that bear this very stamp
        self._again = 0  # of these, in the present connection
        self._known = False  # whether lines of the present connection may be known
        self._received = time.monotonic()

    def reconnect(self) -> None:
        self._known, self._again = bool(self._at_last), 0

    def since(self) -> int | None:
        """Seconds back from now that reach behind the last line, by our clock and by the cluster's; None: the start."""
        if not self._at_last:
            return None
        age = datetime.now(UTC) - self._last[0]
        return int(max(age.total_seconds(), time.monotonic() - self._received)) + _MARGIN

    def new(self, line: str) -> str | None:
        """The text of a line, if nobody has printed it."""
        found = _LINE.fullmatch(line)
        if not found:
            return line
        seconds, fraction, zone, text = found.groups()
        at = (datetime.fromisoformat(seconds + zone), fraction.ljust(9, "0"))
        if self._known and at < self._last:
            return None
        if self._known and at == self._last:
            self._again += 1
            if self._again <= self._at_last:
                return None
        self._known = False  # the rest of this connection is new
        self._at_last = self._at_last + 1 if at == self._last else 1
        self._last, self._received = at, time.monotonic()
        if self._of_others[hash(text)] > 0:
            self._of_others[hash(text)] -= 1
            return None
        return text

"""A lease is one process's right to write. A small file names the lease's holder, who rewrites the file regularly.

    {"holder": "…", "attempt": 3, "beat": 17}       the lease is free if holder is ""

The file changes only by compare-and-swap (`Store.put_if`), so two processes never hold a lease at once. Clocks of
different machines are not compared: a process that waits for the lease measures the time between heartbeats on its own
clock. If a holder that counts as dead wakes up, it sees that the lease has a new holder, and stops.
"""

import contextlib
import json
import logging
import threading
import time
import uuid
from collections.abc import Callable
from types import TracebackType
from typing import Any, NotRequired, Self

from typing_extensions import TypedDict

from components.adapters import storage
from infoxlm_core import user_files
from infoxlm_core.errors import DataCorrupt, Fenced, InfoXLMError, LeaseHeld, StorageUnavailable

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 20.0
"""Time between a holder's heartbeats."""
EXPIRY_SECONDS = 60.0
"""Time without a heartbeat after which a holder counts as dead."""
_POLL_SECONDS = 5.0  # time between calls of `periodic_check`
# Tests set HEARTBEAT_SECONDS and EXPIRY_SECONDS to short times, so both also limit the pauses below.


class State(TypedDict):
    """Content of a lease file."""

    holder: str
    attempt: int
    beat: int
    by: NotRequired[str]
    """Id of the `Lease` object that wrote the file; missing in files from older versions."""


def read(url: str) -> tuple[dict[str, Any], str | None]:
    """Return the state of a lease and the version of its file. A missing file means a free lease without a version.

    Raises:
        DataCorrupt: the file is malformed.
    """
    file = storage.open(url).get()
    if file is None:
        return {"holder": "", "attempt": 0, "beat": 0}, None
    content, version = file
    remedy = "the file is not a lease: delete it, then run again"
    state = user_files.parse_json(content, State, url, remedy, DataCorrupt)
    # Without `by`, so that files from older versions give the same keys.
    return {name: state[name] for name in ("holder", "attempt", "beat")}, version


class Lease:
    """Hold a lease inside a `with` block, while a thread writes heartbeats.

    Args:
        url: URL of the lease file.
        holder: name of this process; default: a random name. A restarted process with the same name takes over at once.
        wait: seconds to wait for a live holder before raising LeaseHeld.
        periodic_check: function to call every few seconds while the lease is held.

    Raises:
        LeaseHeld: another live process holds the lease.
        StorageUnavailable: the storage does not answer.
    """

    def __init__(
        self, url: str, holder: str = "", wait: float = 0.0, periodic_check: Callable[[], None] | None = None
    ) -> None:
        self.url = url
        self.holder = holder or uuid.uuid4().hex
        self.wait = wait
        self.periodic_check = periodic_check or (lambda: None)
        self.attempt = 0
        self.heartbeat_count = 0
        self.lost = False
        self._writer = uuid.uuid4().hex  # distinguishes processes with the same holder name
        self._file = storage.open(url)
        self._version: str | None = None
        self._lock = threading.Lock()
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._write_heartbeats, name="lease", daemon=True)

    def __enter__(self) -> Self:
        """Wait until the lease is free or its holder counts as dead. Take the lease, and start the heartbeats."""
        start_time = time.monotonic()
        last_state: dict[str, Any] | None = None
        last_change_time = start_time
        while not self._take():
            state, _ = read(self.url)
            current_time = time.monotonic()
            if state != last_state:
                is_alive = last_state is not None  # the state changed while this process waited
                if is_alive and current_time - start_time > self.wait:
                    raise LeaseHeld(f"{self.url}: {state['holder']} holds the lease: wait for it or stop it")
                last_state = state
                last_change_time = current_time
            elif current_time - last_change_time >= EXPIRY_SECONDS and self._take(dead_state=state):
                message = "took the lease %s from %s: no heartbeat for %.0f s"
                logger.warning(message, self.url, state["holder"], EXPIRY_SECONDS)
                break
            time.sleep(min(1.0, EXPIRY_SECONDS / 10))  # shorter only in tests
        self._thread.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Stop the heartbeats, and release the lease."""
        self._released.set()
        self._thread.join()
        if not self.lost:
            # If the release fails, the next process must wait until this holder counts as dead.
            with contextlib.suppress(InfoXLMError):
                self._write(holder="")

    def renew(self) -> None:
        """Renew the lease before a final write, to ensure that this process still holds the lease.

        Raises:
            Fenced: another process has taken the lease.
            StorageUnavailable: the storage has not answered for `EXPIRY_SECONDS`.
        """
        deadline = time.monotonic() + EXPIRY_SECONDS
        while not self.lost:
            try:
                if not self._write():
                    self.lost = True
                break
            except StorageUnavailable:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(min(1.0, EXPIRY_SECONDS / 10))  # shorter only in tests
        if self.lost:
            raise Fenced(f"{self.url}: another process has taken the lease, so this process must stop")

    def _take(self, dead_state: dict[str, Any] | None = None) -> bool:
        """Try to take the lease. Return whether this process now holds it.

        The lease can be taken if it is free or has this process's holder name. It can also be taken from a dead holder
        if the file still has the holder's last state.

        Args:
            dead_state: last state that the dead holder wrote, if any.
        """
        state, version = read(self.url)
        is_available = state["holder"] in ("", self.holder) or state == dead_state
        if not is_available:
            return False
        self.attempt = state["attempt"] + 1
        self._version = version
        return self._write(quick=False)  # retry for longer, because no lease of this process can expire yet

    def _write(self, holder: str | None = None, quick: bool = True) -> bool:
        """Write the next heartbeat unless another process has changed the file. Return whether the write succeeded.

        Args:
            holder: holder name to write; default: this process's name; "" releases the lease.
            quick: whether to fail soon if the storage does not answer.
        """
        with self._lock:
            self.heartbeat_count += 1
            state = {
                "holder": self.holder if holder is None else holder,
                "attempt": self.attempt,
                "beat": self.heartbeat_count,
                "by": self._writer,
            }
            content = json.dumps(state)
            version = self._file.put_if("", content, self._version, quick)
            if version is None:
                # The file has changed, perhaps by an earlier write of this object whose answer was lost.
                unconfirmed_version = self._find_unconfirmed_version()
                if unconfirmed_version:
                    version = self._file.put_if("", content, unconfirmed_version, quick)
            self._version = version or self._version  # an outdated version stays, so that later writes fail, too
            return version is not None

    def _find_unconfirmed_version(self) -> str | None:
        """Return the file's version if this object wrote the file but the storage's answer was lost."""
        file = self._file.get(quick=True)
        if not file:
            return None
        content, version = file
        try:
            state = user_files.parse_json(content, State, self.url, "", DataCorrupt)
        except DataCorrupt:
            return None  # this object never writes a damaged file
        return version if state.get("by") == self._writer else None

    def _write_heartbeats(self) -> None:
        """Write heartbeats, and call `periodic_check`, until the block ends or the lease is lost."""
        last_heartbeat = time.monotonic()
        while not self._released.wait(min(_POLL_SECONDS, HEARTBEAT_SECONDS)):
            try:
                if time.monotonic() - last_heartbeat >= HEARTBEAT_SECONDS:
                    if not self.lost and not self._write():  # `renew` may have lost the lease in another thread
                        self.lost = True
                    last_heartbeat = time.monotonic()  # skipped after an error: the next round tries again
            except Exception as error:  # the next heartbeat may succeed; if none does, the next `renew` fails
                self._warn("the lease could not be renewed", error)
            if self.lost:
                return
            try:
                self.periodic_check()
            except Exception as error:  # a failed check must not end the heartbeats
                self._warn("the periodic check failed", error)

    def _warn(self, failure: str, error: Exception) -> None:
        """Log an InfoXLMError in one line, and any other error with its traceback."""
        logger.warning("%s: %s (%s)", self.url, failure, error, exc_info=not isinstance(error, InfoXLMError))

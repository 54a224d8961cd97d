"""A lease: the right of one process to write, kept in a small file of a storage that its holder rewrites regularly.

    {"holder": "…", "attempt": 3, "beat": 17}       the lease is free if holder is ""

The file is created and changed only conditionally (`Store.put_if`), so two processes never hold a lease at once. Clocks
of different machines are not compared: a process that wants the lease watches the beat on its own clock. A holder that
was taken for dead and wakes up finds the lease of another process and stops.
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
from infoxlm_core import outside
from infoxlm_core.errors import DataCorrupt, Fenced, InfoXLMError, LeaseHeld, StorageUnavailable

logger = logging.getLogger(__name__)

BEAT = 20.0
"""Seconds between two beats."""
PATIENCE = 60.0
"""Seconds without a beat after which a holder counts as dead."""
_POLL = 5.0  # seconds between two calls of `meanwhile`


class State(TypedDict):
    """Content of a lease."""

    holder: str
    attempt: int
    beat: int
    by: NotRequired[str]


def read(url: str) -> tuple[dict[str, Any], str | None]:
    """Return the state of a lease and its version; a missing lease is free and has no version.

    Raises:
        DataCorrupt: the file is malformed.
    """
    file = storage.open(url).get()
    if file is None:
        return {"holder": "", "attempt": 0, "beat": 0}, None
    state = outside.parse_json(file[0], State, url, "it is no lease: delete it, then run again", DataCorrupt)
    return {name: state[name] for name in ("holder", "attempt", "beat")}, file[1]


def check(url: str, holder: str) -> None:
    """Raise LeaseHeld if a process other than `holder` has the lease and is alive; the lease stays as it is."""
    first, _ = read(url)
    if first["holder"] in ("", holder):
        return
    deadline = time.monotonic() + 1.5 * BEAT
    while time.monotonic() < deadline:
        if read(url)[0] not in (first, {**first, "holder": ""}):
            raise _held(url, first)
        time.sleep(min(1.0, BEAT / 10))


class Lease:
    """Holds the lease at `url` inside a `with` block; a thread beats.

    Args:
        url: URL of the lease.
        holder: name of this process; a lease that this name holds is taken over at once, after a restart.
        wait: seconds to wait for a holder that is alive; then LeaseHeld.
        meanwhile: called every few seconds while the lease is held.

    Raises:
        LeaseHeld: another process holds the lease, and is alive.
        StorageUnavailable: the storage does not answer.
    """

    def __init__(
        self, url: str, holder: str = "", wait: float = 0.0, meanwhile: Callable[[], None] | None = None
    ) -> None:
        self.url, self.holder, self.wait = url, holder or uuid.uuid4().hex, wait
        self.meanwhile = meanwhile or (lambda: None)
        self.attempt = self.beat = 0
        self.lost = False
        self._writer = uuid.uuid4().hex  # tells two processes with one holder's name apart
        self._file = storage.open(url)
        self._version: str | None = None
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="lease", daemon=True)

    def __enter__(self) -> Self:
        began = time.monotonic()
        last_state, last_change = None, began
        while not self._take():
            state, _ = read(self.url)
            now = time.monotonic()
            if state != last_state:
                is_alive = last_state is not None
                if is_alive and now - began > self.wait:
                    raise _held(self.url, state)
                last_state, last_change = state, now
            elif now - last_change >= PATIENCE and self._take(dead=state):
                logger.warning("took %s over from %s: no beat for %.0f s", self.url, state["holder"], PATIENCE)
                break
            time.sleep(min(1.0, PATIENCE / 10))
        self._thread.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._over.set()
        self._thread.join()
        if not self.lost:
            with contextlib.suppress(InfoXLMError):  # the lease then looks dead for a while
                self._write(holder="")

    def renew(self) -> None:
        """Make sure that this process still holds the lease, before it writes something final.

        Raises:
            Fenced: another process has taken the lease.
            StorageUnavailable: the storage has not answered for as long as a holder without a beat counts as alive.
        """
        deadline = time.monotonic() + PATIENCE
        while not self.lost:
            try:
                self.lost = not self._write() or self.lost
                break
            except StorageUnavailable:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(min(1.0, PATIENCE / 10))
        if self.lost:
            raise Fenced(f"{self.url}: another process has taken over: this process must not go on")

    def _take(self, dead: dict[str, Any] | None = None) -> bool:
        """Take the lease if it is free, has our holder's name, or is in the state `dead`."""
        state, version = read(self.url)
        if state["holder"] not in ("", self.holder) and state != dead:
            return False
        self.attempt, self._version = state["attempt"] + 1, version
        return self._write(quick=False)

    def _write(self, holder: str | None = None, quick: bool = True) -> bool:
        """Write the next beat over the version that we know; return whether that worked."""
        with self._lock:
            self.beat += 1
            state = {"holder": self.holder if holder is None else holder, "attempt": self.attempt, "beat": self.beat}
            content = json.dumps(state | {"by": self._writer})
            version = self._file.put_if("", content, self._version, quick)
            if version is None and (own_version := self._version_without_answer()):
                version = self._file.put_if("", content, own_version, quick)
            self._version = version or self._version
            return version is not None

    def _version_without_answer(self) -> str | None:
        """Return the version of the file if this object wrote it but never got the answer."""
        file = self._file.get(quick=True)
        if not file:
            return None
        with contextlib.suppress(DataCorrupt):
            state = outside.parse_json(file[0], State, self.url, "", DataCorrupt)
            return file[1] if state.get("by") == self._writer else None
        return None

    def _keep(self) -> None:
        """Beat, and call `meanwhile`, until the block ends or the lease is lost."""
        last_beat = time.monotonic()
        while not self._over.wait(min(_POLL, BEAT)):
            try:
                if time.monotonic() - last_beat >= BEAT:
                    self.lost = self.lost or not self._write()
                    last_beat = time.monotonic()
            except Exception as error:  # the next beat may arrive; if not, `renew` says so
                self._warn("no beat", error)
            if self.lost:
                return
            try:
                self.meanwhile()
            except Exception as error:  # it must not cost the lease
                self._warn("no look at requests", error)

    def _warn(self, failure: str, error: Exception) -> None:
        """Log an expected error in one line, such as a storage that is away, and another error with its trace."""
        logger.warning("%s: %s (%s)", self.url, failure, error, exc_info=not isinstance(error, InfoXLMError))


def _held(url: str, state: dict[str, Any]) -> LeaseHeld:
    return LeaseHeld(f"{url}: {state['holder']} is at work: wait for it or stop it")

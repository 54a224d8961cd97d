"""One writer: a lease in a storage, a small file that its holder rewrites now and then.

    {"holder": "…", "attempt": 3, "beat": 17}       nobody holds it if holder is ""

It is created and changed only with a condition (`Store.put_if`), so two can never both have it. Clocks play no
part: whoever wants it watches the beat on a clock of its own. A holder that was taken for dead and wakes up finds
another's lease and stops.
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
_POLL = 5.0  # seconds between two rounds of what else is to be done while the lease is held


class State(TypedDict):
    """What a lease says."""

    holder: str
    attempt: int
    beat: int
    by: NotRequired[str]


def read(url: str) -> tuple[dict[str, Any], str | None]:
    """What a lease says, and its version; nobody's if there is none.

    Raises:
        DataCorrupt: it cannot be read.
    """
    found = storage.open(url).get()
    if found is None:
        return {"holder": "", "attempt": 0, "beat": 0}, None
    state = outside.parse_json(found[0], State, url, "it is no lease: delete it, then run again", DataCorrupt)
    return {name: state[name] for name in ("holder", "attempt", "beat")}, found[1]


def check(url: str, holder: str) -> None:
    """Refuse if somebody else than `holder` has a lease and is alive; nothing is taken.

    Raises:
        LeaseHeld: the beat has moved within one and a half of its periods.
    """
    before, _ = read(url)
    if before["holder"] in ("", holder):
        return
    deadline = time.monotonic() + 1.5 * BEAT
    while time.monotonic() < deadline:
        if read(url)[0] not in (before, {**before, "holder": ""}):
            raise LeaseHeld(f"{url}: {before['holder']} is at work: wait for it or stop it")
        time.sleep(min(1.0, BEAT / 10))


class Lease:
    """A lease on `url`, held while in its `with` block; a thread beats.

    Args:
        holder: who asks; a lease of the same holder is taken over at once (its workers were started again).
        wait: seconds to wait for a holder that lives; then LeaseHeld.
        meanwhile: called every few seconds while the lease is held.

    Raises:
        LeaseHeld: somebody else holds it, and is alive.
        StorageUnavailable: the storage does not answer.
    """

    def __init__(
        self, url: str, holder: str = "", wait: float = 0.0, meanwhile: Callable[[], None] | None = None
    ) -> None:
        self.url, self.holder, self.wait = url, holder or uuid.uuid4().hex, wait
        self.meanwhile = meanwhile or (lambda: None)
        self._me = uuid.uuid4().hex
        self._file = storage.open(url)
        self.attempt = self.beat = 0
        self.lost = False
        self._version: str | None = None
        self._writing = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="lease", daemon=True)

    def __enter__(self) -> Self:
        began = seen_since = time.monotonic()
        seen = ""
        while not self._take():
            state, _ = read(self.url)
            now = time.monotonic()
            if (found := json.dumps(state)) != seen:
                moved, seen, seen_since = bool(seen), found, now
                if moved and now - began > self.wait:
                    raise LeaseHeld(f"{self.url}: {state['holder']} is at work: wait for it or stop it")
            elif now - seen_since >= PATIENCE and self._take(dead=state):
                logger.warning("took %s over from %s, who gave no sign for %.0f s", self.url, state["holder"], PATIENCE)
                break
            time.sleep(min(1.0, PATIENCE / 10))
        self._thread.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._over.set()
        self._thread.join()
        if not self.lost:
            with contextlib.suppress(InfoXLMError):  # then it looks dead for a while
                self._write(holder="")

    def renew(self) -> None:
        """Make sure that the lease is still ours, before something is written for good.

        Raises:
            Fenced: somebody else has taken it.
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
            raise Fenced(f"{self.url}: somebody else has taken over: this process must not go on")

    def _take(self, dead: dict[str, Any] | None = None) -> bool:
        """Take a lease that is free, ours, or that of a holder who is dead; False if another's beats."""
        state, version = read(self.url)
        if state["holder"] not in ("", self.holder) and state != dead:
            return False
        self.attempt, self._version = state["attempt"] + 1, version
        return self._write(quick=False)

    def _write(self, holder: str | None = None, quick: bool = True) -> bool:
        with self._writing:
            self.beat += 1
            state = {"holder": self.holder if holder is None else holder, "attempt": self.attempt, "beat": self.beat}
            state["by"] = self._me  # two attempts of one holder must not take each other's writing for their own
            content = json.dumps(state)
            version = self._file.put_if("", content, self._version, quick)
            if version is None and (ours := self._unanswered()):
                version = self._file.put_if("", content, ours, quick)
            self._version = version or self._version
            return version is not None

    def _unanswered(self) -> str | None:
        """The version of what is there if this very object wrote it, but never got the answer."""
        found = self._file.get(quick=True)
        if not found:
            return None
        with contextlib.suppress(DataCorrupt):
            said = outside.parse_json(found[0], State, self.url, "", DataCorrupt)
            return found[1] if said.get("by") == self._me else None
        return None

    def _keep(self) -> None:
        last = time.monotonic()
        while not self._over.wait(min(_POLL, BEAT)):
            try:
                if time.monotonic() - last >= BEAT:
                    self.lost = self.lost or not self._write()
                    last = time.monotonic()
            except Exception as error:  # the next beat may arrive; if not, `renew` says so
                self._warn("no beat", error)
            if self.lost:
                return
            try:
                self.meanwhile()
            except Exception as error:  # it must not cost the lease
                self._warn("could not look what else is to be done", error)

    def _warn(self, what: str, error: Exception) -> None:
        """One line for an error that is expected, the storage being away, all of it for another."""
        logger.warning("%s: %s (%s)", self.url, what, error, exc_info=not isinstance(error, InfoXLMError))

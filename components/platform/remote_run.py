"""The checkpoints of a run in a storage, for workers that share no disk: the core's `RemoteCheckpoints`.

STORE/runs/pretrained-77b0…/lease.json            who trains it (see lease.py)
                           /step=0000000400/      a checkpoint; manifest.json last
                           /saved.json            the newest step ever saved
                           /stop                  somebody asks the run to save and stop
"""

import json
import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from components.adapters import storage
from components.adapters.lease import Lease
from components.platform import artifact_transfer
from infoxlm_core.errors import InfoXLMError
from infoxlm_core.training.checkpoints import superfluous

logger = logging.getLogger(__name__)

_CHECKPOINT = "step="


class RemoteRun:
    """One run's prefix.

    Args:
        url: of the run.
        holder: whose workers these are; a restarted worker takes over from its predecessor without waiting.
    """

    def __init__(self, url: str, holder: str) -> None:
        self.url, self.holder = url, holder
        self._store = storage.open(url)
        self._lease: Lease | None = None
        self._asked = False

    @contextmanager
    def held(self) -> Iterator[None]:
        """See `Lease`. What dead processes left unfinished is removed."""
        with Lease(f"{self.url}/lease.json", self.holder, meanwhile=self._look) as self._lease:
            self._store.sweep()
            self.forget_request()  # to a process that is gone; one that comes from now on counts
            for name in set(self._folders()) - set(self.names()):
                artifact_transfer.drop(f"{self.url}/{name}")
            yield

    def names(self) -> list[str]:
        return [name for name in self._folders() if artifact_transfer.manifest_exists(f"{self.url}/{name}")]

    def fetch(self, name: str, directory: Path) -> None:
        artifact_transfer.pull(f"{self.url}/{name}", directory)

    def send(self, directory: Path, keep: int, bad: Collection[str] = (), spacing: int = 0) -> None:
        """The lease is renewed between the files and the manifest: a checkpoint of a fenced worker never exists."""
        if self._lease is None:
            raise RuntimeError("held() comes first")
        artifact_transfer.push(directory, f"{self.url}/{directory.name}", before_commit=self._lease.renew, replace=True)
        self._store.put("saved.json", json.dumps({"step": directory.name}))
        for old in superfluous(self.names(), keep, bad, spacing):
            with suppress(InfoXLMError):  # the next save tries again
                artifact_transfer.drop(f"{self.url}/{old}")

    def drop(self, name: str) -> None:
        """Fenced if the run is another's by now: what stands there may be its."""
        if self._lease is None:
            raise RuntimeError("held() comes first")
        self._lease.renew()
        artifact_transfer.drop(f"{self.url}/{name}")

    def has_saved(self) -> bool:
        return self._store.get("saved.json") is not None

    def asked_to_stop(self) -> bool:
        return self._asked

    def forget_request(self) -> None:
        self._store.delete("stop")
        self._asked = False

    def _look(self) -> None:
        """See whether anybody is asked to stop, or this holder: two pipeline runs may want the same training."""
        found = self._store.get("stop", quick=True)
        self._asked = self._asked or (found is not None and found[0] in (b"", self.holder.encode()))

    def _folders(self) -> list[str]:
        """Names of checkpoints, whole or not, oldest first."""
        return [name for name in self._store.folders() if name.startswith(_CHECKPOINT)]

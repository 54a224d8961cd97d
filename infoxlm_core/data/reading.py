"""Read parts of token shards: verify safetensors files and map them into memory.

Shards on S3 are read through a local directory that all workers of a machine share. Threads download the parts of the
next steps and delete parts that are no longer needed. Training draws the same samples from S3 as from a disk, because
the step's window determines the parts, and the step waits for missing parts.
"""

import contextlib
import hashlib
import itertools
import json
import logging
import queue
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from infoxlm_core import locks, manifests
from infoxlm_core.errors import DataCorrupt, InfoXLMError, StorageUnavailable

logger = logging.getLogger(__name__)
REMEDY = "remove the directory and run tokenize_corpus again"
DOWNLOAD_THREADS = 4
RETRY_SECONDS = 180.0
"""Time limit for repeating a failed read. The storage's own timeouts limit a single read."""
RETRY_INTERVAL = 2.0  # seconds between attempts
_TYPES: dict[str, np.dtype[Any]] = {"U32": np.dtype("<u4"), "U64": np.dtype("<u8")}  # by safetensors name


class PartSource(Protocol):
    """Storage of token shards, such as a prefix on S3."""

    uri: str

    def read(self, name: str) -> bytes:
        """Return a file's content. Raise StorageUnavailable if the storage does not answer."""


def map_arrays(path: Path) -> dict[str, np.ndarray]:
    """Map a safetensors file's arrays into memory. The safetensors library would copy the arrays."""
    content = np.asarray(np.memmap(path, np.uint8, "r"))
    # A safetensors file consists of the header's size in 8 bytes, the header in JSON, and the arrays.
    header_size = int.from_bytes(content[:8].tobytes(), "little")
    header = json.loads(content[8 : 8 + header_size].tobytes())
    data = content[8 + header_size :]
    arrays = {}
    for name, description in header.items():  # `write_table` adds no `__metadata__`
        start, end = description["data_offsets"]
        arrays[name] = data[start:end].view(_TYPES[description["dtype"]])
    return arrays


class PartReader:
    """Reads parts of shards from a directory, and verifies each part on reading.

    Args:
        directory: directory of the shards.
        files: size and digest by file name, from the manifest.
    """

    def __init__(self, directory: Path, files: Mapping[str, dict[str, Any]]) -> None:
        self._directory = directory
        self._files = files

    def byte_count(self, name: str) -> int:
        """Return a part's size."""
        return self._files[name]["size"]

    def read(self, name: str) -> dict[str, np.ndarray]:
        """Return a part's arrays. Raise DataCorrupt if the file is missing or differs from the manifest."""
        path = self._path(name)
        manifests.verify_file(path, self._files[name], REMEDY)
        return map_arrays(path)

    def expect(self, table: str, current_parts: Iterable[str], next_parts: Iterable[str] = ()) -> None:
        """Announce the parts of a table that the current step and the next steps need."""

    def _path(self, name: str) -> Path:
        return manifests.join_inside(self._directory, name)


class RemotePartReader(PartReader):
    """Downloads parts from remote storage, and reads the local copies.

    Args:
        directory: download directory, which the workers of this machine share.
        files: size and digest by file name, from the manifest.
        source: storage of the parts.
    """

    def __init__(self, directory: Path, files: Mapping[str, dict[str, Any]], source: PartSource) -> None:
        super().__init__(directory, files)
        self._source = source
        self._expected_parts: dict[str, set[str]] = {}  # by table
        self._queue: queue.PriorityQueue[tuple[int, int, str, str]] = queue.PriorityQueue()
        self._request_numbers = itertools.count()
        for _ in range(DOWNLOAD_THREADS):  # daemons, because other threads would keep a finished process alive
            threading.Thread(target=self._download_expected_parts, daemon=True).start()

    def read(self, name: str) -> dict[str, np.ndarray]:
        """Return a part's arrays, after downloading the part if the local copy is missing or damaged.

        Raises:
            DataCorrupt: the part in the storage differs from the manifest.
            StorageUnavailable: the storage did not answer for `RETRY_SECONDS`.
        """
        deadline = time.monotonic() + RETRY_SECONDS
        has_warned = False
        while True:
            try:
                # The lock prevents other workers from deleting the part before it is mapped.
                with self._lock(name):
                    self._download(name)
                    try:
                        return super().read(name)
                    except DataCorrupt:
                        logger.warning("%s is damaged: downloading it again", self._path(name))
                        self._path(name).unlink(missing_ok=True)
                        self._download(name)
                        return super().read(name)
            except StorageUnavailable as error:
                if time.monotonic() > deadline:
                    raise
                if not has_warned:
                    logger.warning("training waits for its text for up to %d seconds: %s", RETRY_SECONDS, error)
                    has_warned = True
            time.sleep(RETRY_INTERVAL)

    def expect(self, table: str, current_parts: Iterable[str], next_parts: Iterable[str] = ()) -> None:
        """Download a table's expected parts in the background, and delete all other parts."""
        expected_parts = {*current_parts, *next_parts}
        previous_parts = self._expected_parts.get(table)
        if previous_parts is None:  # an earlier run may have left parts in the directory
            previous_parts = {f"{table}/{path.name}" for path in self._path(table).glob("*.safetensors")}
        self._expected_parts[table] = expected_parts
        requests = [(0, name) for name in current_parts] + [(1, name) for name in next_parts]
        for priority, name in requests:
            if name not in previous_parts:  # previous parts are in the directory or in the queue
                # Parts with the same priority are downloaded in request order.
                self._queue.put((priority, next(self._request_numbers), table, name))
        for name in previous_parts - expected_parts:
            self._delete(name)

    def _download_expected_parts(self) -> None:
        """Download queued parts that are still expected. `read` repeats failed downloads."""
        while True:
            _, _, table, name = self._queue.get()
            try:
                if name in self._expected_parts[table]:
                    with self._lock(name):
                        self._download(name)
                if name not in self._expected_parts[table]:  # the window has moved on in the meantime
                    self._delete(name)
            except (InfoXLMError, OSError) as error:
                logger.debug("%s was not downloaded ahead of time: %s", name, error)

    def _download(self, name: str) -> None:
        """Download a part if it is missing. The caller must hold the part's lock."""
        path = self._path(name)
        if path.is_file():
            return
        # Verify before writing, so that no worker finds a damaged part under this name.
        content = self._source.read(name)
        sha256 = hashlib.sha256(content).hexdigest()
        expected_sha256 = self._files[name]["sha256"]
        if sha256 != expected_sha256:
            raise DataCorrupt(
                f"{self._source.uri}/{name} has sha256 {sha256[:12]}…, but its manifest lists {expected_sha256[:12]}…: "
                "delete the shards and run tokenize_corpus again"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        manifests.write_atomically(path, content)

    def _delete(self, name: str) -> None:
        with self._lock(name):
            self._path(name).unlink(missing_ok=True)

    def _lock(self, name: str) -> contextlib.AbstractContextManager[Any]:
        """Lock a part among the workers of this machine. All parts share 256 locks, chosen by digest."""
        first_byte = self._files[name]["sha256"][:2]
        return locks.acquire(self._directory / f".{first_byte}.lock", poll_interval=0.01)

"""Read the parts of token shards: safetensors files that are verified and mapped into memory.

Shards on S3 are read through a directory on this machine, which all its workers share. Threads download the parts of
the next steps, and parts that are no longer needed are deleted. Training draws the same samples from S3 as from a disk,
because the window of a step tells which parts it reads, and the step waits for a missing part.
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
"""Time during which a failed read is repeated. A read itself ends only after the time limits of the storage."""
RETRY_INTERVAL = 2.0  # seconds between two attempts
_TYPES: dict[str, np.dtype[Any]] = {"U32": np.dtype("<u4"), "U64": np.dtype("<u8")}  # by their safetensors names


class PartSource(Protocol):
    """A storage of token shards, such as a prefix on S3."""

    uri: str

    def read(self, name: str) -> bytes:
        """Return the content of a file. Raise StorageUnavailable if the storage does not answer."""


def map_arrays(path: Path) -> dict[str, np.ndarray]:
    """Map the arrays of a safetensors file into memory. The safetensors library would copy them."""
    content = np.asarray(np.memmap(path, np.uint8, "r"))
    header_size = int.from_bytes(content[:8].tobytes(), "little")
    header = json.loads(content[8 : 8 + header_size].tobytes())
    data = content[8 + header_size :]
    arrays = {}
    for name, description in header.items():
        start, end = description["data_offsets"]
        arrays[name] = data[start:end].view(_TYPES[description["dtype"]])
    return arrays


class PartReader:
    """Reads the parts of the shards in a directory, and verifies each part before its first use.

    Args:
        directory: the shards.
        files: size and digest of each file, from the manifest.
    """

    def __init__(self, directory: Path, files: Mapping[str, dict[str, Any]]) -> None:
        self._directory = directory
        self._files = files

    def byte_count(self, name: str) -> int:
        """Return the size of a part."""
        return self._files[name]["size"]

    def read(self, name: str) -> dict[str, np.ndarray]:
        """Return the arrays of a part. Raise DataCorrupt if its file is missing or differs from the manifest."""
        path = self._path(name)
        manifests.verify_file(path, self._files[name], REMEDY)
        return map_arrays(path)

    def expect(self, table: str, current_parts: Iterable[str], next_parts: Iterable[str] = ()) -> None:
        """Tell the reader which parts of a table the current step and the next steps read, so that it can prepare."""

    def _path(self, name: str) -> Path:
        return manifests.join_inside(self._directory, name)


class RemotePartReader(PartReader):
    """Reads parts that are stored on S3.

    Args:
        directory: where the parts are downloaded, which the workers of this machine share.
        files: size and digest of each file, from the manifest.
        source: where the parts are stored.
    """

    def __init__(self, directory: Path, files: Mapping[str, dict[str, Any]], source: PartSource) -> None:
        super().__init__(directory, files)
        self._source = source
        self._expected_parts: dict[str, set[str]] = {}  # by table
        self._queue: queue.PriorityQueue[tuple[int, int, str, str]] = queue.PriorityQueue()
        self._request_numbers = itertools.count()
        for _ in range(DOWNLOAD_THREADS):
            threading.Thread(target=self._download_expected_parts, daemon=True).start()

    def read(self, name: str) -> dict[str, np.ndarray]:
        """Return the arrays of a part, which is downloaded if it is missing.

        Raises:
            DataCorrupt: the part differs from the manifest.
            StorageUnavailable: the storage did not answer for `RETRY_SECONDS`.
        """
        deadline = time.monotonic() + RETRY_SECONDS
        has_warned = False
        while True:
            try:
                # The lock keeps other workers from deleting the part before it is mapped.
                with self._lock(name):
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
        """Download the expected parts of a table in the background, and delete its other parts."""
        expected_parts = {*current_parts, *next_parts}
        previous_parts = self._expected_parts.get(table)
        if previous_parts is None:  # an earlier training run may have left parts in the directory
            previous_parts = {f"{table}/{path.name}" for path in self._path(table).glob("*.safetensors")}
        self._expected_parts[table] = expected_parts
        for name in current_parts:
            if name not in previous_parts:
                self._request_download(table, name, priority=0)
        for name in next_parts:
            if name not in previous_parts:
                self._request_download(table, name, priority=1)
        for name in previous_parts - expected_parts:
            self._delete(name)

    def _request_download(self, table: str, name: str, priority: int) -> None:
        """Queue a part for download. Parts of equal priority are downloaded in the order of the requests."""
        self._queue.put((priority, next(self._request_numbers), table, name))

    def _download_expected_parts(self) -> None:
        """Download queued parts, except those that are no longer expected. `read` repeats failed downloads."""
        while True:
            _, _, table, name = self._queue.get()
            try:
                if name in self._expected_parts[table]:
                    with self._lock(name):
                        self._download(name)
                if name not in self._expected_parts[table]:  # the window has moved on meanwhile
                    self._delete(name)
            except (InfoXLMError, OSError) as error:
                logger.debug("%s was not downloaded ahead of time: %s", name, error)

    def _download(self, name: str) -> None:
        """Download a part unless another worker has done so. The caller holds its lock."""
        path = self._path(name)
        if path.is_file():
            return
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
        """Lock a part against the other workers of this machine. Parts share 256 locks, chosen by their digests."""
        first_byte = self._files[name]["sha256"][:2]
        return locks.acquire(self._directory / f".{first_byte}.lock", poll_interval=0.01)

"""The protocol `Store` for files below a URI, and the table of its implementations.

Checkpoints, artifacts and leases depend only on `Store`. To add a storage, write a class in this directory and add a
line to `SCHEMES`.
"""

import importlib
import re
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Protocol

from infoxlm_core.errors import InputError

SCHEMES = {
    "": "components.adapters.directory:Directory",
    "s3": "components.adapters.s3.store:S3Store",
}
"""Mapping from URI scheme to storage class, as MODULE:CLASS. Classes are imported on first use."""
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+")  # a single letter would be a Windows drive


@dataclass(frozen=True)
class Entry:
    """A listed file of a storage."""

    name: str
    """Path below the storage's URI."""
    size: int
    version: str
    """Identifier that changes with the content."""
    modified: datetime
    sha256: str = ""
    """Digest passed to `upload`. `head` always returns the digest, but `entries` may not."""


class Store(Protocol):
    """Files below a URI.

    Every method raises InputError if the storage refuses, and StorageUnavailable if the storage does not answer after
    several attempts. A `quick` call gives up within seconds.
    """

    uri: str
    directory: Path | None
    """Directory of the files on this machine, or None for a remote storage, whose files must first be copied."""

    def get(self, name: str = "", quick: bool = False) -> tuple[bytes, str] | None:
        """Return the content and version of a small file, or None if it does not exist."""

    def read(self, name: str = "", start: int = 0, length: int | None = None) -> bytes:
        """Return `length` bytes of a file from the offset `start`, by default all bytes. The file may have any size."""

    def put(self, name: str, content: str | bytes) -> None:
        """Write a small file, or replace it if it exists."""

    def put_if(self, name: str, content: str | bytes, version: str | None, quick: bool = False) -> str | None:
        """Write a small file only if it still has this version, or (for None) only if it does not exist.

        Returns:
            The new version, or None if another process has changed the file.
        """

    def delete(self, *names: str) -> None:
        """Delete files. Ignore missing files."""

    def entries(self, deep: bool = True) -> list[Entry]:
        """Return all files below the URI, or with `deep=False` only the files directly below it."""

    def directories(self) -> list[str]:
        """Return the names of the directories directly below the URI, sorted."""

    def head(self, name: str = "") -> Entry | None:
        """Return the entry of a file (by default of the file at the URI), or None if the file does not exist."""

    def upload(self, path: Path, name: str, sha256: str) -> None:
        """Upload a large file with its digest."""

    def download(self, name: str, path: Path) -> None:
        """Download a file to a local path."""

    def sweep(self) -> int:
        """Remove unfinished uploads and return their number. Only the holder of a lease on the URI may call it."""


def scheme(uri: str | Path, separator: str = "://") -> str:
    """Return the scheme of a URI, or "" for a path. Use the separator ":" for sources such as `pypi:package==1.0`."""
    before, has_separator, _ = str(uri).partition(separator)
    return before if has_separator and _SCHEME.fullmatch(before) else ""


def open(uri: str | Path) -> Store:
    """Return the storage at a URI.

    Raises:
        InputError: the storage is unknown, or the URI is empty and would mean the current directory.
    """
    if not str(uri):
        raise InputError("the store has no name: give a directory, or a URI such as s3://bucket/prefix")
    if scheme(uri) not in SCHEMES:
        prefixes = ", ".join(f"{name}://" for name in SCHEMES if name)
        raise InputError(f"{uri}: unknown storage: give a directory, or a URI that begins with {prefixes}")
    # The modules of the classes import this module, so they cannot be imported at its top.
    module, _, class_name = SCHEMES[scheme(uri)].partition(":")
    return getattr(importlib.import_module(module), class_name)(str(uri))


def is_remote(uri: str | Path) -> bool:
    """Return whether files at a URI must be copied to this machine before use."""
    return open(uri).directory is None

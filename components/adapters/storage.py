"""The protocol of a storage, and the table of storages.

A storage holds files by name below a URI. Checkpoints, artifacts and leases use `Store` alone, so a new storage is a
class in a file of this folder and a line in `SCHEMES`.
"""

import importlib
import re
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Protocol

from infoxlm_core.errors import InputError

SCHEMES = {
    "": "components.adapters.directory:Directory",
    "s3": "components.adapters.s3.store:S3Store",
}
"""Scheme of a URI -> the class that opens it; imported on first use."""
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+")  # a single letter is a drive of Windows


@dataclass(frozen=True)
class Entry:
    """A file of a storage in a listing."""

    name: str
    """Path below the URI of the storage."""
    size: int
    version: str
    """Changes with the content."""
    modified: datetime
    sha256: str = ""
    """Digest that `upload` was given; `head` returns it, a listing may not."""


class Store(Protocol):
    """Files below a URI.

    Every method raises InputError if the storage refuses, and StorageUnavailable if it does not answer after several
    attempts; a `quick` call gives up within seconds.
    """

    uri: str
    directory: Path | None
    """Directory of the files on this machine; None for a remote storage, whose files must be copied to be used."""

    def get(self, name: str = "", quick: bool = False) -> tuple[bytes, str] | None:
        """Return content and version of a small file; None if it does not exist."""

    def put(self, name: str, content: str | bytes) -> None:
        """Write a small file, over any existing one."""

    def put_if(self, name: str, content: str | bytes, version: str | None, quick: bool = False) -> str | None:
        """Write a small file over this version of it, or, for None, only if it does not exist.

        Returns:
            its new version; None if another process was faster.
        """

    def delete(self, *names: str) -> None:
        """Delete files; a missing file is no error."""

    def entries(self, deep: bool = True) -> list[Entry]:
        """Return all files below the URI; with `deep=False` only those directly below it."""

    def folders(self) -> list[str]:
        """Return the names of the folders directly below the URI, sorted."""

    def head(self, name: str = "") -> Entry | None:
        """Return the entry of a file, by default of the one at the URI itself; None if it does not exist."""

    def upload(self, path: Path, name: str, sha256: str) -> None:
        """Write a large file with its digest."""

    def download(self, name: str, path: Path) -> None:
        """Copy a file to a path of this machine."""

    def sweep(self, older: timedelta = timedelta(0)) -> int:
        """Remove unfinished uploads that began at least so long ago; return their number."""


def scheme(uri: str | Path, separator: str = "://") -> str:
    """Return the text before the separator, a colon alone in sources such as `pypi:package==1.0`; "" for a path."""
    before, has_separator, _ = str(uri).partition(separator)
    return before if has_separator and _SCHEME.fullmatch(before) else ""


def open(uri: str | Path) -> Store:
    """Return the storage at a URI.

    Raises:
        InputError: there is no such storage, or the URI is empty, which would mean the current folder.
    """
    if not str(uri):
        raise InputError("the store has no name: give a directory, or a URI such as s3://bucket/prefix")
    if scheme(uri) not in SCHEMES:
        known = ", ".join(f"{name}://" for name in SCHEMES if name)
        raise InputError(f"{uri}: no storage that is known: give a directory, or a URI that begins with {known}")
    module, _, name = SCHEMES[scheme(uri)].partition(":")
    return getattr(importlib.import_module(module), name)(str(uri))


def is_remote(uri: str | Path) -> bool:
    """Whether files at a URI must be copied to this machine to be used."""
    return open(uri).directory is None

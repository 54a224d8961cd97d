"""What every storage can do, and the table of those that we have.

A storage holds files by name below a URI. Checkpoints, artifacts and leases need no more of it than `Store` says, so
another one is a class in a file of this folder and a line in `SCHEMES`.
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
"""Scheme of a URI -> the class that is opened with it; imported only when there is such a URI."""
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+")  # a single letter is a drive of Windows


@dataclass(frozen=True)
class Entry:
    """A file of a storage, as a listing shows it."""

    name: str
    """Below the URI of the storage."""
    size: int
    version: str
    """Changes with the content."""
    modified: datetime
    sha256: str = ""
    """What `upload` was told; a listing may not know it, `head` does."""


class Store(Protocol):
    """Files below a URI.

    Every method raises InputError where the storage refuses, and StorageUnavailable where it does not answer, after
    tries of its own; a `quick` call gives up within seconds.
    """

    uri: str
    directory: Path | None
    """Where the files are on this machine; None: they are elsewhere, and must be copied to be used."""

    def get(self, name: str = "", quick: bool = False) -> tuple[bytes, str] | None:
        """Content and version of a small file; None if there is none."""

    def put(self, name: str, content: str | bytes) -> None:
        """Write a small file, whatever was there."""

    def put_if(self, name: str, content: str | bytes, version: str | None, quick: bool = False) -> str | None:
        """Write a small file only over what is known to be there: this version, or nothing (None).

        Returns:
            its new version; None if somebody else was faster.
        """

    def delete(self, *names: str) -> None:
        """Delete files; one that is not there is no error."""

    def entries(self, deep: bool = True) -> list[Entry]:
        """All files below the URI, or only those that are not in folders."""

    def folders(self) -> list[str]:
        """Names of the folders directly below the URI, sorted."""

    def head(self, name: str = "") -> Entry | None:
        """What is known of one file, without a name of the one at the URI itself; None if there is none."""

    def upload(self, path: Path, name: str, sha256: str) -> None:
        """Write a large file, and its digest."""

    def download(self, name: str, path: Path) -> None:
        """Copy a file to a path of this machine."""

    def sweep(self, older: timedelta = timedelta(0)) -> int:
        """Remove what uploads that were begun at least so long ago have left unfinished; return how many."""


def scheme(uri: str | Path, separator: str = "://") -> str:
    """What stands before the separator, a colon alone in sources such as `pypi:package==1.0`; a path has none."""
    before, found, _ = str(uri).partition(separator)
    return before if found and _SCHEME.fullmatch(before) else ""


def open(uri: str | Path) -> Store:
    """The storage at a URI: the one place that decides by scheme.

    Raises:
        InputError: there is no such storage, or no name at all, which would be the folder that one happens to be in.
    """
    if not str(uri):
        raise InputError("the store has no name: give a directory, or a URI such as s3://bucket/prefix")
    if scheme(uri) not in SCHEMES:
        known = ", ".join(f"{name}://" for name in SCHEMES if name)
        raise InputError(f"{uri}: no storage that is known: give a directory, or a URI that begins with {known}")
    module, _, name = SCHEMES[scheme(uri)].partition(":")
    return getattr(importlib.import_module(module), name)(str(uri))


def is_remote(uri: str | Path) -> bool:
    """Whether what is stored there must be copied to be used."""
    return open(uri).directory is None

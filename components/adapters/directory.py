"""A local or shared directory as a storage."""

import contextlib
import os
import shutil
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory

from components.adapters.storage import Entry
from infoxlm_core import locks, manifests


class Directory:
    """A `Store` in a directory. File system errors are raised as OSError.

    Each write creates a new file, so a file's inode and modification time serve as its version.
    """

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self.directory = Path(uri)

    def get(self, name: str = "", quick: bool = False) -> tuple[bytes, str] | None:  # noqa: ARG002 - a disk has no time limits
        path = self._path(name)
        if not path.is_file():
            return None
        with contextlib.suppress(FileNotFoundError), path.open("rb") as file:  # another process may delete the file
            # Even if another process replaces the file now, this is the version of the content that is read.
            return file.read(), _version(os.fstat(file.fileno()))
        return None

    def read(self, name: str = "", start: int = 0, length: int | None = None) -> bytes:
        with self._path(name).open("rb") as file:
            file.seek(start)
            return file.read(-1 if length is None else length)

    def put(self, name: str, content: str | bytes) -> None:
        path = self._path(name)
        manifests.make_directory(path.parent)
        manifests.write_atomically(path, content)

    def put_if(self, name: str, content: str | bytes, version: str | None, quick: bool = False) -> str | None:
        """Write a file only if its version is still `version`, or (for None) only if it does not exist."""
        path = self._path(name)
        manifests.make_directory(path.parent)
        # A file system cannot compare and replace a file in one operation.
        with locks.acquire(path.with_name(f".{path.name}.lock")):
            _, existing_version = self.get(name, quick) or (b"", None)
            if existing_version != version:
                return None
            self.put(name, content)
            return _version(path.stat())

    def delete(self, *names: str) -> None:
        for name in names:
            self._path(name).unlink(missing_ok=True)

    def entries(self, deep: bool = True) -> list[Entry]:
        paths: list[Path] = []
        for directory, _, names in os.walk(self.directory):  # unlike `rglob`, it skips a directory that disappears
            paths += [Path(directory, name) for name in names]
            if not deep:
                break
        entries = []
        for path in sorted(paths):
            is_temporary = path.name.startswith(".") and path.suffix in (".lock", ".tmp")  # a write is in progress
            if path.is_file() and not is_temporary:
                with contextlib.suppress(FileNotFoundError):  # another process may delete the file at any time
                    entries.append(self._entry(str(path.relative_to(self.directory))))
        return entries

    def directories(self) -> list[str]:
        return sorted(path.name for path in self.directory.glob("*") if path.is_dir())

    def head(self, name: str = "") -> Entry | None:
        path = self._path(name)
        if not path.is_file():
            return None
        return replace(self._entry(name), sha256=manifests.file_sha256(path))

    def upload(self, path: Path, name: str, sha256: str) -> None:  # noqa: ARG002 - `head` computes it
        final_path = self._path(name)
        final_path.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=".upload-", dir=final_path.parent) as scratch:
            temporary_path = Path(scratch) / "file"
            shutil.copyfile(path, temporary_path)
            manifests.sync_file(temporary_path)  # otherwise, a power failure could leave an empty file of this name
            temporary_path.replace(final_path)  # atomic, so that readers never see a partial file

    def download(self, name: str, path: Path) -> None:
        shutil.copyfile(self._path(name), path)

    def sweep(self) -> int:
        return 0  # an unfinished upload leaves nothing

    def _path(self, name: str) -> Path:
        return manifests.join_inside(self.directory, name) if name else self.directory

    def _entry(self, name: str) -> Entry:
        status = self._path(name).stat()
        return Entry(name, status.st_size, _version(status), datetime.fromtimestamp(status.st_mtime, UTC))


def _version(status: os.stat_result) -> str:
    """Return a file's version: its inode and modification time. An inode alone is not unique over time."""
    return f"{status.st_ino:x}-{status.st_mtime_ns:x}"

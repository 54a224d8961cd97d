"""Simulate power cuts: the states of a folder on disk before and after each fsync.

Two kinds of disk bound what a real disk does. A lazy disk has written only what was synced: the bytes of synced files
and the names in synced folders. A hasty disk has written all names, but only the bytes of synced files; a file system
that journals names alone behaves like this.
"""

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

Names = dict[int, dict[str, int]]
"""Inode of a folder -> its entries: name -> inode."""


@dataclass(frozen=True)
class Cut:
    """The state of the disks at one moment, and what had been acknowledged as saved by then."""

    acknowledged: tuple[object, ...]
    bytes_of: dict[int, bytes]
    lazy: Names
    hasty: Names

    def restore(self, root: int, target: Path, names: Names) -> None:
        """Create a folder with the content that the disk would have after the power cut.

        Args:
            root: inode of the recorded folder.
            target: the folder to create.
            names: the entries of all folders, `lazy` or `hasty`.
        """
        target.mkdir()
        for name, inode in names.get(root, {}).items():
            if inode in self.hasty or inode in names:  # a folder, of which a lazy disk may know no entries
                self.restore(inode, target / name, names)
            else:
                (target / name).write_bytes(self.bytes_of.get(inode, b""))


@dataclass
class Disk:
    """Records the fsyncs below a folder that is on the disk already."""

    root: Path
    cuts: list[Cut] = field(default_factory=list)
    acknowledged: list[object] = field(default_factory=list)
    _bytes: dict[int, bytes] = field(default_factory=dict)
    _names: Names = field(default_factory=dict)
    _open: list[int] = field(default_factory=list)

    def acknowledge(self, value: object) -> None:
        """Record that this value was acknowledged as saved; it must survive every later power cut."""
        self.acknowledged.append(value)
        self._cut()

    def _cut(self) -> None:
        hasty = {}
        for folder, _, _ in os.walk(self.root):
            hasty[Path(folder).stat().st_ino] = {entry.name: entry.inode() for entry in os.scandir(folder)}
        self.cuts.append(Cut(tuple(self.acknowledged), dict(self._bytes), dict(self._names), hasty))

    def _synced(self, descriptor: int) -> None:
        """Record the fsync of a file or folder, and a power cut before and after it."""
        status = os.fstat(descriptor)
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        if not path.is_relative_to(self.root):
            return
        self._cut()  # just before the fsync
        if stat.S_ISDIR(status.st_mode):
            self._names[status.st_ino] = {entry.name: entry.inode() for entry in os.scandir(path)}
        else:
            self._bytes[status.st_ino] = path.read_bytes()
        self._open.append(os.dup(descriptor))  # keep the inode from being reused
        self._cut()

    def remains(self, folder: Path) -> Iterator[tuple[tuple[object, ...], Path]]:
        """Yield, for each cut and disk, what had been acknowledged and a folder with the content of the disk."""
        root = self.root.stat().st_ino
        for number, cut in enumerate(self.cuts):
            for kind, names in (("lazy", cut.lazy), ("hasty", cut.hasty)):
                cut.restore(root, folder / f"{number}-{kind}", names)
                yield cut.acknowledged, folder / f"{number}-{kind}"


@contextmanager
def recorded(root: Path, setattr: Callable[[object, str, object], None]) -> Iterator[Disk]:
    """Record fsyncs while the block runs; `setattr` is that of pytest's monkeypatch."""
    disk = Disk(root)
    fsync = os.fsync

    def recording(file: object) -> None:
        descriptor = file if isinstance(file, int) else file.fileno()
        fsync(descriptor)
        disk._synced(descriptor)

    setattr(os, "fsync", recording)
    try:
        yield disk
    finally:
        setattr(os, "fsync", fsync)
        for descriptor in disk._open:
            os.close(descriptor)

"""A disk whose power may fail: what of a folder would be left after any of its fsyncs, and just before the next one.

Two disks bound what a real one does. A *lazy* one has written nothing but what was asked for: the bytes of a file that
was synced, the names in a folder that was. A *hasty* one has written all names, and of bytes only what was asked for:
that is how a journal of names alone behaves.
"""

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

Names = dict[int, dict[str, int]]  # folder -> its entries, all by inode


@dataclass(frozen=True)
class Cut:
    """What was on the disk at one moment, and what had been said to be saved by then."""

    said: tuple[object, ...]
    bytes_of: dict[int, bytes]
    lazy: Names
    hasty: Names

    def restore(self, root: int, target: Path, names: Names) -> None:
        target.mkdir()
        for name, inode in names.get(root, {}).items():
            if inode in self.hasty or inode in names:  # a folder; a lazy disk may know nothing of what is in it
                self.restore(inode, target / name, names)
            else:
                (target / name).write_bytes(self.bytes_of.get(inode, b""))


@dataclass
class Disk:
    """Records what happens below a folder that is on the disk already."""

    root: Path
    cuts: list[Cut] = field(default_factory=list)
    said: list[object] = field(default_factory=list)
    _bytes: dict[int, bytes] = field(default_factory=dict)
    _names: Names = field(default_factory=dict)
    _open: list[int] = field(default_factory=list)

    def say(self, what: object) -> None:
        """From now on this must be there."""
        self.said.append(what)
        self._cut()

    def _cut(self) -> None:
        hasty = {}
        for folder, _, _ in os.walk(self.root):
            hasty[Path(folder).stat().st_ino] = {entry.name: entry.inode() for entry in os.scandir(folder)}
        self.cuts.append(Cut(tuple(self.said), dict(self._bytes), dict(self._names), hasty))

    def _synced(self, descriptor: int) -> None:
        found, path = os.fstat(descriptor), Path(f"/proc/self/fd/{descriptor}").readlink()
        if not path.is_relative_to(self.root):
            return
        self._cut()  # just before it
        if stat.S_ISDIR(found.st_mode):
            self._names[found.st_ino] = {entry.name: entry.inode() for entry in os.scandir(path)}
        else:
            self._bytes[found.st_ino] = path.read_bytes()
        self._open.append(os.dup(descriptor))  # its number is given to no other file
        self._cut()

    def remains(self, folder: Path) -> Iterator[tuple[tuple[object, ...], Path]]:
        """For each cut and disk what had been said, and a folder as it would be found."""
        root = self.root.stat().st_ino
        for number, cut in enumerate(self.cuts):
            for kind, names in (("lazy", cut.lazy), ("hasty", cut.hasty)):
                cut.restore(root, folder / f"{number}-{kind}", names)
                yield cut.said, folder / f"{number}-{kind}"


@contextmanager
def recorded(root: Path, setattr: Callable[[object, str, object], None]) -> Iterator[Disk]:
    """Record while the block runs; `setattr` is that of pytest's monkeypatch."""
    disk, fsync = Disk(root), os.fsync

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
